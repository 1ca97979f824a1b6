"""Schedule x CostModel -> Timeline: who runs what when, where the bubbles are, and how much memory it takes.

Every rank runs its list in order. An op starts when its rank is free and its inputs have arrived: F(s, m) needs
F(s - 1, m); I(s, m) or B(s, m) needs F(s, m) and I(s + 1, m) or B(s + 1, m); W(s, m) needs I(s, m). A value from
another rank arrives the link's time after the op that made it ended, one from the same rank at once. Sends cost the
rank no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zbpipe.costs import CostModel
from zbpipe.ir import Op, OpKind, Schedule
from zbpipe.planner.bound import lower_bound
from zbpipe.validate import require_valid

_MOST_SPANS = 2**22
"""In a timeline of several steps: half a gigabyte."""


class Span(NamedTuple):
    """One op on a rank, from `start` to `end` in seconds."""

    op: Op
    start: float
    end: float
    step: int = 0
    """Which of several steps in a row."""


class Idle(NamedTuple):
    """Seconds in which a rank has nothing to do, by when."""

    warmup: float
    """Before its first backward."""
    steady: float
    """Between its first backward and its last forward."""
    cooldown: float
    """After its last forward (or first backward, whichever is later)."""


@dataclass(frozen=True)
class Timeline:
    """A schedule that ran. All times are seconds from the beginning of the first step."""

    schedule: Schedule
    costs: CostModel
    spans: tuple[tuple[Span, ...], ...]
    """By rank, in the order in which they ran."""
    num_steps: int = 1

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
        """The most that each rank holds at a time, in the unit of `costs.activations`."""
        return tuple(max(held for _, held in self.memory(rank)) for rank in range(len(self.spans)))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The same by rank in units of its share of one microbatch: what all its stages keep of one."""
        shares = (
            sum(self.costs.activations[stage] for stage in self.schedule.placement.stages_on(rank))
            for rank in range(len(self.spans))
        )
        return tuple(peak / share if share else 0.0 for peak, share in zip(self.peak_memory, shares, strict=True))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """A chain of ops from the start of the last step to its end, in which each waits for the one before it."""
        return tuple(_critical_path(self)) if self.makespan else ()

    @cached_property
    def lower_bound(self) -> float:
        """Seconds below which no schedule with this placement, these costs and so many microbatches can be."""
        one_step = lower_bound(self.schedule.placement, self.costs, self.schedule.num_microbatches)
        return max(one_step, *self.busy)


def simulate(schedule: Schedule, costs: CostModel, *, num_steps: int = 1, synchronous: bool = True) -> Timeline:
    """Run `schedule` on paper.

    Args:
        schedule: a valid one.
        costs: for its stages.
        num_steps: how often the schedule runs, one step after the other.
        synchronous: whether all ranks wait for each other between steps, as for an optimizer that needs a global
            gradient norm. Without it each rank begins the next step when it is done: ZBH2 and ZB2P count on that.

    Raises:
        ValueError: costs for another number of stages, no step at all or millions of ops in all steps, or a schedule
            that cannot run.
    """
    if costs.num_stages != schedule.placement.num_stages:
        raise ValueError(
            f"schedule {schedule.name} has {schedule.placement.num_stages} stages, but the costs are for"
            f" {costs.num_stages}"
        )
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} makes no timeline: simulate at least one step")
    num_ops = sum(map(len, schedule))
    if num_steps > 1 and num_steps * num_ops > _MOST_SPANS:
        most = max(_MOST_SPANS // num_ops, 1)
        raise ValueError(f"num_steps={num_steps} of {num_ops} ops are too many: simulate at most {most}")
    # Not even a forward for each: room for all of them may be more than there is.
    if num_ops < schedule.placement.num_stages * schedule.num_microbatches:
        require_valid(schedule)
    clocks = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in clocks]
    for step in range(num_steps):
        if synchronous:
            clocks = [max(clocks)] * schedule.num_ranks
        _run_step(schedule, costs, step, clocks, spans)
    return Timeline(schedule, costs, tuple(map(tuple, spans)), num_steps)


