"""Ends of the ranks' lists that hide more of FSDP's reductions and delay no other op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import Op, OpKind, Schedule
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline


def hide_reductions(schedule: Schedule, costs: CostModel) -> Schedule:
    """The schedule in which each rank ends as early as it can by these changes, with its reductions.

    - The W at its end run stage by stage, so that the reductions of all stages but the last have more time.
    - If only W follow the last I of stage 0, it moves behind them and becomes a B, which hides a longer reduction.

    >>> schedule = Schedule.from_csv("0F0,1F0,1I0,1W0,0F1,1F1,1I1,0I0,0I1,1W1,0W0,0W1", "table")
    >>> costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(1, 1), reduce=(2, 1))
    >>> print(hide_reductions(schedule, costs).to_csv().strip())
    0F0,1F0,1I0,1W0,0F1,1F1,1I1,0I0,1W1,0W0,0B1
    """
    if not costs.reduce:
        return schedule
    variants = [schedule, *(replace(schedule, ops=tuple(map(each, schedule))) for each in (_end_with_b, _sort_tail))]
    # The changed ops pass nothing on, so each rank can take the variant that is best for it.
    timelines = [simulate(each, costs) for each in variants]
    return replace(schedule, ops=tuple(_pick(timelines, rank) for rank in range(schedule.num_ranks)))


def _pick(timelines: Sequence[Timeline], rank: int) -> tuple[Op, ...]:
    """The row of the rank that ends first."""

    def end(timeline: Timeline) -> float:
        return max((each[-1].end for each in (timeline.spans[rank], timeline.reductions[rank]) if each), default=0.0)

    return min(timelines, key=end).schedule.ops[rank]


def _end_with_b(row: Sequence[Op]) -> tuple[Op, ...]:
    begin = _find_tail(row)
    last = row[begin - 1] if begin else None
    if last is None or last.stage or last.kind is not OpKind.I:
        return tuple(row)
    own = last._replace(kind=OpKind.W)
    return (*row[: begin - 1], *(op for op in row[begin:] if op != own), last._replace(kind=OpKind.B))


def _sort_tail(row: Sequence[Op]) -> tuple[Op, ...]:
    begin = _find_tail(row)
    return (*row[:begin], *sorted(row[begin:], key=lambda op: -op.stage))


def _find_tail(row: Sequence[Op]) -> int:
    """Position of the first of the W at the end of the row."""
    return len(row) - sum(1 for _ in takewhile(lambda op: op.kind is OpKind.W, reversed(row)))
