"""Offload: long-lived memory goes to the host and comes back in time, so that no op waits for a copy.

Activations and deferred gradients can be offloaded. PipeOffload (2503.01328) does the former, and finds that at least
half of them cost no time if the copies of a whole microbatch take no longer than its computations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from math import inf
from typing import NamedTuple, Self

from zbpipe.costs.memory_limit import MemoryLimit, MemoryLimitLike
from zbpipe.costs.model import ROUNDING, CostModel, Placeable, amount, as_cost_model
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Op, OpKind, Schedule
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Span, Timeline
from zbpipe.simulator.validation import require_schedule, require_valid


class Offload(StrEnum):
    """What may go to the host."""

    PAIRS = "pairs"
    """Deferred gradients: x and dY of each linear layer, from I to W."""
    ACTIVATIONS = "activations"
    """Kept from F to I or B."""
    ALL = "all"
    """Both."""

    @classmethod
    def parse(cls, given: object) -> Self | None:
        """The one called `given`; `True` is all, and `False` and None are nothing."""
        known = ", ".join(repr(each.value) for each in cls)
        if given is None or isinstance(given, bool):
            return cls("all") if given else None
        if not isinstance(given, str):
            raise TypeError(f"offload={given!r} is no text: use one of {known}, or True for all")
        try:
            return cls(given.lower())
        except ValueError:
            raise ValueError(f"offload={given!r} is unknown: use one of {known}, or True for all") from None


class LimitTooSmallError(ValueError):
    """No copies that cost no time keep to the limit. `least` is what the rank that exceeds it the most holds then."""

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


# The arguments are those that many ask for in different ways; all but three are by name only.
def offload(
    schedule: Schedule,
    costs: CostModel | Placeable | Sequence[float],
    memory_limit: MemoryLimitLike | None = None,
    *,
    what: Offload | str | bool = Offload.ALL,
    margin: float = 0.1,
    transport: Transport | str = Transport.IDEAL,
) -> Schedule:
    """`schedule` with copies to the host and back, so few that each rank keeps to its limit.

    The order of the computations stays, and none of them waits for a copy. Of what is held at a rank's peak, that which
    waits the longest goes first.

        >>> schedule = zbpipe.generate("ZBV", 4, 8)
        >>> costs = CostModel.uniform(schedule.placement, host=zbpipe.costs.Link(bandwidth=1))
        >>> less = offload(schedule, costs)
        >>> [zbpipe.simulate(each, costs) for each in (schedule, less)]
        [Timeline('ZBV', p=4, m=8, makespan=25.5), Timeline('ZBV', p=4, m=8, makespan=25.5)]
        >>> [max(zbpipe.simulate(each, costs).peak_memory) for each in (schedule, less)]
        [4.0, 2.0]

    Args:
        schedule: a valid one; copies that it has are planned anew.
        costs: of its stages, with `host`, the way to the host's memory.
        memory_limit: see `zbpipe.costs.MemoryLimit`. Default: as little as costs no time.
        what: which things may be copied.
        margin: how much longer copies may take than `costs.host` says without holding anything up, as a share.
        transport: what messages wait for (see `zbpipe.costs.transport`).

    Raises:
        TypeError: an argument of another type.
        ValueError: costs without `host` or for another number of stages, a schedule that cannot run, or limits that no
            copies keep to without holding up the step; the message has the least that would do.
    """
    require_schedule(schedule)
    costs = as_cost_model(costs, schedule.placement)
    wanted = Offload.parse(what)
    margin = amount("an offload", "margin", margin)
    require_host(costs)
    limit = MemoryLimit.parse(memory_limit) or MemoryLimit(0.0, "")
    limits = limit.resolve(costs, schedule.num_ranks, schedule.num_microbatches)
    require_valid(schedule)
    schedule = schedule.computations
    timeline = simulate(schedule, costs, transport=transport)
    ranks = [_Rank(timeline, rank, wanted, margin) for rank in range(schedule.num_ranks)]
    least = [rank.offload(limit) for rank, limit in zip(ranks, limits, strict=True)]
    over = [rank for rank, limit in enumerate(limits) if least[rank] > limit * (1 + ROUNDING)]
    if memory_limit is not None and over:
        worst = max(over, key=lambda rank: least[rank] / limits[rank] if limits[rank] else inf)
        raise LimitTooSmallError(
            f"rank {worst} of {schedule.name} may hold {limits[worst]:g}, but with copies that hold nothing up it holds"
            f" {least[worst]:g}: raise its limit to that, or give a schedule that holds less or a faster host",
            least[worst],
        )
    return replace(schedule, ops=tuple(tuple(rank.row()) for rank in ranks))


def require_host(costs: CostModel) -> None:
    """Refuse costs without the way to the host's memory."""
    if costs.host is None:
        raise ValueError(
            "offload needs the way to the host's memory: give the costs host=zbpipe.costs.Link(bandwidth=...), in the"
            " unit of the activations per second, for example 25e9 for bytes over PCIe (in a cost file [host]"
            " bandwidth, on the command line --host-bandwidth)"
        )


