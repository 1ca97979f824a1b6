"""Times of a schedule's ops, its bubbles, and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from zbpipe.costs.model import ROUNDING, CostModel, message_seconds, rank_shares
from zbpipe.costs.transport import Receives, Transport
from zbpipe.schedule.frozendict import FrozenDict
from zbpipe.schedule.ir import Op, OpKind, Schedule, inputs
from zbpipe.simulator.collectives import Collective, find_reductions, find_waits
from zbpipe.simulator.lower_bound import lower_bound


class Span(NamedTuple):
    """One op on a rank, from `start` to `end` in seconds."""

    op: Op
    start: float
    end: float
    step: int = 0
    """Index of the step, in a timeline of several steps."""


class Idle(NamedTuple):
    """Idle seconds of a rank, by phase."""

    warmup: float
    """Before its first backward."""
    steady: float
    """Between its first backward and its last forward."""
    cooldown: float
    """After its last forward (or first backward, whichever is later)."""


@dataclass(frozen=True, repr=False)
class Timeline:
    """A simulated or measured schedule. All times are seconds from the beginning of the first step.

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
    """Computations of each rank, in the order in which they ran."""
    num_steps: int = 1
    transport: Transport = Transport.IDEAL
    receives: Receives | None = None
    """When ranks post receives. None where that makes no difference."""
    waited_for: Mapping[tuple[int, Op], tuple[int, Op]] = field(default_factory=lambda: FrozenDict({}))
    """By step and op, the op whose end it waited for, on its rank or behind messages. Empty for the ideal transport."""
    copies: tuple[tuple[Span, ...], ...] = ()
    """Copies of each rank to its host and back, in list order. Empty without offloading."""
    gathers: tuple[tuple[Collective, ...], ...] = ()
    """Gathers of parameters on each rank (`costs.gather`), in order."""
    overlaps_fsdp: bool = True
    """Whether gathers run beside the first F of a stage, and reductions beside its last W or B."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "waited_for", FrozenDict(self.waited_for))
        if not any(self.copies):
            object.__setattr__(self, "copies", ())

    def __repr__(self) -> str:
        schedule = self.schedule
        size = f"p={schedule.num_ranks}, m={schedule.num_microbatches}"
        return f"Timeline({schedule.name!r}, {size}, makespan={self.makespan:g})"

    @property
    def _pictures(self) -> Any:
        """Functions that draw it. They import this module, so the first picture imports them by name."""
        return import_module("zbpipe.views.pictures")

    def _repr_html_(self) -> str:
        """The picture, in notebooks."""
        page: str = self._pictures.draw_in_notebook(self)
        return page

    def show(self) -> None:
        """Draw it in the terminal, as `zbpipe show` does."""
        self._pictures.show(self)

    def svg(self, file: str | Path) -> None:
        """Draw it into an SVG file."""
        self._pictures.write_svg(self, file)

    def html(self, file: str | Path) -> None:
        """Write an interactive page with zoom and tooltips, which needs no network and no other file."""
        self._pictures.write_html(self, file)

    @cached_property
    def makespan(self) -> float:
        """End of the last rank, with its reductions."""
        return max([self._end_of_computations, *(row[-1].end for row in self.reductions if row)])

    @property
    def _end_of_computations(self) -> float:
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def waits(self) -> Mapping[Op, float]:
        """Seconds for which ranks wait for reductions, by the op before. Empty if FSDP overlaps."""
        return find_waits(self.schedule, self.costs, overlaps=self.overlaps_fsdp)

    @cached_property
    def reductions(self) -> tuple[tuple[Collective, ...], ...]:
        """Reductions of gradients on each rank (`costs.reduce`). They run beside the computations, one at a time."""
        return tuple(find_reductions(spans, self.costs, overlaps=self.overlaps_fsdp) for spans in self.spans)

    @cached_property
    def collectives(self) -> tuple[tuple[Collective, ...], ...]:
        """Gathers and reductions of each rank, in order."""
        rows = zip(self.gathers or ((),) * len(self.spans), self.reductions, strict=True)
        return tuple(tuple(sorted((*gathers, *others), key=lambda each: each.start)) for gathers, others in rows)

    @property
    def exposed_reduction(self) -> float:
        """Seconds at the end in which nothing but reductions runs."""
        return self.makespan - self._end_of_computations

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Busy seconds of each rank."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time: 1 - busy / makespan, 0 for an empty timeline."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @property
    def longest_rank_span(self) -> float:
        """The longest time from one rank's first op to its last, in one step."""
        return max((spans[-1].end - spans[0].start for spans in self.spans if spans), default=0.0)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Idle seconds of each rank, by phase."""
        return tuple(_idle(spans, self.makespan) for spans in self.spans)

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Memory of a rank over time: (start, memory) pairs, in the unit of `costs.activations`.

        It consists of the activations and the working memory of the op that runs (`costs.working`). Offloaded memory
        counts until the end of its copy out, and from the start of its copy back.
        """
        held, profile = 0.0, [(0.0, 0.0)]
        changes = list(_memory_changes(self.spans[rank], self.costs))
        if self.copies:
            copied = list(_memory_changes(self.copies[rank], self.costs))
            # The sort is stable for events at one time: memory is freed before it is taken.
            freed, taken = ([each for each in copied if (each[1] > 0) is takes] for takes in (False, True))
            changes = sorted((*freed, *changes, *taken), key=itemgetter(0))
        for time, change in changes:
            held += change
            profile.append((time, held))
        return profile

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Peak of each rank's `memory`, in the unit of `costs.activations`."""
        return tuple(max(held for _, held in self.memory(rank)) for rank in range(len(self.spans)))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Peak of each rank without working memory.

        The unit is a rank's share of one microbatch: the activations of all its stages.
        """
        kept = replace(self, costs=replace(self.costs, working={})) if self.costs.working else self
        shares = rank_shares(self.schedule.placement, self.costs)
        return tuple(peak / share if share else 0.0 for peak, share in zip(kept.peak_memory, shares, strict=True))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """A chain of ops from the start of the last step to its end, in which each waits for the previous one."""
        return tuple(_critical_path(self))[::-1] if self.makespan else ()

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound for any schedule with this placement, these costs and this number of microbatches, in seconds."""
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
    """Times at which a rank takes and frees memory: an op takes at its start and frees at its end."""
    for span in spans:
        stage, kind = span.op.stage, span.op.kind
        taken = costs.needs(stage, kind)
        freed = taken - costs.adds(stage, kind)
        if taken:
            yield span.start, taken
        if freed:
            yield span.end, -freed


