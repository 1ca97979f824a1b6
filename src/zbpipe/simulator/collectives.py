"""FSDP's collectives: gathers of parameters and reductions of gradients, beside the computations of a rank.

A rank runs them one at a time. A step begins with the gathers, in the order in which the rank needs its stages. With
overlap, FSDP works module by module: the first F of a stage ends no earlier than its gather, and the reduction begins
with the stage's last W or B. Otherwise that F begins after the gather, and the reduction after that W or B, as in
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import Op, OpKind, Schedule

if TYPE_CHECKING:
    from zbpipe.simulator.timeline import Span


class Collective(NamedTuple):
    """A collective of a stage, from `start` to `end` in seconds."""

    kind: Literal["gather", "reduce"]
    stage: int
    start: float
    end: float
    step: int = 0

    def __str__(self) -> str:
        return f"{self.stage} {self.kind}"


def find_gathers(row: Iterable[Op], costs: CostModel) -> Iterator[tuple[Op, Collective]]:
    """The gathers of a rank that runs these ops, in seconds from its step's begin; each with its stage's first op.

    >>> costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(1, 1), gather=3)
    >>> [str(op) for op, _ in find_gathers(zbpipe.generate("ZBV", 1, 2).ops[0], costs)]
    ['0F0', '1F0']
    """
    free, first = 0.0, dict[int, Op]()
    for op in row:
        first.setdefault(op.stage, op)
    for stage, op in first.items():
        if seconds := costs.gathering(stage):
            yield op, Collective("gather", stage, free, free := free + seconds)


def find_earliest(schedule: Schedule, costs: CostModel, *, overlaps: bool) -> dict[Op, float]:
    """Earliest starts of ops that wait for a gather, in seconds from their rank's begin of the step."""
    gathers = (each for row in schedule for each in find_gathers(row, costs)) if costs.gather else ()
    return {op: max(each.start, each.end - costs.seconds(*op[:2]) * overlaps) for op, each in gathers}


def find_reductions(spans: Sequence[Span], costs: CostModel, *, overlaps: bool = True) -> tuple[Collective, ...]:
    """The reductions on a rank with these computations, in order. Empty if they take no time.

    >>> costs = CostModel(f=(1,), i=(1,), w=(2,), activations=(1,), reduce=3)
    >>> timeline = zbpipe.simulate(zbpipe.generate("ZBH1", 1, 1), costs)
    >>> timeline.spans[0][-1].start, find_reductions(timeline.spans[0], costs)
    (2.0, (Collective(kind='reduce', stage=0, start=2.0, end=5.0, step=0),))
    """
    return tuple(_reduce(spans, costs, overlaps)) if costs.reduce else ()


def _reduce(spans: Sequence[Span], costs: CostModel, overlaps: bool) -> Iterator[Collective]:
    last = {(span.step, span.op.stage): span for span in spans if span.op.kind in (OpKind.B, OpKind.W)}
    free = 0.0
    for (step, stage), span in sorted(last.items(), key=lambda each: each[1].end):
        if seconds := costs.reduction(stage):
            start = max(free, span.start if overlaps else span.end)
            free = max(start + seconds, span.end)
            yield Collective("reduce", stage, start, free, step)
