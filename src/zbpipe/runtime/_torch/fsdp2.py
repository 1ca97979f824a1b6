"""FSDP2: gradients, pending reductions, and collectives that overlap a stage's computations.

torch reduces all modules of a stage in REDUCE_GRAD, after the stage's last W. `begin`, `reduce` for each unit and
`finish` do the same in pieces, so that computations can run in between. In a whole backward, FSDP2's own hooks reduce a
module as soon as its gradients are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel

from zbpipe.runtime._torch.attributes import replaced

FsdpMode = Literal["overlap", "reshard", "torch"]
"""When FSDP2's collectives run, see `zbpipe.runtime.schedules.RegisteredSchedule`."""

KNOWN = ("2.11.", "2.12.", "2.13.", "2.14.", "2.15.")
"""Versions of torch whose FSDP2 this file knows. With others, torch itself reduces."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""A name that exists from torch 2.14 on."""

IS_KNOWN = torch.__version__.startswith(KNOWN)


@contextmanager
def unshard(module: nn.Module) -> Iterator[None]:
    """Context in which all FSDP2 modules in `module` have gathered weights, as between torch's UNSHARD and RESHARD."""
    for part in list_parts(module):
        part.unshard()
    try:
        yield
    finally:
        free_all(module)


def list_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def free_all(module: nn.Module) -> None:
    for part in list_parts(module):
        part.reshard()


def reduces_in_hooks(module: nn.Module) -> bool:
    """Whether DistributedDataParallel, or the composable `replicate` around it, reduces the gradients."""
    return isinstance(module, (DistributedDataParallel, DDP))


def is_fsdp(module: nn.Module) -> bool:
    """Whether this very module has `fully_shard` or the `replicate` built on it."""
    return isinstance(module, FSDPModule)


def owes_reduction(module: nn.Module) -> bool:
    return any(
        each._unsharded_param.grad is not None or getattr(each, "unsharded_accumulated_grad", None) is not None
        for group in list_groups(module)
        if group.reduce_grads
        for each in list_unsharded(group)
    )


def settle(parameters: Iterable[Any]) -> None:
    """Pass gradients that W has added to the `.grad` of these unsharded parameters to FSDP2."""
    # It takes them only at the end of a backward, and keeps the sum in a separate attribute, in the dtype of the
    # reduction.
    for each in parameters:
        each.accumulate_unsharded_grad_if_needed()
        each.to_accumulated_grad_if_needed()


def find_separate_sums(parameters: Iterable[Any]) -> dict[int, Tensor]:
    """Sums that `settle` keeps outside `.grad`, by the ids of the weights. W adds to them directly."""
    sums = ((each._unsharded_param, each.unsharded_accumulated_grad) for each in parameters)
    return {id(weight): total for weight, total in sums if total is not None}


_HAS_SEPARATE_SUMS = hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed")


def _list_parameters(module: nn.Module) -> Iterator[Any]:
    """FSDP2's objects for those parameters in `module` that were unsharded at least once."""
    for group in list_groups(module):
        yield from list_unsharded(group)