def _critical_path(timeline: Timeline) -> Iterator[Span]:
    """The critical path, from its end to its beginning."""
    places = {
        (span.step, span.op): (rank, position)
        for rank, spans in enumerate(timeline.spans)
        for position, span in enumerate(spans)
    }
    place: tuple[int, int] | None = _last_place(timeline)
    last_step = timeline.num_steps - 1
    while place is not None:
        span = timeline.spans[place[0]][place[1]]
        if span.step != last_step:
            return
        yield span
        if not timeline.transport.has_queues:
            place = _latest_before(timeline, place, places)
        else:
            before = timeline.waited_for.get((span.step, span.op))
            place = None if before is None else places[before]


def _last_place(timeline: Timeline) -> tuple[int, int]:
    """The place of the op that ends last, or of the last one before the reduction that ends last."""
    if not timeline.exposed_reduction:
        rank = max(range(len(timeline.spans)), key=lambda r: timeline.spans[r][-1].end)
        return rank, len(timeline.spans[rank]) - 1
    rank = max((r for r, row in enumerate(timeline.reductions) if row), key=lambda r: timeline.reductions[r][-1].end)
    stage, spans = timeline.reductions[rank][-1].stage, timeline.spans[rank]
    return rank, max(position for position, span in enumerate(spans) if span.op.stage == stage)


def _latest_before(
    timeline: Timeline, place: tuple[int, int], places: Mapping[tuple[int, Op], tuple[int, int]]
) -> tuple[int, int] | None:
    """The place of the op that the one at `place` waited for."""
    schedule, costs = timeline.schedule, timeline.costs
    rank_of = schedule.placement.rank_of
    rank, position = place
    span = timeline.spans[rank][position]
    before = (rank, position - 1) if position else None
    free = 0.0
    if before is not None:
        previous = timeline.spans[rank][position - 1]
        free = previous.end + timeline.waits.get(previous.op, 0.0)
        if timeline.transport is Transport.BLOCKING:
            free += message_seconds(previous.op, schedule.placement, costs)
    for op in chain.from_iterable(inputs(span.op, schedule.placement.num_stages)):
        found = places.get((span.step, op))
        if found is None:
            continue
        arrival = timeline.spans[found[0]][found[1]].end + costs.transfer(found[0], rank_of[span.op.stage])
        if before is None or arrival > free:
            before, free = found, arrival
    waited_for_gather = any(timeline.gathers) and span.start > free * (1 + ROUNDING)
    return None if waited_for_gather else before
