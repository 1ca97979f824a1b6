"""The backward split on a pipeline stage: action I is one ordinary backward, action W a drain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, cast

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zbpipe.runtime import _torch
from zbpipe.runtime.deferred import PendingGradient, WeightGradients, defer_linears

SplitBackward = Literal["deferred", "autograd"]
"""How I and W share the backward: zbpipe's deferred weight gradients, or torch's own walk of the autograd graph."""

logger = logging.getLogger(__name__)


def split_backward(stages: Sequence[_torch.Stage], how: SplitBackward) -> None:
    """Prepare `stages` (all of one rank) for the actions I and W.

    Raises:
        ValueError: `how` is unknown, or a stage's module cannot be split this way.
    """
    if how not in ("deferred", "autograd"):
        raise ValueError(f"split_backward={how!r} is unknown: use 'deferred' (zbpipe's) or 'autograd' (torch's own)")
    compiled = [stage.stage_index for stage in stages if any(map(_torch.is_compiled, stage.submod.modules()))]
    for stage in stages:
        if isinstance(stage.submod, DistributedDataParallel):
            raise ValueError(
                f"stage {stage.stage_index} is wrapped by DistributedDataParallel, whose gradient hooks do not fit a"
                " backward in two parts: use fully_shard or replicate instead, or a schedule without I and W"
            )
    if how == "autograd":
        if compiled:
            raise ValueError(
                f"split_backward='autograd' cannot split the compiled modules of stages {compiled} (with"
                " donated_buffer=False their weight gradients come out wrong): use split_backward='deferred'"
            )
        return
    if compiled:
        logger.warning(
            "stages %s are compiled: their compiled regions compute weight gradients in I, not in W", compiled
        )
    gradients = WeightGradients()
    for stage in stages:
        _split(stage, gradients)


def _split(stage: _torch.Stage, gradients: WeightGradients) -> None:
    if not isinstance(stage, _SplitBackward):
        # The stage is the caller's, so it changes its class instead of being wrapped, as fully_shard does with modules.
        stage.__class__ = _split_class(type(stage))
        stage.__dict__.update(_gradients=gradients, _pending={})
    defer_linears(stage.submod, stage.__dict__["_gradients"])


@cache
def _split_class(stage_class: type[_torch.Stage]) -> type[_torch.Stage]:
    return type(f"Split{stage_class.__name__}", (_SplitBackward, stage_class), {"__module__": __name__})


class _SplitBackward(_torch.Stage):
    """Comes before the stage's own class and takes the two halves of a split backward; the rest is torch's.

    torch has the hook `dw_builder` for this, but a stage that has one keeps its outputs alive until backward.
    """

    _gradients: WeightGradients
    _pending: dict[int, list[PendingGradient]]
    """By microbatch, from its I to its W."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if full_backward or not self.has_backward:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        with self._gradients.record() as pending:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=True, last_backward=last_backward)
        self._pending[bwd_chunk_id] = pending

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        pending = self._pending.pop(bwd_chunk_id)
        # From the back, dropping each pair once it is used: the layers that I reached last are still in the cache.
        while pending:
            pending.pop().accumulate()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Before torch 2.14 a pipeline begins with a message to every neighbour; gloo cannot send one to itself."""
        return _torch.to_other_ranks(super()._get_init_p2p_neighbors_ops())  # type: ignore[misc]

    # torch's executor hands gradients from stage to stage on one rank in eval, too, where there are none.

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        if not self.has_backward:
            return ()
        return cast(tuple[Tensor | None, ...], super().get_local_bwd_output(mb_index))  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def clear_runtime_states(self) -> None:
        self._pending.clear()
        super().clear_runtime_states()