def _name_leaves(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that get gradients, by parameter name: two for a parameter that FSDP2 has unsharded."""
    views = {id(own): each for each in _list_parameters(module) for own in (each.sharded_param, each._unsharded_param)}
    for name, parameter in module.named_parameters():
        if (fsdp := views.get(id(parameter))) is None:
            yield name, parameter
        else:
            yield name, fsdp._unsharded_param
            yield name + REDUCED, fsdp.sharded_param


def list_unsharded(group: Any) -> Iterator[Any]:
    """FSDP2's objects for those parameters of a group that were unsharded at least once."""
    return (each for each in group.fsdp_params if hasattr(each, "_unsharded_param"))


def list_groups(module: nn.Module) -> Iterator[Any]:
    for part in list_parts(module):
        yield from groups_of(part._get_fsdp_state())


def groups_of(state: Any) -> tuple[Any, ...]:
    """FSDP2's groups of parameters of one module, one for each mesh. torch 2.11 has at most one."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return tuple(filter(None, groups))


REDUCED = " (reduced)"


class Accumulated(NamedTuple):
    name: str
    """The parameter's name. The suffix `REDUCED` marks the part that data-parallel ranks have already reduced."""
    parameter: Tensor
    gradient: Tensor


def iterate_accumulated(module: nn.Module) -> Iterator[Accumulated]:
    """All gradients so far. FSDP2 may have both unreduced and reduced gradients of a parameter."""
    separate = find_separate_sums(list_with_separate_sums(module))
    for name, leaf in _name_leaves(module):
        parts = [each for each in (leaf.grad, separate.get(id(leaf))) if each is not None]
        if parts:
            yield Accumulated(name, leaf, sum(parts[1:], parts[0]))


def find_kept_gradients(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Gradients of earlier steps in `.grad`, one per parameter, gathered or not."""
    kept: dict[int, Tensor] = {}
    for module in modules:
        for each in (*module.parameters(), *(fsdp.sharded_param for fsdp in _list_parameters(module))):
            if each.grad is not None:
                kept[id(each)] = each.grad
    return list(kept.values())


def find_parameter_names(module: nn.Module) -> dict[int, str]:
    """Parameter names by object id. FSDP2 has two objects per parameter."""
    return {id(leaf): name.removesuffix(REDUCED) for name, leaf in _name_leaves(module)}


def list_with_separate_sums(module: nn.Module) -> list[Any]:
    """FSDP2's objects for the parameters in `module` whose sums it keeps outside `.grad`."""
    return list(_list_parameters(module)) if _HAS_SEPARATE_SUMS else []


def index_separate_sums(module: nn.Module) -> dict[int, Any]:
    """The same by the ids of the weights that get the gradients."""
    return {id(each._unsharded_param): each for each in list_with_separate_sums(module)}


@contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Context without the parameters' gradients and post-accumulate hooks."""
    unsharded = [each for fsdp in _list_parameters(module) for each in (fsdp.sharded_param, fsdp._unsharded_param)]
    parameters = list({id(each): each for each in (*module.parameters(), *unsharded)}.values())
    kept = [(each, each.grad, dict(each._post_accumulate_grad_hooks or {})) for each in parameters]
    separate = [(each, each.unsharded_accumulated_grad) for each in list_with_separate_sums(module)]
    for parameter in parameters:
        parameter.grad = None
        if parameter._post_accumulate_grad_hooks:  # autograd keeps a reference to this dictionary
            parameter._post_accumulate_grad_hooks.clear()
    for fsdp, _ in separate:
        fsdp.unsharded_accumulated_grad = None
    try:
        yield
    finally:
        for parameter, gradient, hooks in kept:
            parameter.grad = gradient
            if hooks:
                parameter._post_accumulate_grad_hooks.update(hooks)
        for fsdp, gradient in separate:
            fsdp.unsharded_accumulated_grad = gradient


def mark_gradients(module: nn.Module) -> dict[int, object]:
    """For each parameter by its id, gathered or not, a mark that changes with its gradient."""
    separate = find_separate_sums(list_with_separate_sums(module))
    marks: dict[int, object] = {}
    for _, each in _name_leaves(module):
        parts = (each.grad, separate.get(id(each)))
        marks[id(each)] = tuple((id(part), part._version) for part in parts if part is not None)
    return marks


class Unit(NamedTuple):
    """The parameters whose gradients FSDP2 reduces together: those of one `fully_shard` or `replicate`."""

    groups: tuple[Any, ...]
    """FSDP2's groups, one for each mesh."""
    parameters: frozenset[int]
    """Ids of the parameters, sharded and gathered. The gathered ones get the gradients."""
    elements: int


def list_units(module: nn.Module) -> list[Unit]:
    """The units of a stage that is itself an FSDP module, in order of its modules."""
    # torch 2.11 lists the state of `fully_shard([norm, output])` once for each of these modules.
    of_states = dict.fromkeys(map(groups_of, _state_of(module)._state_ctx.all_states))
    return [_make_unit(groups) for groups in of_states if groups]


def begin(module: nn.Module) -> None:
    """Let FSDP2 reduce and free gathered parameters from now on, as in a step's last backward."""
    fsdp: Any = module
    fsdp.set_is_last_backward(True)
    fsdp.set_reshard_after_backward(True)
    fsdp.set_requires_gradient_sync(True)
    # By default FSDP2 delays computations before each reduction until the last one has released its buffer. Buffers
    # replace gradients of the same size, so more of them need no more memory. (Symmetric memory has only one.)
    groups = list(list_groups(module))
    if all(isinstance(group._reduce_scatter_comm, DefaultReduceScatter) for group in groups):
        _state_of(module)._comm_ctx.reduce_scatter_max_input_buffers = max(len(groups), 1)


@contextmanager
def reducing_backward(module: nn.Module) -> Iterator[None]:
    """Context of a whole backward in which FSDP2 reduces, without a wait for the reductions at its end."""
    begin(module)
    module.set_is_last_backward(False)  # type: ignore[operator]
    forget_prefetch(module)
    of_stage = _state_of(module)._state_ctx
    manual = "manual_backward_finalization_active"
    # torch 2.15 would reduce modules whose inputs need no gradient only at the end of the step.
    with replaced(of_stage, **{manual: False}) if hasattr(of_stage, manual) else nullcontext():
        yield


def forget_prefetch(module: nn.Module) -> None:
    """Let the first module of a stage prefetch nothing in the next backward."""
    # A module gathers the one that ran before it: here the last one of another microbatch, already freed.
    ran = [group for group in list_groups(module) if group._post_forward_indices]
    if ran:
        min(ran, key=lambda group: min(group._post_forward_indices))._post_forward_indices.clear()


def reduce(unit: Unit) -> None:
    """Start the reduction of the unit's gradients on FSDP2's streams, and free its gathered parameters."""
    # FSDP2 expects the last group of a module first.
    for group in reversed(unit.groups):
        settle(list_unsharded(group) if _HAS_SEPARATE_SUMS else ())
        group.post_backward()


def finish(module: nn.Module) -> None:
    fsdp: Any = module
    fsdp.set_is_last_backward(True)
    if hasattr(fsdp, "finalize_backward"):  # from torch 2.15 on
        fsdp.finalize_backward()
        fsdp.set_manual_backward_finalization(False)
    else:
        _state_of(module)._root_post_backward_final_callback()


def _state_of(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def _make_unit(groups: tuple[Any, ...]) -> Unit:
    gathered = (each for group in groups for each in list_unsharded(group))
    ids = frozenset(id(own) for each in gathered for own in (each.sharded_param, each._unsharded_param))
    return Unit(groups, ids, sum(_count_elements(_list_trained(group)) for group in groups))


def _list_trained(group: Any) -> list[Any]:
    """FSDP2's objects for those parameters of a group that get gradients."""
    return [each for each in list_unsharded(group) if each._unsharded_param.requires_grad]


def _count_elements(trained: Sequence[Any]) -> int:
    return sum(each._orig_size.numel() for each in trained)


def describe(mode: FsdpMode, modules: Iterable[nn.Module]) -> str:
    """When FSDP2 gathers, frees and reduces these stages, as text."""
    groups = [group for module in modules if is_fsdp(module) for group in list_groups(module)]
    at_ends = "gathers during a stage's first F, reductions during its last W or B"
    if mode == "torch" or not IS_KNOWN:
        why = "" if IS_KNOWN else f" (zbpipe does not know the FSDP2 of torch {torch.__version__})"
        at_ends = f"gathers before a stage's first F, reductions after its last W or B{why}"
    elif mode == "reshard":
        return "FSDP: each module gathers for each F and backward, and then frees; reductions during the last W or B"
    freed = sum(group._reshard_after_forward for group in groups)
    return f"FSDP: {at_ends}; {freed} of {len(groups)} modules free their parameters after F (reshard_after_forward)"


@contextmanager
def resharding(module: nn.Module) -> Iterator[None]:
    """Context of a step in which each module gathers its parameters for each F and backward, then frees them."""
    gathered_later = SimpleNamespace(wait=lambda: None)
    fsdp: Any = module
    fsdp.set_reshard_after_backward(True)
    with ExitStack() as around:
        for part in list_parts(module):
            if all(isinstance(group.mesh_info, FSDPMeshInfo) for group in groups_of(part._get_fsdp_state())):
                part.set_reshard_after_forward(True, recurse=False)
                around.enter_context(replaced(part, unshard=lambda **_: gathered_later))
        # torch calls this before each backward, to keep the parameters.
        around.enter_context(replaced(module, set_reshard_after_backward=lambda _: forget_prefetch(module)))
        yield


def is_shared(module: nn.Module) -> bool:
    return is_fsdp(module) and any(group.mesh_info.mesh.size() > 1 for group in list_groups(module))


def gather_all(module: nn.Module) -> None:
    """Gather all parameters of a stage, as torch's UNSHARD, for measurements between two steps."""
    free_all(module)
    handles = [part.unshard(async_op=True) for part in list_parts(module)]
    for each in filter(None, handles):
        each.wait()


def reduce_zeros(module: nn.Module, device: torch.device) -> None:
    """Reduce zeros of the size of the stage's gradients, in FSDP2's groups."""
    for unit in list_units(module):
        for group in unit.groups:
            if trained := _list_trained(group):
                _reduce_zeros(group, _count_elements(trained), group._reduce_dtype or trained[0].orig_dtype, device)


def _reduce_zeros(group: Any, elements: int, dtype: torch.dtype, device: torch.device) -> None:
    part = elements
    if isinstance(group.mesh_info, FSDPMeshInfo):
        process_group = group._reduce_scatter_process_group
        part = -(-elements // process_group.size())
        whole = torch.zeros(part * process_group.size(), dtype=dtype, device=device)
        _reduce_scatter(torch.empty_like(whole[:part]), whole, group=process_group)
    if isinstance(group.mesh_info, DDPMeshInfo):
        dist.all_reduce(torch.zeros(part, dtype=dtype, device=device), group=group._all_reduce_process_group)