def _run_step(schedule: Schedule, costs: CostModel, step: int, clocks: list[float], spans: list[list[Span]]) -> None:
    """Advance every rank through its list once; a rank that has to wait is taken up again when its input is there."""
    rank_of, last = schedule.placement.rank_of, schedule.placement.num_stages - 1
    num_microbatches = schedule.num_microbatches
    kinds = tuple(OpKind)
    seconds = {kind: [costs.seconds(stage, kind) for stage in range(last + 1)] for kind in kinds}
    # When a stage's output, and the gradient of its input, reach the rank that needs them; None: not computed yet.
    forward: list[list[float | None]] = [[None] * num_microbatches for _ in range(last + 1)]
    backward: list[list[float | None]] = [[None] * num_microbatches for _ in range(last + 1)]
    down = [costs.transfer(rank_of[s], rank_of[min(s + 1, last)]) for s in range(last + 1)]
    up = [costs.transfer(rank_of[s], rank_of[max(s - 1, 0)]) for s in range(last + 1)]
    position = [0] * schedule.num_ranks
    sleepers: dict[tuple[bool, int, int], int] = {}
    awake = list(range(schedule.num_ranks))
    while awake:
        rank = awake.pop()
        ops, clock, done = schedule.ops[rank], clocks[rank], spans[rank]
        while position[rank] < len(ops):
            op = ops[position[rank]]
            stage, kind, microbatch = op
            if kind is OpKind.F:
                arrived = forward[stage - 1][microbatch] if stage else 0.0
                source = (True, stage - 1, microbatch)
            elif kind is OpKind.W:
                arrived, source = None if backward[stage][microbatch] is None else 0.0, (False, stage, microbatch)
            elif stage == last or forward[stage][microbatch] is None:
                arrived, source = None if forward[stage][microbatch] is None else 0.0, (True, stage, microbatch)
            else:
                arrived, source = backward[stage + 1][microbatch], (False, stage + 1, microbatch)
            if arrived is None:
                sleepers[source] = rank
                break
            start = clock if clock > arrived else arrived
            clock = start + seconds[kind][stage]
            done.append(Span(op, start, clock, step))
            position[rank] += 1
            if kind is OpKind.F:
                forward[stage][microbatch] = clock + down[stage]
                sleeper = sleepers.pop((True, stage, microbatch), None)
            elif kind is OpKind.W:
                continue
            else:
                backward[stage][microbatch] = clock + up[stage]
                sleeper = sleepers.pop((False, stage, microbatch), None)
            if sleeper is not None:
                awake.append(sleeper)
        clocks[rank] = clock
    if any(position[rank] < len(ops) for rank, ops in enumerate(schedule)):
        require_valid(schedule)
        raise ValueError(f"schedule {schedule.name} cannot run")


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


def _critical_path(timeline: Timeline) -> list[Span]:
    schedule, costs = timeline.schedule, timeline.costs
    rank_of = schedule.placement.rank_of
    places = {
        (span.op, span.step): (rank, position)
        for rank, spans in enumerate(timeline.spans)
        for position, span in enumerate(spans)
    }
    rank = max(range(len(timeline.spans)), key=lambda r: timeline.spans[r][-1].end)
    position = len(timeline.spans[rank]) - 1
    path: list[Span] = []
    while True:
        span = timeline.spans[rank][position]
        path.append(span)
        before = (rank, position - 1) if position else None
        for op in _inputs(span.op, schedule.placement.num_stages):
            place = places.get((op, span.step))
            if place is None:
                continue
            arrival = timeline.spans[place[0]][place[1]].end + costs.transfer(place[0], rank_of[span.op.stage])
            if before is None or arrival > timeline.spans[before[0]][before[1]].end:
                before = place
        if before is None or timeline.spans[before[0]][before[1]].step != span.step:
            return path[::-1]
        rank, position = before


def _inputs(op: Op, num_stages: int) -> tuple[Op, ...]:
    """The ops of other stages whose result `op` takes."""
    if op.kind is OpKind.F:
        return (Op(op.stage - 1, OpKind.F, op.microbatch),) if op.stage else ()
    if op.kind is OpKind.W or op.stage == num_stages - 1:
        return ()
    return (Op(op.stage + 1, OpKind.I, op.microbatch), Op(op.stage + 1, OpKind.B, op.microbatch))
