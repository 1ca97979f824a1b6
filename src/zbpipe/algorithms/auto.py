"""`Auto` as a name: where it begins. What it becomes is found out in the job, see `zbpipe.runtime.auto`."""

from __future__ import annotations

from zbpipe.algorithms.v_half import v_half
from zbpipe.ir import Schedule
from zbpipe.registry import register


@register("Auto", placement="v", stages_per_rank=2, listed=False, summary="measures the job and plans for it")
def auto(ranks: int, microbatches: int) -> Schedule:
    """V-Half, which needs about half of the memory of 1F1B, so that there is room for whatever is to be measured."""
    return v_half(ranks, microbatches)
