"""When a schedule's ops run, where the bubbles are, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from zbpipe.bound import lower_bound
from zbpipe.costs import CostModel
from zbpipe.frozen import FrozenDict
from zbpipe.ir import Op, OpKind, Schedule, inputs
from zbpipe.transport import Receives, Transport


class Span(NamedTuple):
    """One op on a rank, from `start` to `end` in seconds.

    >>> Span(Op.parse("3F0"), start=1.0, end=2.0).step
    0
    """

    op: Op
    start: float
    end: float
    step: int = 0
    """Which of several steps in a row."""


class Idle(NamedTuple):
    """Seconds in which a rank has nothing to do, by when.

    >>> zbpipe.simulate(zbpipe.generate("1F1B", 2, 4), (1, 1, 1)).idle[1]
    Idle(warmup=1.0, steady=0.0, cooldown=2.0)
    """

    warmup: float
    """Before its first backward."""
    steady: float
    """Between its first backward and its last forward."""
    cooldown: float
    """After its last forward (or first backward, whichever is later)."""


@dataclass(frozen=True, repr=False)
class Timeline:
    """A schedule that ran. All times are seconds from the beginning of the first step.

    >>> timeline = zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1, 1, 1))
    >>> timeline
    Timeline('ZBV', p=4, m=8, makespan=25.5)
    >>> timeline.spans[0][0]
    Span(op=Op(stage=0, kind=<OpKind.F: 'F'>, microbatch=0), start=0.0, end=0.5, step=0)
    >>> timeline.peak_activations
    (4.0, 4.0, 4.0, 4.0)
    """

    schedule: Schedule
    costs: CostModel
    spans: tuple[tuple[Span, ...], ...]
    """By rank, in the order in which they ran."""
    num_steps: int = 1
    transport: Transport = Transport.IDEAL
    receives: Receives | None = None
    """Where its receives stand; None where that makes no difference."""
    waited_for: Mapping[tuple[int, Op], tuple[int, Op]] = field(default_factory=lambda: FrozenDict({}))
    """By step and op the one whose end it waited for, on its rank or behind messages; empty for the ideal transport."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "waited_for", FrozenDict(self.waited_for))

    def __repr__(self) -> str:
        schedule = self.schedule
        size = f"p={schedule.num_ranks}, m={schedule.num_microbatches}"
        return f"Timeline({schedule.name!r}, {size}, makespan={self.makespan:g})"

    @cached_property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they idle: 1 - busy / makespan, 0 for an empty timeline."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @property
    def longest_rank_span(self) -> float:
        """The longest time from one rank's first op to its last: what a step costs if ranks run on into the next."""
        return max((spans[-1].end - spans[0].start for spans in self.spans if spans), default=0.0)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """By rank."""
        return tuple(_idle(spans, self.makespan) for spans in self.spans)

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """The activations that a rank holds: (from when on, how much), in the unit of `costs.activations`."""
        held, profile = 0.0, [(0.0, 0.0)]
        for time, change in _memory_changes(self.spans[rank], self.costs):
            held += change
            profile.append((time, held))
        return profile

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """By rank the peak of `memory`, in the unit of `costs.activations`."""
        return tuple(max(held for _, held in self.memory(rank)) for rank in range(len(self.spans)))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """By rank the peak of `memory` in units of its share of one microbatch: what all its stages keep of one."""
        shares = (
            sum(self.costs.activations[stage] for stage in self.schedule.placement.stages_on(rank))
            for rank in range(len(self.spans))
        )
        return tuple(peak / share if share else 0.0 for peak, share in zip(self.peak_memory, shares, strict=True))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """A chain of ops from the start of the last step to its end, in which each waits for the one before it."""
        return tuple(_critical_path(self))[::-1] if self.makespan else ()

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that no schedule with this placement, these costs and this number of microbatches can beat."""
        one_step = lower_bound(self.schedule.placement, self.costs, self.schedule.num_microbatches)
        return max(one_step, *self.busy)


def _idle(spans: tuple[Span, ...], makespan: float) -> Idle:
    first_backward = next((n for n, span in enumerate(spans) if span.op.kind is not OpKind.F), len(spans))
    last_forward = max((n for n, span in enumerate(spans) if span.op.kind is OpKind.F), default=-1)
    gaps = [0.0, 0.0, 0.0]
    end = 0.0
    for n, span in enumerate(spans):
        phase = 0 if n <= first_backward else 1 if n <= last_forward else 2
        gaps[phase] += span.start - end
        end = span.end
    return Idle(gaps[0], gaps[1], gaps[2] + makespan - end)


def _memory_changes(spans: tuple[Span, ...], costs: CostModel) -> Iterator[tuple[float, float]]:
    """When a rank takes and frees activations, in its order: an op takes at its start and frees at its end."""
    for span in spans:
        change = costs.adds(span.op.stage, span.op.kind)
        yield (span.start if change > 0 else span.end), change


def _critical_path(timeline: Timeline) -> Iterator[Span]:
    """From its end to its beginning."""
    places = {
        (span.step, span.op): (rank, position)
        for rank, spans in enumerate(timeline.spans)
        for position, span in enumerate(spans)
    }
    rank = max(range(len(timeline.spans)), key=lambda r: timeline.spans[r][-1].end)
    place: tuple[int, int] | None = (rank, len(timeline.spans[rank]) - 1)
    last_step = timeline.num_steps - 1
    while place is not None:
        span = timeline.spans[place[0]][place[1]]
        if span.step != last_step:
            return
        yield span
        if timeline.transport is Transport.IDEAL:
            place = _latest_before(timeline, place, places)
        else:
            before = timeline.waited_for.get((span.step, span.op))
            place = None if before is None else places[before]


def _latest_before(
    timeline: Timeline, place: tuple[int, int], places: Mapping[tuple[int, Op], tuple[int, int]]
) -> tuple[int, int] | None:
    """Where the op stands that the one at `place` waited for."""
    schedule, costs = timeline.schedule, timeline.costs
    rank_of = schedule.placement.rank_of
    rank, position = place
    span = timeline.spans[rank][position]
    before = (rank, position - 1) if position else None
    for op in chain.from_iterable(inputs(span.op, schedule.placement.num_stages)):
        found = places.get((span.step, op))
        if found is None:
            continue
        arrival = timeline.spans[found[0]][found[1]].end + costs.transfer(found[0], rank_of[span.op.stage])
        if before is None or arrival > timeline.spans[before[0]][before[1]].end:
            before = found
    return before
