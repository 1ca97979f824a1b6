"""FSDP2's collectives beside the computations of a stage, one FSDP module at a time.

torch reduces all modules of a stage in REDUCE_GRAD, after the stage's last W. `begin`, `reduce` for each unit and
`finish` together do the same, so that the caller can compute between them. In a whole backward, FSDP2's own hooks
reduce a module as soon as its gradients are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from zbpipe.runtime._torch.fsdp import free_all, groups_of, is_fsdp, list_parts, list_unsharded, settle_group
from zbpipe.runtime.attributes import replaced

FsdpMode = Literal["overlap", "torch"]
"""When FSDP2's collectives run. "overlap": a stage's first F runs while FSDP2 still gathers its later modules, and in
its last W or B a module is reduced as soon as its gradients are complete. "torch": the first F waits for all modules of
the stage, and all are reduced after the last W or B."""

KNOWN = ("2.11.", "2.12.", "2.13.", "2.14.", "2.15.")
"""Versions of torch whose FSDP2 this file knows. With others, torch itself reduces."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""A new name, from torch 2.14 on."""

IS_KNOWN = torch.__version__.startswith(KNOWN)


REDUCES_IN_BACKWARD = not hasattr(FSDPModule, "finalize_backward")
"""Whether FSDP2's hooks may reduce in a stage's last B. Not tried with torch 2.15, which has another end of a step."""


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


def begin_backward(module: nn.Module) -> None:
    """The same for a whole backward, at whose end FSDP2 does not wait for the reductions."""
    begin(module)
    module.set_is_last_backward(False)  # type: ignore[operator]
    # In a backward each module gathers what ran before it. Before the first one, that is another microbatch's last one,
    # which this backward has already freed.
    groups = [group for state in _state_of(module)._state_ctx.all_states for group in groups_of(state)]
    ran = [group for group in groups if group._post_forward_indices]
    if ran:
        min(ran, key=lambda group: min(group._post_forward_indices))._post_forward_indices.clear()


def reduce(unit: Unit) -> None:
    """Start the reduction of the unit's gradients, on FSDP2's own streams, and free its gathered parameters."""
    # FSDP2 first waits for the reduction before this one, unless `set_reduce_scatter_max_input_buffers` lets more of
    # them hold their buffers. It does so at the last group of a module, which it expects first.
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


@contextmanager
def without_overlap(stages: Sequence[Any]) -> Iterator[None]:
    """Context in which FSDP2 gathers and reduces as in torch, so that W leaves gradients in gathered parameters."""
    with ExitStack() as around:
        for stage in stages:
            around.enter_context(replaced(stage, fsdp_mode="torch"))
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
