"""Reductions of gradients over data-parallel ranks, beside the computations of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import OpKind, Schedule

if TYPE_CHECKING:
    from zbpipe.simulator.timeline import Span


class Reduction(NamedTuple):
    """The reduction of a stage's gradients, from `start` to `end` in seconds."""

    stage: int
    start: float
    end: float
    step: int = 0


def find_reductions(spans: Sequence[Span], schedule: Schedule, costs: CostModel) -> tuple[Reduction, ...]:
    """The reductions on a rank with these computations, in order. Empty if they take no time.

    >>> costs = CostModel(f=(1,), i=(1,), w=(2,), activations=(1,), reduce=3)
    >>> timeline = zbpipe.simulate(zbpipe.generate("ZBH1", 1, 1), costs)
    >>> timeline.spans[0][-1].start, find_reductions(timeline.spans[0], timeline.schedule, costs)
    (2.0, (Reduction(stage=0, start=2.0, end=5.0, step=0),))
    """
    if not costs.reduce:
        return ()
    # Only the split reduces a layer as soon as W has its gradient. Schedules without it reduce after their last B.
    is_split = any(op.kind is OpKind.W for ops in schedule for op in ops)
    return tuple(_run(spans, costs, is_split))


def _run(spans: Sequence[Span], costs: CostModel, is_split: bool) -> Iterator[Reduction]:
    last = {(span.step, span.op.stage): span for span in spans if span.op.kind in (OpKind.B, OpKind.W)}
    free = 0.0
    for (step, stage), span in sorted(last.items(), key=lambda each: each[1].end):
        if seconds := costs.reduction(stage):
            start = max(free, span.end - costs.w[stage] if is_split else span.end)
            free = max(start + seconds, span.end)
            yield Reduction(stage, start, free, step)
