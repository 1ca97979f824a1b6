"""The ops that ranks may run before the previous optimizer step is validated, and the gain from that.

A rank that is done steps its optimizer at once and begins the next step. Meanwhile the other ranks end theirs, and the
norm of all gradients becomes known. That is the validation, at a fixed place in each rank's list (Zero Bubble Pipeline
Parallelism, arXiv 2401.10241, section 4: post-validation). If the norm shows that the gradients should have been
clipped, the rank discards the ops that it ran ahead, steps again, and runs its list again.

Only forwards run ahead, and none of the last stage: they change no gradient and no loss. A message sent ahead may be
received late, but a message is received early only if it was sent early. So on failure a rank knows which messages
come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from operator import add

from zbpipe.costs.model import ROUNDING, CostModel
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.actions import COMPUTE, Action, Rows, dependencies, other_end
from zbpipe.simulator.passes import wait_of
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.time_graph import TimeGraph, durations, longest_path
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import find_disordered, require_runnable

LEAST_GAIN = 1e-3
"""Least gain of a schedule, as a share of a step, that justifies a copy of the weights."""


def ahead_of(schedule: Schedule, costs: CostModel) -> tuple[int, ...]:
    """Number of first ops of each rank that may run before the previous step is validated.

    These ops start before the last rank has ended that step, in steps that are all alike and wait for no validation.
    The others start later anyway, so waiting for the validation costs them nothing.

        >>> schedule = zbpipe.generate("ZBV", 4, 8)
        >>> ahead_of(schedule, CostModel.uniform(schedule.placement))
        (3, 2, 1, 0)
    """
    # These are forwards, and none of the last stage: all other ops depend on every rank in the same step. The
    # dependencies of each start before it.
    graph = _step(schedule)
    delays = _delays(graph, costs)
    length = _mean_step(delays)
    begin = _rhythm(delays, length)
    starts, _ = _times(graph, costs, begin)
    over = max(begin) - ROUNDING * length
    return tuple(sum(starts[op] < over for op in ops) for ops in graph.ops)


def period(schedule: Schedule, costs: CostModel, ahead: Sequence[int] | None = None) -> float:
    """Mean seconds from step to step where ranks run ahead, over many steps. `ahead` defaults to `ahead_of`.

    >>> schedule = zbpipe.generate("ZBV", 4, 8)
    >>> period(schedule, CostModel.uniform(schedule.placement))
    24.0
    """
    # `ahead_of` guarantees that validation never delays an op.
    return _mean_step(_delays(_step(schedule, ahead), costs))


def period_of(timeline: Timeline) -> float:
    """The period of the schedule of a timeline, with its costs.

    A schedule with copies to the host waits for the validation. With messages in queues the period is not known. The
    longest time from a rank's first op to its last replaces it.
    """
    if timeline.schedule.has_copies:
        return timeline.makespan / timeline.num_steps
    if timeline.transport is not Transport.IDEAL:
        return timeline.longest_rank_span
    return period(timeline.schedule, timeline.costs)


def gain(schedule: Schedule, costs: CostModel) -> float:
    """Share of a synchronous step that is saved where ranks run ahead."""
    synchronous = simulate(schedule, costs).makespan
    return max(0.0, 1 - period(schedule, costs) / synchronous) if synchronous else 0.0


def _step(schedule: Schedule, ahead: Sequence[int] | None = None) -> TimeGraph:
    """One step. After `ahead` ops, a rank waits for all ranks' end of the last step. Default: for none."""
    schedule = schedule.computations
    require_runnable(schedule)
    return TimeGraph(schedule, ahead=list(map(len, schedule)) if ahead is None else ahead, has_fsdp=True)


def _times(graph: TimeGraph, costs: CostModel, begin: Iterable[float]) -> tuple[list[float], list[float]]:
    """Starts and ends where each rank begins the step at its time of `begin`."""
    seconds = durations(graph, costs)
    for node, time in zip(graph.begins, begin, strict=True):
        seconds[node] = time
    return longest_path(graph, seconds)


