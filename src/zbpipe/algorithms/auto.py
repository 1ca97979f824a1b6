"""`Auto` as a name: where it begins. What it becomes is found out in the job, see `zbpipe.runtime.auto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zbpipe.algorithms.v_half import v_half
from zbpipe.algorithms.v_min import v_min
from zbpipe.ir import Op, OpKind, Schedule
from zbpipe.registry import register


@register("Auto", placement="v", stages_per_rank=2, listed=False, summary="measures the job and plans for it")
def auto(ranks: int, microbatches: int) -> Schedule:
    """The first of `starts`."""
    return next(starts(ranks, microbatches))


def starts(ranks: int, microbatches: int) -> Iterator[Schedule]:
    """V-Half and V-Min with every W right after its I, the faster and larger first.

    About as fast as 1F1B with half of its memory, also where what waits for W weighs more than what F keeps, as under
    full activation checkpointing: at most one stage waits at a time.
    """
    for schedule in (v_half(ranks, microbatches), v_min(ranks, microbatches)):
        rows = tuple(tuple(_weights_at_once(ops)) for ops in schedule)
        yield replace(schedule, name=f"Auto-{schedule.name}", ops=rows)


def _weights_at_once(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        if op.kind is not OpKind.W:
            yield op
        if op.kind is OpKind.I:
            yield op._replace(kind=OpKind.W)
