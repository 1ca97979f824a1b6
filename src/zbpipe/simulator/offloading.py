"""Offload: long-lived memory goes to the host and comes back in time, so that no op waits for a copy.

Activations: at least half of them cost no time if the copies of a whole microbatch take no longer than its computations
(PipeOffload, arXiv 2503.01328).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, Self

from zbpipe.costs.job import JobCosts, MemoryLimit, MemoryLimitLike, as_cost_model
from zbpipe.costs.model import ROUNDING, CostModel, Named, Transport
from zbpipe.costs.numbers import amount
from zbpipe.schedule.ir import Op, OpKind, Schedule
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.time_graph import durations
from zbpipe.simulator.timeline import Span, Timeline
from zbpipe.simulator.validation import require_schedule, require_valid


class Offload(Named):
    """Memory that may be offloaded: deferred gradients (x and dY of each linear layer), activations, or both."""

    PAIRS = "pairs"
    ACTIVATIONS = "activations"
    ALL = "all"

    @classmethod
    def read(cls, given: Any) -> Self | None:
        """The member that an option names. `True` is all; False and None are nothing."""
        if given is None or isinstance(given, bool):
            return cls("all") if given else None
        return cls.parse(given)


class OverLimitError(ValueError):
    """No copies without a delay keep to the limit. Its arguments: the message, and the worst rank's peak."""

    def __str__(self) -> str:
        return str(self.args[0])


_WAYS = {
    OpKind.F: (Offload.ACTIVATIONS, OpKind.OF, OpKind.RF, (OpKind.I, OpKind.B)),
    OpKind.I: (Offload.PAIRS, OpKind.OI, OpKind.RI, (OpKind.W,)),
}
"""The memory, the copies out and back, and the ops that need it, by the op that leaves the memory."""


def copy_all(schedule: Schedule, what: Offload) -> Schedule:
    """`schedule` with all copies of these kinds: out as early as possible, back at the last moment."""
    wanted = {maker: way for maker, way in _WAYS.items() if what in (way[0], Offload.ALL)}

    def around(op: Op) -> Iterator[Op]:
        yield from (op._replace(kind=back) for _, _, back, takers in wanted.values() if op.kind in takers)
        yield op
        if op.kind in wanted:
            yield op._replace(kind=wanted[op.kind][1])

    return replace(schedule, ops=tuple(tuple(each for op in ops for each in around(op)) for ops in schedule))


# Callers need different subsets of the arguments. All but three are keyword-only.
def offload(
    schedule: Schedule,
    costs: CostModel | JobCosts | Sequence[float],
    memory_limit: MemoryLimitLike | None = None,
    *,
    what: Offload | str | bool = Offload.ALL,
    margin: float = 0.1,
    transport: Transport | str = Transport.IDEAL,
) -> Schedule:
    """`schedule` with copies to the host and back, as few as each rank needs to keep its limit.

    The order of the computations stays unchanged, and none waits for a copy. Memory that waits longest is copied first.

        >>> schedule = zbpipe.generate("ZBV", 4, 8)
        >>> costs = CostModel.uniform(schedule.placement, host=zbpipe.costs.Link(bandwidth=1))
        >>> less = offload(schedule, costs)
        >>> [zbpipe.simulate(each, costs) for each in (schedule, less)]
        [Timeline('ZBV', p=4, m=8, makespan=25.5), Timeline('ZBV', p=4, m=8, makespan=25.5)]
        >>> [max(zbpipe.simulate(each, costs).peak_memory) for each in (schedule, less)]
        [4.0, 2.0]

    Args:
        schedule: a valid schedule. Its copies are planned anew.
        costs: costs of its stages, with `host`, the link to the host's memory.
        memory_limit: see `zbpipe.costs.MemoryLimit`. Default: the least without a delay.
        what: the kinds of memory that may be copied.
        margin: relative excess over the time by `costs.host` that copies may take without a delay.
        transport: which messages wait for each other.

    ValueError if the costs have no `host` or are for another number of stages, the schedule cannot run, or no copies
    without a delay keep to the limits.
    """
    require_schedule(schedule)
    costs = as_cost_model(costs, schedule.placement)
    wanted = Offload.read(what)
    margin = amount("an offload", "margin", margin)
    require_host(costs)
    limit = MemoryLimit.parse(memory_limit) or MemoryLimit(0.0, "")
    limits = limit.resolve(costs, schedule.num_ranks, schedule.num_microbatches)
    require_valid(schedule)
    schedule = schedule.computations
    timeline = simulate(schedule, costs, transport=transport, fill_waits="off")  # as with copies
    ranks = [_Rank(timeline, rank, wanted, margin) for rank in range(schedule.num_ranks)]
    least = [rank.offload(limit) for rank, limit in zip(ranks, limits, strict=True)]
    over = [rank for rank, limit in enumerate(limits) if least[rank] > limit * (1 + ROUNDING)]
    if memory_limit is not None and over:
        worst = max(over, key=lambda rank: least[rank] / limits[rank] if limits[rank] else inf)
        raise OverLimitError(
            f"rank {worst} of {schedule.name} may hold {limits[worst]:g}, but needs {least[worst]:g} even with all"
            " copies that delay nothing: raise its limit to that, or give a schedule that needs less or a faster host",
            least[worst],
        )
    return replace(schedule, ops=tuple(tuple(rank.row()) for rank in ranks))