class _Thing(NamedTuple):
    """What could be offloaded, and when it waits, in seconds."""

    stage: int
    microbatch: int
    there: OpKind
    back: OpKind
    made: int
    """The position in its rank's list of what makes it, and of what takes it."""
    taken: int
    since: float
    until: float
    copy: float
    """How long a copy takes in one direction."""
    most: float
    """How long it may take."""

    @property
    def waits(self) -> float:
        return self.until - self.since

    def op(self, kind: OpKind) -> Op:
        return Op(self.stage, kind, self.microbatch)


class _Rank:
    """One rank's computations, whose times stay, and its copies."""

    def __init__(self, timeline: Timeline, rank: int, wanted: Offload | None, margin: float) -> None:
        self.timeline = timeline
        self.rank = rank
        self.spans = timeline.spans[rank]
        self.ends = [span.end for span in self.spans]
        self.things = sorted(_things(timeline, rank, wanted, 1 + margin), key=lambda thing: -thing.waits)
        self.chosen: list[_Thing] = []

    def offload(self, limit: float) -> float:
        """Choose things until the rank keeps to the limit, or can hold no less; returns what it holds then."""
        while True:
            time, held = self._peak(self.chosen)
            trials = ([*self.chosen, thing] for thing in self._held_at(time))
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
        """The rank's list with the copies where they are issued."""
        issued: dict[int, list[Op]] = defaultdict(list)
        for thing in self.chosen:
            issued[thing.made].append(thing.op(thing.there))
        for thing, position in self._back(self.chosen) or ():
            issued[position].append(thing.op(thing.back))
        for position, span in enumerate(self.spans):
            yield span.op
            yield from issued[position]

    def _held_at(self, time: float) -> list[_Thing]:
        """What waits at that time, and so that its copy out can be over, and its copy back need not have begun."""
        chosen = set(self.chosen)
        return [
            thing
            for thing in self.things
            if thing.since + thing.copy <= time <= thing.until - thing.most and thing not in chosen
        ]

    def _peak(self, chosen: Sequence[_Thing]) -> tuple[float, float]:
        """When the rank holds the most, and how much."""
        rows: list[tuple[Span, ...]] = [()] * len(self.timeline.spans)
        rows[self.rank] = tuple(self._copies(chosen))
        return max(replace(self.timeline, copies=tuple(rows)).memory(self.rank), key=lambda moment: moment[1])

    def _back(self, chosen: Sequence[_Thing]) -> list[tuple[_Thing, int]] | None:
        """What comes back, each with the last computation after which its copy may be issued, however slow copies are.

        None if one would be late, or begin before it is there.
        """
        there = {span.op: span.end for span in _out(chosen, [thing.most for thing in chosen])}
        latest, found = inf, []
        for thing in sorted(chosen, key=lambda thing: -thing.taken):
            latest = min(latest, thing.until) - thing.most
            if latest < there[thing.op(thing.there)] * (1 - ROUNDING):
                return None
            after = bisect_right(self.ends, latest * (1 + ROUNDING), hi=thing.taken) - 1
            found.append((thing, max(after, thing.made)))
        return found[::-1]

    def _copies(self, chosen: Sequence[_Thing]) -> Iterator[Span]:
        """When copies run that take as long as they should."""
        there = {}
        for span in _out(chosen, [thing.copy for thing in chosen]):
            there[span.op] = span.end
            yield span
        free = 0.0
        for thing, after in self._back(chosen) or ():
            start = max(free, there[thing.op(thing.there)], self.ends[after])
            free = start + thing.copy
            yield Span(thing.op(thing.back), start, free)


def _out(chosen: Sequence[_Thing], seconds: Sequence[float]) -> Iterator[Span]:
    """Copies out as soon as they can run, each with its seconds."""
    free = 0.0
    for thing, long in sorted(zip(chosen, seconds, strict=True), key=lambda each: each[0].made):
        start = max(free, thing.since)
        free = start + long
        yield Span(thing.op(thing.there), start, free)


def _things(timeline: Timeline, rank: int, wanted: Offload | None, longer: float) -> Iterator[_Thing]:
    """All that could go out and come back again while it waits."""
    spans, costs = timeline.spans[rank], timeline.costs
    places = {span.op: position for position, span in enumerate(spans)}
    ways = {
        OpKind.F: (Offload.ACTIVATIONS, OpKind.OF, OpKind.RF, (OpKind.I, OpKind.B)),
        OpKind.I: (Offload.PAIRS, OpKind.OI, OpKind.RI, (OpKind.W,)),
    }
    for made, (op, _, since, _) in enumerate(spans):
        if op.kind not in ways:
            continue
        kind, there, back, takers = ways[op.kind]
        taken = next(places[taker] for each in takers if (taker := op._replace(kind=each)) in places)
        copy, until = costs.seconds(op.stage, there), spans[taken].start
        most = copy * longer
        if wanted in (Offload.ALL, kind) and costs.adds(op.stage, back) > 0 and until - since > copy + most:
            yield _Thing(op.stage, op.microbatch, there, back, made, taken, since, until, copy, most)
