"""The schedules that `Auto` starts with. `zbpipe.runtime.auto` measures the job and plans the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zbpipe.algorithms.v_half import v_half
from zbpipe.algorithms.v_min import v_min
from zbpipe.ir import Op, OpKind, Schedule
from zbpipe.registry import register


@register("Auto", placement="v", stages_per_rank=2, listed=False, summary="measures the job and plans for it")
def auto(ranks: int, microbatches: int) -> Schedule:
    """The first of `starts`.

    >>> print(auto(2, 2))
    rank 0: 0F0 3F0 0F1 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
    """
    return next(starts(ranks, microbatches))


def starts(ranks: int, microbatches: int) -> Iterator[Schedule]:
    """V-Half and V-Min with every W right after its I. V-Half comes first: it is faster and takes more memory.

    It is about as fast as 1F1B and takes half of its memory. At most one stage waits for its W at a time, so this holds
    under full activation checkpointing, too, where a stage keeps more between I and W than between F and I.
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
