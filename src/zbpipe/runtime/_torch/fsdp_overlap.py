"""FSDP2's collectives beside the computations of a stage, one FSDP module at a time.

torch reduces all modules of a stage in REDUCE_GRAD, after the stage's last W. `begin`, `reduce` for each unit and
`finish` together do the same, so that the caller can compute between them. In a whole backward, FSDP2's own hooks
reduce a module as soon as its gradients are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.fsdp import (
    free_all,
    groups_of,
    is_fsdp,
    list_groups,
    list_parts,
    list_unsharded,
    settle_group,
)

FsdpMode = Literal["overlap", "reshard", "torch"]
"""When FSDP2's collectives run, see `zbpipe.runtime.schedules.RegisteredSchedule`."""

KNOWN = ("2.11.", "2.12.", "2.13.", "2.14.", "2.15.")
"""Versions of torch whose FSDP2 this file knows. With others, torch itself reduces."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""A new name, from torch 2.14 on."""

IS_KNOWN = torch.__version__.startswith(KNOWN)


class Unit(NamedTuple):
    """The parameters of one `fully_shard`, or of one `replicate`, with gradients that FSDP2 reduces together."""

    groups: tuple[Any, ...]
    """FSDP2's groups, one for each mesh."""
    parameters: frozenset[int]
    """Ids of the parameters, both the sharded and the gathered ones, which get the gradients."""
    elements: int
    """Number of elements of all gradients."""


def list_units(module: nn.Module) -> list[Unit]:
    """The units of a stage that is an FSDP module itself, in the order of its modules."""
    # torch 2.11 lists the state of `fully_shard([norm, output])` once for each of these modules.
    of_states = dict.fromkeys(map(groups_of, _state_of(module)._state_ctx.all_states))
    return [_make_unit(groups) for groups in of_states if groups]


def begin(module: nn.Module) -> None:
    """Make FSDP2 reduce and free the gathered parameters from now on, as in a step's last backward."""
    fsdp: Any = module
    fsdp.set_is_last_backward(True)
    fsdp.set_reshard_after_backward(True)
    fsdp.set_requires_gradient_sync(True)
    # By default FSDP2 stops the computations before each reduction until the last one has released its buffer. Buffers
    # replace gradients of the same size, so more of them need no more memory. (Symmetric memory has only one.)
    groups = list(list_groups(module))
    if all(isinstance(group._reduce_scatter_comm, DefaultReduceScatter) for group in groups):
        _state_of(module)._comm_ctx.reduce_scatter_max_input_buffers = max(len(groups), 1)


@contextmanager
def reducing_backward(module: nn.Module) -> Iterator[None]:
    """Context of a whole backward in which FSDP2 reduces, and at whose end it does not wait for the reductions."""
    begin(module)
    module.set_is_last_backward(False)  # type: ignore[operator]
    forget_prefetch(module)
    of_stage = _state_of(module)._state_ctx
    manual = "manual_backward_finalization_active"
    # torch 2.15 would leave modules whose inputs need no gradient to the end of the step.
    with replaced(of_stage, **{manual: False}) if hasattr(of_stage, manual) else nullcontext():
        yield


def forget_prefetch(module: nn.Module) -> None:
    """Have the first module of a stage prefetch nothing in the next backward."""
    # In a backward each module gathers what ran before it. Before the first one, that is another microbatch's last one,
    # which this backward has already freed.
    ran = [group for group in list_groups(module) if group._post_forward_indices]
    if ran:
        min(ran, key=lambda group: min(group._post_forward_indices))._post_forward_indices.clear()


def reduce(unit: Unit) -> None:
    """Start the reduction of the unit's gradients, on FSDP2's own streams, and free its gathered parameters."""
    # FSDP2 expects the last group of a module first.
    for group in reversed(unit.groups):
        settle_group(group)
        group.post_backward()


def finish(module: nn.Module) -> None:
    """Have the current stream wait for the reductions."""
    fsdp: Any = module
    fsdp.set_is_last_backward(True)
    if hasattr(fsdp, "finalize_backward"):  # from torch 2.15 on; stages ask for it in their backward
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
    """FSDP2's objects for the parameters of a group that get gradients."""
    return [each for each in list_unsharded(group) if each._unsharded_param.requires_grad]


def _count_elements(trained: Sequence[Any]) -> int:
    return sum(each._orig_size.numel() for each in trained)


def describe(mode: FsdpMode, modules: Iterable[nn.Module]) -> str:
    """When FSDP2 gathers, frees and reduces these stages, in words; empty without FSDP2."""
    groups = [group for module in modules if is_fsdp(module) for group in list_groups(module)]
    if not groups:
        return ""
    at_ends = "gathers beside a stage's first F, reductions beside its last W or B"
    if mode == "torch" or not IS_KNOWN:
        why = "" if IS_KNOWN else f" (zbpipe does not know the FSDP2 of torch {torch.__version__})"
        at_ends = f"gathers before a stage's first F, reductions after its last W or B{why}"
    elif mode == "reshard":
        return "FSDP: each module gathers for each F and backward, and then frees; reductions beside the last W or B"
    freed = sum(group._reshard_after_forward for group in groups)
    return f"FSDP: {at_ends}; {freed} of {len(groups)} modules free their parameters after F (reshard_after_forward)"


@contextmanager
def resharding(module: nn.Module) -> Iterator[None]:
    """Context of a step in which each module gathers its parameters for each F and backward, and then frees them."""
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


@contextmanager
def without_overlap(works: Sequence[Any]) -> Iterator[None]:
    """Context in which FSDP2 gathers and reduces as in torch, so that W leaves gradients in gathered parameters."""
    with ExitStack() as around:
        for work in works:
            around.enter_context(replaced(work, fsdp_mode="torch"))
        yield


def is_shared(module: nn.Module) -> bool:
    """Whether several data-parallel ranks share the stage's parameters or gradients."""
    units = list_units(module) if is_fsdp(module) else []
    return any(group.mesh_info.mesh.size() > 1 for unit in units for group in unit.groups)


def gather_all(module: nn.Module) -> None:
    """Gather all parameters of a stage, as torch does in UNSHARD. For measurements, between two steps."""
    free_all(module)
    handles = [part.unshard(async_op=True) for part in list_parts(module)]
    for each in filter(None, handles):
        each.wait()


def reduce_zeros(module: nn.Module, device: torch.device) -> None:
    """Reduce tensors of the size of the stage's gradients, in the groups in which FSDP2 reduces these."""
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
