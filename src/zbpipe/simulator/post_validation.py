"""The ops that ranks may run before the previous optimizer step is validated, and the gain.

A rank that is done steps its optimizer and begins the next step. When the other ranks are done, too, the norm of all
gradients is known. That is the validation, at a fixed place in each rank's list (Zero Bubble Pipeline Parallelism,
arXiv 2401.10241, section 4: post-validation). If the gradients should have been clipped, the rank discards the ops that
ran ahead, steps again, and runs its list again.

Only forwards run ahead, and none of the last stage, because they change no gradient and no loss. A message is received
early only if it was sent early, so on failure a rank knows which messages come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from math import inf
from operator import add

from zbpipe.costs.model import ROUNDING, CostModel, Transport
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.actions import COMPUTE, Action, Rows, other_end
from zbpipe.simulator.passes import wait_of
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.time_graph import TimeGraph, durations, longest_path
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import require_runnable

LEAST_GAIN = 1e-3
"""Least gain, as a share of a step, that justifies a copy of the weights."""


def ahead_of(schedule: Schedule, costs: CostModel) -> tuple[int, ...]:
    """Number of each rank's first ops that may run before the previous step is validated.

    They start before the last rank has ended that step.

        >>> schedule = zbpipe.generate("ZBV", 4, 8)
        >>> ahead_of(schedule, CostModel.uniform(schedule.placement))
        (3, 2, 1, 0)
    """
    # These are forwards before the last stage: all other ops depend on every rank in the same step.
    graph = _step(schedule)
    delays = _delays(graph, costs)
    length = _mean_step(delays)
    begin = _rhythm(delays, length)
    starts, _ = _times(graph, costs, begin)
    over = max(begin) - ROUNDING * length
    return tuple(sum(starts[op] < over for op in ops) for ops in graph.ops)


def period(schedule: Schedule, costs: CostModel, ahead: Sequence[int] | None = None) -> float:
    """Mean seconds from step to step over many steps, if ranks run ahead. `ahead` defaults to `ahead_of`.

    >>> schedule = zbpipe.generate("ZBV", 4, 8)
    >>> period(schedule, CostModel.uniform(schedule.placement))
    24.0
    """
    return _mean_step(_delays(_step(schedule, ahead), costs))


def period_of(timeline: Timeline) -> float:
    if timeline.schedule.has_copies:  # copies wait for the validation
        return timeline.makespan
    if timeline.transport is not Transport.IDEAL:  # the period with queues is not known
        return timeline.longest_rank_span
    return period(timeline.schedule, timeline.costs)


def gain(schedule: Schedule, costs: CostModel) -> float:
    """Share of a synchronous step that running ahead saves."""
    synchronous = simulate(schedule, costs).makespan
    return max(0.0, 1 - period(schedule, costs) / synchronous) if synchronous else 0.0


def _step(schedule: Schedule, ahead: Sequence[int] | None = None) -> TimeGraph:
    """One step. After `ahead` ops, a rank waits for the end of all ranks' last step; by default it does not wait."""
    schedule = schedule.computations
    require_runnable(schedule)
    return TimeGraph(schedule, ahead=list(map(len, schedule)) if ahead is None else ahead, has_fsdp=True)


def _times(graph: TimeGraph, costs: CostModel, begin: Iterable[float]) -> tuple[list[float], list[float]]:
    """Starts and ends if each rank begins the step at its time of `begin`."""
    seconds = durations(graph, costs)
    for node, time in zip(graph.begins, begin, strict=True):
        seconds[node] = time
    return longest_path(graph, seconds)


def _delays(graph: TimeGraph, costs: CostModel) -> list[list[float]]:
    """Least delay from one rank's end of the last step (column) to another's end of this step (row). They are longest
    paths. The mean step time is the largest mean of a cycle of ranks (the eigenvalue of a matrix in max-plus algebra:
    Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992, section 3.2)."""
    columns = []
    for begin in graph.begins:
        _, ends = _times(graph, costs, [0.0 if each == begin else -inf for each in graph.begins])
        columns.append([max(ends[node] for node in lasts) for lasts in graph.begins.values()])
    return [list(row) for row in zip(*columns, strict=True)]


def _mean_step(delays: Sequence[Sequence[float]]) -> float:
    # Karp's algorithm: the longest paths of each number of steps, here to all ranks from the first one.
    reached = [[0.0, *(-inf for _ in delays[1:])]]
    for _ in delays:
        reached.append([max(map(add, row, reached[-1])) for row in delays])
    last, number = reached[-1], len(delays)
    return max(
        min((last[rank] - each[rank]) / (number - steps) for steps, each in enumerate(reached[:-1]))
        for rank in range(number)
    )


def _rhythm(delays: Sequence[Sequence[float]], length: float) -> list[float]:
    """Times when each rank is done, after many steps of this mean time from a common begin."""
    ranks = range(len(delays))
    longest = [[each - length for each in row] for row in delays]
    for via in ranks:
        for row in longest:
            row[:] = [max(each, row[via] + more) for each, more in zip(row, longest[via], strict=True)]
    critical = [rank for rank in ranks if longest[rank][rank] >= -ROUNDING * length]
    return [max(longest[rank][via] + max(0.0, *longest[via]) for via in critical) for rank in ranks]


@dataclass(frozen=True)
class RunAhead:
    """Lists with communication, cut where the previous step is validated."""

    before: Rows
    """Actions of each rank before the validation."""
    after: Rows
    """The rest of its list."""
    drain: Rows
    """Actions after a failed validation: receives of messages sent ahead, and waits for the rank's own sends."""

    @classmethod
    def of(cls, rows: Rows, ahead: Sequence[int]) -> RunAhead:
        """Cut `rows` after `ahead` computations of each rank. Receives of later messages go after the cut."""
        heads, tails = zip(*map(_cut, rows, ahead), strict=True)
        sent = {each for head in heads for each in head if each.kind.startswith("SEND")}

        def is_late(action: Action) -> bool:
            return action.kind.startswith("RECV") and other_end(action) not in sent

        before = tuple(tuple(each for each in head if not is_late(each)) for head in heads)
        after = tuple((*filter(is_late, head), *tail) for head, tail in zip(heads, tails, strict=True))
        drain = tuple(tuple(_drain(mine, rest, sent)) for mine, rest in zip(before, after, strict=True))
        return cls(before, after, drain)


def _cut(row: tuple[Action, ...], number: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    computations = (n for n, each in enumerate(row) if each.kind in COMPUTE)
    position = next(islice(computations, number, None), len(row))
    return row[:position], row[position:]


def _drain(before: Sequence[Action], after: Sequence[Action], sent: Set[Action]) -> Iterator[Action]:
    yield from (each for each in after if each.kind.startswith("RECV") and other_end(each) in sent)
    waits = [wait_of(each) for each in before if each.kind.startswith("SEND")]
    yield from (wait for wait in waits if wait not in before)
