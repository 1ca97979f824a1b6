"""FSDP2: places of its gradients, and gradients that it has not reduced yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel

from zbpipe.runtime._torch.autograd import has_hooks_after_accumulation


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
    """The modules in `module` on which `fully_shard` or FSDP2's `replicate` was called."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def free_all(module: nn.Module) -> None:
    """Free the gathered parameters of all FSDP2 modules in `module`."""
    for part in list_parts(module):
        part.reshard()


def reduces_in_hooks(module: nn.Module) -> bool:
    """Whether DistributedDataParallel, or the composable `replicate` around it, reduces the gradients."""
    return isinstance(module, (DistributedDataParallel, DDP))


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard`, or the `replicate` that is built on it, was called on this very module."""
    return isinstance(module, FSDPModule)


def owes_reduction(module: nn.Module) -> bool:
    """Whether FSDP2 still has to reduce gradients in `module`."""
    return any(
        each._unsharded_param.grad is not None or getattr(each, "unsharded_accumulated_grad", None) is not None
        for group in list_groups(module)
        if group.reduce_grads
        for each in list_unsharded(group)
    )


def settle_gradients(module: nn.Module) -> None:
    """Pass gradients that W has added to the `.grad` of unsharded parameters to FSDP2."""
    for group in list_groups(module):
        settle_group(group)


def settle_group(group: Any) -> None:
    """The same for one of FSDP2's groups of parameters."""
    # Older versions (torch 2.13) take them only at the end of a backward. They keep the sum in a separate attribute, in
    # the dtype of the reduction.
    if _HAS_SEPARATE_SUMS:
        for parameter in list_unsharded(group):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def find_separate_sums(module: nn.Module) -> dict[int, Tensor]:
    """Sums that `settle_gradients` keeps outside `.grad`, by the ids of the weights. W adds to them directly."""
    sums = ((each._unsharded_param, each.unsharded_accumulated_grad) for each in _list_with_separate_sums(module))
    return {id(weight): total for weight, total in sums if total is not None}


_HAS_SEPARATE_SUMS = hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed")


def _list_parameters(module: nn.Module) -> Iterator[Any]:
    """FSDP2's objects for the parameters in `module` that were unsharded at least once."""
    for group in list_groups(module):
        yield from list_unsharded(group)


def _index_parameters(module: nn.Module) -> dict[int, Any]:
    """FSDP2's objects in `module`, by the ids of each one's two parameters."""
    return {id(own): each for each in _list_parameters(module) for own in (each.sharded_param, each._unsharded_param)}


def list_unsharded(group: Any) -> Iterator[Any]:
    """FSDP2's objects for the parameters of a group that were unsharded at least once."""
    return (each for each in group.fsdp_params if hasattr(each, "_unsharded_param"))


def list_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters of all modules in `module`."""
    for part in list_parts(module):
        yield from groups_of(part._get_fsdp_state())


def groups_of(state: Any) -> tuple[Any, ...]:
    """FSDP2's groups of parameters of one module, one for each mesh."""
    # torch 2.11 has at most one group.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return tuple(filter(None, groups))


REDUCED = " (reduced)"


class Accumulated(NamedTuple):
    """The gradient of one parameter so far."""

    name: str
    """Name of the parameter. The suffix `REDUCED` marks the part that data-parallel ranks have already reduced."""
    parameter: Tensor
    gradient: Tensor


def iterate_accumulated(module: nn.Module) -> Iterator[Accumulated]:
    """The gradients so far, wherever stored. FSDP2 may have both unreduced and reduced gradients of one parameter."""
    views = _index_parameters(module)
    separate = find_separate_sums(module)
    for name, parameter in module.named_parameters():
        fsdp = views.get(id(parameter))
        leaves = {name: parameter}
        if fsdp is not None:
            leaves = {name: fsdp._unsharded_param, name + REDUCED: fsdp.sharded_param}
        for place, leaf in leaves.items():
            parts = [each for each in (leaf.grad, separate.get(id(leaf))) if each is not None]
            if parts:
                yield Accumulated(place, leaf, sum(parts[1:], parts[0]))


def find_kept_gradients(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Gradients of earlier steps in `.grad`, one per parameter, whether FSDP2 has gathered it or not."""
    kept: dict[int, Tensor] = {}
    for module in modules:
        for each in (*module.parameters(), *(fsdp.sharded_param for fsdp in _list_parameters(module))):
            if each.grad is not None:
                kept[id(each)] = each.grad
    return list(kept.values())


def find_parameter_names(module: nn.Module) -> dict[int, str]:
    """Parameter names by object id. FSDP2 has two objects per parameter."""
    views = _index_parameters(module)
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        fsdp = views.get(id(parameter))
        for each in (parameter,) if fsdp is None else (fsdp.sharded_param, fsdp._unsharded_param):
            names.setdefault(id(each), name)
    return names


def _list_with_separate_sums(module: nn.Module) -> Iterator[Any]:
    return _list_parameters(module) if _HAS_SEPARATE_SUMS else iter(())


@contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Context without gradients and post-accumulate hooks of the parameters. Both are restored afterwards."""
    unsharded = [each for fsdp in _list_parameters(module) for each in (fsdp.sharded_param, fsdp._unsharded_param)]
    parameters = list({id(each): each for each in (*module.parameters(), *unsharded)}.values())
    kept = [(each, each.grad, dict(each._post_accumulate_grad_hooks or {})) for each in parameters]
    separate = [(each, each.unsharded_accumulated_grad) for each in _list_with_separate_sums(module)]
    for parameter in parameters:
        parameter.grad = None
        if has_hooks_after_accumulation(parameter):  # autograd keeps a reference to this dictionary
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
