"""Times of a schedule's ops, its bubbles, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

from zbpipe.costs.model import CostModel, Receives, Transport
from zbpipe.schedule.ir import COMPUTATIONS, Op, OpKind, Schedule
from zbpipe.simulator.lower_bound import lower_bound
from zbpipe.simulator.time_graph import Overlap, TimeGraph, durations, fill_waits


class Span(NamedTuple):
    """One op on a rank, from `start` to `end` in seconds."""

    op: Op
    start: float
    end: float


class Collective(NamedTuple):
    """A collective of a stage, or its W's products in a wait for one ("fill"), from `start` to `end` in seconds."""

    kind: Literal["gather", "reduce", "fill"]
    stage: int
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.stage} {self.kind}"


class Idle(NamedTuple):
    """Idle seconds of a rank: before its first backward, until its last forward, and after both."""

    warmup: float
    steady: float
    cooldown: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """A simulated or measured schedule. All times are seconds from the beginning of the step.

    >>> timeline = zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1, 1, 1))
    >>> timeline
    Timeline('ZBV', p=4, m=8, makespan=25.5)
    >>> timeline.spans[0][0]
    Span(op=Op(stage=0, kind=<OpKind.F: 'F'>, microbatch=0), start=0.0, end=0.5)
    >>> timeline.peak_activations
    (4.0, 4.0, 4.0, 4.0)
    """

    schedule: Schedule
    costs: CostModel
    spans: tuple[tuple[Span, ...], ...]
    """Computations of each rank, in order."""
    transport: Transport = Transport.IDEAL
    receives: Receives | None = None
    """When ranks post receives. None if that makes no difference."""
    copies: tuple[tuple[Span, ...], ...] = ()
    """Copies of each rank to its host and back, in list order. Empty without offloading."""
    collectives: tuple[tuple[Collective, ...], ...] = ()
    """Gathers of parameters and reductions of gradients on each rank, by their start."""
    overlaps_fsdp: Overlap = True
    """Whether gathers run during the first F of a stage, and reductions during its last W or B."""
    graph: TimeGraph | None = field(default=None, compare=False)
    """The dependencies. None if it was measured."""

    def __post_init__(self) -> None:
        if not any(self.copies):
            object.__setattr__(self, "copies", ())
        object.__setattr__(self, "collectives", self.collectives or ((),) * len(self.spans))

    def __repr__(self) -> str:
        schedule = self.schedule
        size = f"p={schedule.num_ranks}, m={schedule.num_microbatches}"
        return f"Timeline({schedule.name!r}, {size}, makespan={self.makespan:g})"

    # The modules that draw it import this one, so they are imported late.
    def show(self) -> None:
        """Draw it in the terminal, as `zbpipe show` does."""
        import_module("zbpipe.views.grid").show(self)

    def svg(self, file: str | Path, drawn_with: str = "") -> None:
        """Draw it into an SVG file. `drawn_with` describes the costs."""
        drawn = import_module("zbpipe.views.svg").svg(self, drawn_with=drawn_with)
        Path(file).write_text(drawn, encoding="utf-8")

    def html(self, file: str | Path, drawn_with: str = "") -> None:
        """Write an interactive page with zoom and tooltips, which needs no network and no other file."""
        Path(file).write_text(import_module("zbpipe.views.html").html(self, drawn_with), encoding="utf-8")

    @cached_property
    def makespan(self) -> float:
        """End of the last rank, with its reductions."""
        ends = (each.end for row in self.collectives for each in row)
        return max([0.0, *(spans[-1].end for spans in self.spans if spans), *ends])

    @property
    def gathers(self) -> tuple[tuple[Collective, ...], ...]:
        """Gathers of parameters on each rank (`costs.gather`), in order."""
        return tuple(tuple(each for each in row if each.kind == "gather") for row in self.collectives)

    @property
    def reductions(self) -> tuple[tuple[Collective, ...], ...]:
        """Reductions of gradients on each rank (`costs.reduce`), in order."""
        return tuple(tuple(each for each in row if each.kind == "reduce") for row in self.collectives)

    @cached_property
    def fills(self) -> tuple[tuple[Collective, ...], ...]:
        """W's products in the waits of each rank's ops, from an op's start on. None without `costs.fill_waits`."""
        if self.graph is None:
            return ()
        rows: list[list[Collective]] = [[] for _ in self.spans]
        spans = list(chain.from_iterable(self.spans))
        for node, stage, took in fill_waits(self.graph, self.costs, [0.0] * len(spans)):
            row = rows[self.schedule.placement.rank_of[stage]]
            start = max(spans[node].start, row[-1].end if row else 0.0)
            row.append(Collective("fill", stage, start, start + took))
        return tuple(map(tuple, rows))

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
        """Largest time from a rank's first op to its last."""
        return max((spans[-1].end - spans[0].start for spans in self.spans if spans), default=0.0)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Idle seconds of each rank, by phase."""
        return tuple(_idle(spans, self.makespan) for spans in self.spans)

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Memory of a rank over time: (start, memory) pairs, in the unit of `costs.activations`.

        Offloaded memory counts until the end of its copy out, and from the start of its copy back.
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
        """Peak of each rank without working memory. Unit: activations of one microbatch in all its stages."""
        kept = replace(self, costs=replace(self.costs, working={})) if self.costs.working else self
        shares = self.schedule.placement.sum_by_rank(self.costs.activations)
        return tuple(peak / share if share else 0.0 for peak, share in zip(kept.peak_memory, shares, strict=True))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """A chain of ops from the start of the step to its end, each of which waits for the previous one."""
        return tuple(_critical_path(self))[::-1] if self.makespan else ()

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound for any schedule with this placement, these costs and this number of microbatches, in seconds."""
        bound = lower_bound(self.schedule.placement, self.costs, self.schedule.num_microbatches)
        # The time that W takes besides the waits depends on the order.
        return max(bound, *self.busy) if self.costs.fill_waits == "off" else bound