def require_host(costs: CostModel) -> None:
    if costs.host is None:
        raise ValueError(
            "offload needs the bandwidth to the host: give the costs host=zbpipe.costs.Link(bandwidth=...), in the"
            " unit of the activations per second, for example 25e9 for bytes over PCIe (in a cost file [host]"
            " bandwidth, on the command line --host-bandwidth)"
        )


class _Thing(NamedTuple):
    """Memory that could be offloaded, and the seconds for which it waits."""

    there: Op
    back: Op
    made: int
    """Positions in the rank's list of the op that makes it, and of the op that takes it."""
    taken: int
    since: float
    until: float
    copy: float
    """Time of a copy in one direction."""
    most: float
    """Longest time allowed for a copy."""


class _Rank:
    """A rank's computations, with fixed times, and its copies."""

    def __init__(self, timeline: Timeline, rank: int, wanted: Offload | None, margin: float) -> None:
        self.timeline, self.rank, self.spans = timeline, rank, timeline.spans[rank]
        assert timeline.graph, "it was simulated"
        seconds, arrivals = durations(timeline.graph, timeline.costs), timeline.graph.arrivals
        ops = zip(timeline.graph.ops[rank], self.spans, strict=True)
        self.ends = [span.end + (seconds[arrivals[op]] if op in arrivals else 0.0) for op, span in ops]
        """When the rank continues after each op, and issues copies."""
        self.things = sorted(self._things(wanted, 1 + margin), key=lambda thing: thing.since - thing.until)
        self.chosen: list[_Thing] = []

    def _things(self, wanted: Offload | None, longer: float) -> Iterator[_Thing]:
        """All memory that could be copied out and back while it waits."""
        costs, places = self.timeline.costs, {span.op: position for position, span in enumerate(self.spans)}
        for made, ((op, *_), since) in enumerate(zip(self.spans, self.ends, strict=True)):
            if op.kind not in _WAYS:
                continue
            kind, there, back, takers = _WAYS[op.kind]
            taken = next(places[taker] for each in takers if (taker := op._replace(kind=each)) in places)
            cost, until = costs.of(op.stage, back, op.microbatch), self.spans[taken].start
            copy, most = cost.seconds, cost.seconds * longer
            if wanted in (Offload.ALL, kind) and cost.adds > 0 and until - since > copy + most:
                yield _Thing(op._replace(kind=there), op._replace(kind=back), made, taken, since, until, copy, most)

    def offload(self, limit: float) -> float:
        """Choose copies until the rank keeps the limit, or can hold no less. Returns its peak."""
        while True:
            time, held = self._peak(self.chosen)
            # Memory that then waits, after the end of its copy out and before the start of its copy back.
            there = (each for each in self.things if each.since + each.copy <= time <= each.until - each.most)
            trials = ([*self.chosen, each] for each in there if each not in self.chosen)
            more = next((trial for trial in trials if self._back(trial) is not None), None)
            if held <= limit * (1 + ROUNDING) or more is None:
                break
            self.chosen = more
        for thing in self.chosen[::-1]:
            fewer = [each for each in self.chosen if each is not thing]
            if self._peak(fewer)[1] <= max(held, limit) * (1 + ROUNDING):
                self.chosen = fewer
        return held

    def row(self) -> Iterator[Op]:
        issued: dict[int, list[Op]] = defaultdict(list)
        for thing in self.chosen:
            issued[thing.made].append(thing.there)
        for thing, position in self._back(self.chosen) or ():
            issued[position].append(thing.back)
        for position, span in enumerate(self.spans):
            yield span.op
            yield from issued[position]

    def _peak(self, chosen: Sequence[_Thing]) -> tuple[float, float]:
        rows: list[tuple[Span, ...]] = [()] * len(self.timeline.spans)
        rows[self.rank] = tuple(self._copies(chosen))
        return max(replace(self.timeline, copies=tuple(rows)).memory(self.rank), key=lambda moment: moment[1])

    def _back(self, chosen: Sequence[_Thing]) -> list[tuple[_Thing, int]] | None:
        """Copies back, each with the last computation after which it may be issued, however slow copies are. None if a
        copy back would be late, or begin before the end of its copy out."""
        there = {span.op: span.end for span in _out(chosen, [thing.most for thing in chosen])}
        latest, found = inf, []
        for thing in sorted(chosen, key=lambda thing: -thing.taken):
            latest = min(latest, thing.until) - thing.most
            if latest < there[thing.there] * (1 - ROUNDING):
                return None
            after = bisect_right(self.ends, latest * (1 + ROUNDING), hi=thing.taken) - 1
            found.append((thing, max(after, thing.made)))
        return found[::-1]

    def _copies(self, chosen: Sequence[_Thing]) -> Iterator[Span]:
        there = {}
        for span in _out(chosen, [thing.copy for thing in chosen]):
            there[span.op] = span.end
            yield span
        free = 0.0
        for thing, after in self._back(chosen) or ():
            start = max(free, there[thing.there], self.ends[after])
            free = start + thing.copy
            yield Span(thing.back, start, free)


def _out(chosen: Sequence[_Thing], seconds: Sequence[float]) -> Iterator[Span]:
    """Copies out as soon as they can run, each with its seconds."""
    free = 0.0
    for thing, long in sorted(zip(chosen, seconds, strict=True), key=lambda each: each[0].made):
        start = max(free, thing.since)
        free = start + long
        yield Span(thing.there, start, free)
