"""FSDP2's reduction of a stage's gradients, one FSDP module at a time.

torch reduces all modules of a stage in REDUCE_GRAD, after the stage's last W. `begin`, `reduce` for each unit and
`finish` together do the same, so that the caller can compute between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from zbpipe.runtime._torch.fsdp import groups_of, list_unsharded, settle_group

KNOWN = ("2.11.", "2.12.", "2.13.", "2.14.", "2.15.")
"""Versions of torch whose FSDP2 this file knows. With others, torch itself reduces."""

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
    if hasattr(fsdp, "finalize_backward"):  # from torch 2.15 on; stages ask for it in their backward
        fsdp.finalize_backward()
        fsdp.set_manual_backward_finalization(False)
    else:
        _state_of(module)._root_post_backward_final_callback()


def _state_of(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def _make_unit(groups: tuple[Any, ...]) -> Unit:
    gathered = [each for group in groups for each in list_unsharded(group)]
    trained = [each for each in gathered if each._unsharded_param.requires_grad]
    ids = frozenset(id(own) for each in gathered for own in (each.sharded_param, each._unsharded_param))
    return Unit(groups, ids, sum(each._orig_size.numel() for each in trained))
