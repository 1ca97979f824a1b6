"""FSDP's collectives: gathers of parameters and reductions of gradients, beside the computations of a rank.

A rank runs them one at a time. A step begins with the gathers, in the order in which the rank needs its stages. With
overlap, FSDP works module by module: the first F of a stage ends no earlier than its gather, and the reduction begins
with the stage's last W or B. Otherwise that F begins after the gather, and the reduction after that W or B, and the
rank waits for both, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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


def find_gathers(row: Iterable[Op], costs: CostModel) -> tuple[Collective, ...]:
    """The gathers of a rank that runs these ops, in seconds from its step's begin.

    >>> costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(1, 1), gather=3)
    >>> [str(each) for each in find_gathers(zbpipe.generate("ZBV", 1, 2).ops[0], costs)]
    ['0 gather', '1 gather']
    """
    free, found = 0.0, []
    for stage in dict.fromkeys(op.stage for op in row) if costs.gather else ():
        if seconds := costs.gathering(stage):
            found.append(Collective("gather", stage, free, free := free + seconds))
    return tuple(found)


def find_earliest(schedule: Schedule, costs: CostModel, *, overlaps: bool) -> dict[Op, float]:
    """Earliest starts of ops that wait for a gather, in seconds from their rank's begin of the step."""
    first = {op.stage: op for row in schedule for op in reversed(row)} if costs.gather else {}
    gathers = ((first[each.stage], each) for row in schedule for each in find_gathers(row, costs))
    return {op: max(each.start, each.end - costs.seconds(*op[:2]) * overlaps) for op, each in gathers}


def find_waits(schedule: Schedule, costs: CostModel, *, overlaps: bool) -> dict[Op, float]:
    """Seconds for which a rank waits for reductions, by the op before."""
    if overlaps or not costs.reduce:
        return {}
    last = {op.stage: op for row in schedule for op in row if op.kind in (OpKind.B, OpKind.W)}
    return {op: costs.reduction(stage) for stage, op in last.items()}


def find_reductions(
    spans: Iterable[Span], costs: CostModel, *, overlaps: bool = True, latest: Callable[[Any, Any], Any] = max
) -> tuple[Collective, ...]:
    """The reductions on a rank with these computations, in order. Empty if they take no time.

    Times are numbers, or any values of which `latest` returns the later one.

    >>> costs = CostModel(f=(1,), i=(1,), w=(2,), activations=(1,), reduce=3)
    >>> timeline = zbpipe.simulate(zbpipe.generate("ZBH1", 1, 1), costs)
    >>> timeline.spans[0][-1].start, find_reductions(timeline.spans[0], costs)
    (2.0, (Collective(kind='reduce', stage=0, start=2.0, end=5.0, step=0),))
    """
    last: dict[tuple[int, int], Span] = {}
    for span in spans if costs.reduce else ():
        if span.op.kind in (OpKind.B, OpKind.W):
            last.pop((span.step, span.op.stage), None)  # the order is that of the last ones
            last[span.step, span.op.stage] = span
    free, found = None, []
    for (step, stage), span in last.items():
        if seconds := costs.reduction(stage):
            start = span.start if overlaps else span.end
            start = start if free is None else latest(free, start)
            free = latest(start + seconds, span.end)
            found.append(Collective("reduce", stage, start, free, step))
    return tuple(found)


def gather_in_each_op(costs: CostModel) -> CostModel:
    """The costs where each F and each backward gathers the parameters again (`fsdp_mode="reshard"`).

    An op takes no less time than its gather, and none precedes the step.

    >>> costs = CostModel(f=(1,), i=(3,), w=(2,), activations=(1,), gather=2, reduce=3)
    >>> resharded = gather_in_each_op(costs)
    >>> resharded.f, resharded.i, resharded.gather
    ((2.0,), (3.0,), 0.0)
    """
    f, i = (tuple(max(each, costs.gathering(stage)) for stage, each in enumerate(own)) for own in (costs.f, costs.i))
    return replace(costs, f=f, i=i, gather=0.0)
