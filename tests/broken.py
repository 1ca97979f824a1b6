"""Schedules that are broken in exactly one way, with the place at which `zbpipe.validate` has to find it."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import Op, OpKind, Schedule, inputs
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.validation import Rule
from zbpipe.testing import schedules

Rows = list[list[Op]]
Place = tuple[int, int | None, Op]


class Broken(NamedTuple):
    schedule: Schedule
    rule: Rule
    place: Place | None
    """None: of several ops any may be named."""


@st.composite
def broken_schedules(
    draw: st.DrawFn, rules: Sequence[Rule] | None = None, base: st.SearchStrategy[Schedule] | None = None
) -> Broken:
    """Of the schedules of `base`, which have at least two ranks and two microbatches; broken by one of `rules`."""
    if base is None:
        base = schedules(ranks=draw(st.integers(2, 6)), microbatches=draw(st.integers(2, 12)))
    schedule = draw(base)
    rule = draw(st.sampled_from(rules or RULES))
    rows = [list(ops) for ops in schedule]
    place = _BREAK[rule](draw, schedule, rows)
    return Broken(
        Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(map(tuple, rows))), rule, place
    )


def _choose(draw: st.DrawFn, rows: Rows) -> tuple[int, int]:
    rank = draw(st.sampled_from(range(len(rows))))
    return rank, draw(st.integers(0, len(rows[rank]) - 1))


def _lose(draw: st.DrawFn, schedule: Schedule, rows: Rows) -> Place:
    rank, position = _choose(draw, rows)
    return rank, None, rows[rank].pop(position)


def _double(draw: st.DrawFn, schedule: Schedule, rows: Rows) -> Place:
    rank, position = _choose(draw, rows)
    op, later = rows[rank][position], draw(st.integers(position + 1, len(rows[rank])))
    rows[rank].insert(later, op)
    return rank, later, op


def _add_stranger(draw: st.DrawFn, schedule: Schedule, rows: Rows) -> Place | None:
    """At the end of a row, where nothing that it may need comes later."""
    rank, position = _choose(draw, rows)
    stage, _, microbatch = rows[rank][position]
    is_split = Op(stage, OpKind.I, microbatch) in rows[rank]
    strangers = [
        Op(schedule.placement.num_stages, OpKind.F, microbatch),
        Op(stage, OpKind.F, schedule.num_microbatches),
        *(Op(-1, OpKind.F, microbatch), Op(stage, OpKind.F, -1)),
        *(Op(stage, kind, microbatch) for kind in ([OpKind.B] if is_split else [OpKind.I, OpKind.W])),
    ]
    stranger = draw(st.sampled_from(strangers))
    rows[rank].append(stranger)
    return (rank, len(rows[rank]) - 1, stranger) if stranger.kind is OpKind.F else None


def _misplace(draw: st.DrawFn, schedule: Schedule, rows: Rows) -> Place:
    """Where every list keeps to the time at which the ops start, no rank waits for a later one."""
    timeline = simulate(schedule, CostModel.uniform(schedule.placement))
    rank, position = _choose(draw, rows)
    other = draw(st.sampled_from([each for each in range(schedule.num_ranks) if each != rank]))
    start = timeline.spans[rank][position].start
    there = bisect_right([span.start for span in timeline.spans[other]], start)
    op = rows[rank].pop(position)
    rows[other].insert(there, op)
    return other, there, op


def _disorder(draw: st.DrawFn, schedule: Schedule, rows: Rows) -> Place:
    """An op that waits for nobody else moves before one that feeds it; its own users get it all the sooner."""
    candidates = [
        (rank, op, feeder)
        for rank, own in enumerate(map(set, rows))
        for op in rows[rank]
        if (fed_by := [own.intersection(choices) for choices in inputs(op, schedule.placement.num_stages)])
        and all(fed_by)
        for (feeder,) in fed_by
    ]
    rank, op, feeder = draw(st.sampled_from(candidates))
    position = rows[rank].index(feeder)
    _move(rows[rank], op, position)
    return rank, position, op


def _deadlock(draw: st.DrawFn, schedule: Schedule, rows: Rows) -> None:
    """Of two neighbouring stages and two microbatches, the first stage wants the backward of one before it gives the
    forward of the other, and the next stage wants that forward before it gives that backward."""
    rank_of = schedule.placement.rank_of
    stage = draw(st.sampled_from([s for s, (a, b) in enumerate(pairwise(rank_of)) if a != b]))
    above, below = rows[rank_of[stage]], rows[rank_of[stage + 1]]
    backwards = [op for op in above if op.stage == stage and op.kind in (OpKind.I, OpKind.B)]
    first = draw(st.integers(0, len(backwards) - 2))
    wanted = backwards[first]
    later = draw(st.sampled_from(backwards[first + 1 :])).microbatch

    forward = Op(stage, OpKind.F, later)
    if above.index(forward) < above.index(wanted):
        _move(above, forward, above.index(wanted))
    giver = next(op for op in below if op[::2] == (stage + 1, wanted.microbatch) and op.kind in (OpKind.I, OpKind.B))
    taker = Op(stage + 1, OpKind.F, later)
    if below.index(taker) > below.index(giver):
        _move(below, taker, below.index(giver))


def _move(row: list[Op], op: Op, position: int) -> None:
    row.remove(op)
    row.insert(position, op)


_BREAK: dict[Rule, Callable[[st.DrawFn, Schedule, Rows], Place | None]] = {
    "missing": _lose,
    "doubled": _double,
    "foreign": _add_stranger,
    "placement": _misplace,
    "order": _disorder,
    "deadlock": _deadlock,
}
RULES = tuple(_BREAK)
"""Memory is at fault only where somebody sets a limit."""