def _idle(spans: tuple[Span, ...], makespan: float) -> Idle:
    first_backward = next((n for n, span in enumerate(spans) if span.op.kind is not OpKind.F), len(spans))
    last_forward = max((n for n, span in enumerate(spans) if span.op.kind is OpKind.F), default=-1)
    gaps, end = [0.0, 0.0, 0.0], 0.0
    for n, span in enumerate(spans):
        phase = 0 if n <= first_backward else 1 if n <= last_forward else 2
        gaps[phase] += span.start - end
        end = span.end
    return Idle(gaps[0], gaps[1], gaps[2] + makespan - end)


def _memory_changes(spans: tuple[Span, ...], costs: CostModel) -> Iterator[tuple[float, float]]:
    """Times at which a rank takes memory (at an op's start) and frees it (at an op's end)."""
    for span in spans:
        cost = costs.of(*span.op)
        if cost.needs:
            yield span.start, cost.needs
        if freed := cost.needs - cost.adds:
            yield span.end, -freed


def _critical_path(timeline: Timeline) -> Iterator[Span]:
    graph = timeline.graph or TimeGraph(timeline.schedule)
    seconds, spans = durations(graph, timeline.costs), dict[int, Span]()
    for ops, row in zip(graph.ops, timeline.spans, strict=True):
        spans |= zip((op for op in ops if graph.nodes[op][1] in COMPUTATIONS), row, strict=True)
    ends = [0.0] * len(graph.nodes)
    for node in graph.order:
        waits = (ends[each] for each in graph.before[node])
        ends[node] = spans[node].end if node in spans else max(waits, default=0.0) + seconds[node]
    last = max(range(len(ends)), key=ends.__getitem__)
    hiding = {node: op for row in graph.collectives for node, op in row if ends[node] > ends[op]}
    found: int | None = hiding.get(last, last)
    while found is not None:
        if found in spans:
            yield spans[found]
        found = max(graph.before[found], key=ends.__getitem__, default=None)