def _delays(graph: TimeGraph, costs: CostModel) -> list[list[float]]:
    """Least delay from one rank's end of the last step (column) to another's end of this step (row).

    They are longest paths. The next step depends on this one in the same way, so the mean step time is the largest mean
    of a cycle of ranks, each of which begins where the path of the previous one ends (the eigenvalue of a matrix in
    max-plus algebra: Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992, section 3.2).
    """
    columns = []
    for begin in graph.begins:
        _, ends = _times(graph, costs, [0.0 if each == begin else -inf for each in graph.begins])
        columns.append([max(ends[node] for node in lasts) for lasts in graph.begins.values()])
    return [list(row) for row in zip(*columns, strict=True)]


def _mean_step(delays: Sequence[Sequence[float]]) -> float:
    """The mean time of a step."""
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
    """Times at which each rank is done with a step, after many steps of this mean time from a common begin."""
    ranks = range(len(delays))
    longest = [[each - length for each in row] for row in delays]
    for via in ranks:
        for row in longest:
            row[:] = [max(each, row[via] + more) for each, more in zip(row, longest[via], strict=True)]
    critical = [rank for rank in ranks if longest[rank][rank] >= -ROUNDING * length]
    return [max(longest[rank][via] + max(0.0, *longest[via]) for via in critical) for rank in ranks]


@dataclass(frozen=True)
class RunAhead:
    """Lists with communication, cut where the previous step is validated.

    >>> from zbpipe.simulator.actions import parse
    >>> rows = parse("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\\n"
    ...              "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1")
    >>> cut = RunAhead.of(rows, ahead=(2, 0))
    >>> print(*cut.before[1], "|", *cut.after[1][:3], "|", *cut.drain[1])
    1RECV_F0 | 1F0 1RECV_F1 1F1 | 1RECV_F1
    """

    before: Rows
    """Actions of each rank before the validation."""
    after: Rows
    """The rest of its list."""
    drain: Rows
    """Actions if the validation fails instead: receives of what was sent ahead, and waits for its own sends."""

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

    def findings(self) -> list[str]:
        """Findings in words: something other than forwards runs ahead, or ranks would wait forever."""
        rows = map(add, self.before, self.after)
        rank_of = [rank for _, rank in sorted({(each.stage, rank) for rank, row in enumerate(rows) for each in row})]
        foreign = [
            f"rank {rank} runs {each} ahead"
            for rank, row in enumerate(self.before)
            for each in row
            if each.kind not in _AHEAD or (each.kind == "F" and each.stage == len(rank_of) - 1)
        ]
        # What runs ahead must need nothing from after the validation. Waits for sends may: the validation needs only
        # votes.
        alone = tuple(tuple(each for each in row if not each.kind.startswith("WAIT")) for row in self.before)
        drained = tuple((*before, *drain) for before, drain in zip(self.before, self.drain, strict=True))
        return [*foreign, *_stuck(alone, rank_of), *_stuck(drained, rank_of), *_find_left_over(drained)]


_AHEAD = frozenset({"F", "SEND_F", "RECV_F", "WAIT_SEND_F", "UNSHARD", "RESHARD"})


def _cut(row: tuple[Action, ...], number: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """The actions before computation `number`, and the others."""
    computations = (n for n, each in enumerate(row) if each.kind in COMPUTE)
    position = next(islice(computations, number, None), len(row))
    return row[:position], row[position:]


def _drain(before: Sequence[Action], after: Sequence[Action], sent: Set[Action]) -> Iterator[Action]:
    yield from (each for each in after if each.kind.startswith("RECV") and other_end(each) in sent)
    waits = [wait_of(each) for each in before if each.kind.startswith("SEND")]
    yield from (wait for wait in waits if wait not in before)


def _stuck(rows: Rows, rank_of: Sequence[int]) -> Iterator[str]:
    """Actions that wait for one that is not in these rows, and actions that wait for each other."""
    there = set(chain.from_iterable(rows))
    for rank, row in enumerate(rows):
        for action in row:
            for choices in dependencies(action, rank_of):
                if there.isdisjoint(choices):
                    yield f"rank {rank} waits for {choices[0]}, which no rank runs ahead of the validation"
    yield from map(str, find_disordered(rows, lambda action: dependencies(action, rank_of)))


def _find_left_over(rows: Rows) -> Iterator[str]:
    """Messages of which one end is missing, or that no rank waits for."""
    every = {each for row in rows for each in row}
    for each in sorted(every):
        if each.kind.startswith("SEND") and not {other_end(each), wait_of(each)} <= every:
            yield f"{each} is not received, or nobody waits for it"
