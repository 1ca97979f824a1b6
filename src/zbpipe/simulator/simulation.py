"""Schedule x CostModel -> Timeline: what runs when.

Every rank runs its list in order. An op starts when its rank is free and its inputs (`ir.inputs`) have arrived.
A value from another rank arrives the link's time after the op that made it ended, one from the same rank at once. Sends
cost the rank no time. That is the ideal transport; with the others messages wait for each other
(`zbpipe.costs.transport`).
Copies to the host and back run parallel to the computations, one at a time in each direction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from zbpipe.costs.model import CostModel, Placeable, as_cost_model
from zbpipe.costs.transport import Receives, Transport
from zbpipe.schedule.event_loop import Clock
from zbpipe.schedule.ir import COMPUTATIONS, OFFLOADS, RELOADS, Op, OpKind, Schedule, require_whole
from zbpipe.simulator.actions import Action, Rows, action_of
from zbpipe.simulator.message_times import CircleError, run
from zbpipe.simulator.passes import add_messages, place_receives
from zbpipe.simulator.timeline import Span, Timeline
from zbpipe.simulator.validation import find_order, require_schedule, require_valid

_MOST_SPANS = 2**22
"""In a timeline of several steps: half a gigabyte."""
_PREFERRED = (Receives.TIMED, Receives.NEAREST, Receives.LATE, Receives.EARLY)
"""In a tie the first wins."""
_WITH_SHARED = (*_PREFERRED, Receives.RENDEZVOUS)
"""Where a message holds up both of its ranks."""
_WORTH_IT = 1 - 1e-3
"""A way to receive has to save a thousandth of a step to be chosen over one that is preferred."""


def simulate(
    schedule: Schedule,
    costs: CostModel | Placeable | Sequence[float] = (1.0, 1.0, 1.0),
    *,
    num_steps: int = 1,
    synchronous: bool = True,
    ahead: Sequence[int] | None = None,
    transport: Transport | str = Transport.IDEAL,
    receives: Receives | str | None = None,
) -> Timeline:
    """Run `schedule` in the simulator.

        >>> zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1.0, 1.2, 0.8)).bubble < 0.1
        True

    Args:
        schedule: a valid one.
        costs: of its stages; or three numbers `(f, i, w)`, the seconds that each rank takes for one microbatch; without
            them, a second for each.
        num_steps: how often the schedule runs, one step after the other.
        synchronous: whether all ranks wait for each other between steps, as for an optimizer that needs a global
            gradient norm. Without it each rank begins the next step when it is done: ZBH2 and ZB2P count on that.
        ahead: by rank, how many ops of a step it may start before all ranks are done with the step before, instead of
            none (synchronous) or all (see `zbpipe.simulator.post_validation`); for the ideal transport.
        transport: what messages wait for, or its name: "ideal", "one queue", "queue per peer", "shared with compute".
        receives: where ranks post their receives ("early", "late", "timed", "nearest", "rendezvous"), which counts for
            all transports but the ideal one. By default the way with the shortest step, as zbpipe's schedules choose
            it ("rendezvous" only for "shared with compute").

    Raises:
        TypeError: `schedule` or `costs` is something else.
        ValueError: costs for another number of stages, no step at all or millions of ops in all steps, `ahead` with
            another number of ranks or for another transport, a schedule that cannot run, an unknown transport, or
            messages that wait for each other in a circle.
    """
    require_schedule(schedule)
    costs = as_cost_model(costs, schedule.placement)
    _require_sense(schedule, num_steps)
    transport = Transport.parse(transport)
    asked = None if receives is None else Receives.parse(receives)
    if transport is Transport.IDEAL:
        everything = tuple(0 if synchronous else len(row) for row in schedule)
        return _simulate_without_queues(schedule, costs, num_steps, everything if ahead is None else tuple(ahead))
    if ahead is not None:
        raise ValueError(f"ahead = {ahead} is for the ideal transport alone, got {str(transport)!r}")
    one_step = _find_shortest(schedule, costs, transport, asked)
    if synchronous or num_steps == 1:
        return _repeat(one_step, num_steps)
    assert one_step.receives is not None, "with queues receives have places"
    in_a_row = _find_shortest(_join_steps(schedule, num_steps), costs, transport, one_step.receives)
    return _split_into_steps(in_a_row, schedule, num_steps)


def _simulate_without_queues(schedule: Schedule, costs: CostModel, num_steps: int, ahead: tuple[int, ...]) -> Timeline:
    """Simulate a transport in which messages wait for nothing."""
    if len(ahead) != schedule.num_ranks:
        raise ValueError(f"ahead = {ahead} has to be one number for each of {schedule.num_ranks} ranks")
    rank_of, stages = schedule.placement.rank_of, range(schedule.placement.num_stages)
    seconds = [{kind: costs.seconds(stage, kind) for kind in OpKind} for stage in stages]
    lag = {
        (giver, taker): costs.transfer(rank_of[giver], rank_of[taker])
        for giver in stages
        for taker in range(max(giver - 1, 0), min(giver + 2, len(stages)))
    }
    free = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in free]
    copies: list[list[Span]] = [[] for _ in free]
    clock = Clock(
        free,
        lambda rank, op: seconds[op.stage][op.kind],
        lambda giver, taker: lag[giver.stage, taker.stage],
        lane_of=_direction if schedule.has_copies else None,
    )
    for step in range(num_steps):
        gate = (ahead, max(free)) if step else None
        for rank, op, start, end in clock.run(find_order(schedule), gate):
            (spans if op.kind in COMPUTATIONS else copies)[rank].append(Span(op, start, end, step))
    return Timeline(schedule, costs, _freeze(spans), num_steps, copies=_freeze(copies))


def _direction(op: Op) -> bool | None:
    """Whether a copy goes to the host: one stream for each direction."""
    return None if op.kind in COMPUTATIONS else op.kind in OFFLOADS


def _freeze(spans: list[list[Span]]) -> tuple[tuple[Span, ...], ...]:
    return tuple(map(tuple, spans))


def best_receives(schedule: Schedule, costs: CostModel, transport: Transport) -> Receives:
    """Where to place receives for the shortest step with this transport. With the ideal one it makes no difference."""
    if transport is Transport.IDEAL:
        return _PREFERRED[0]
    try:
        return _find_shortest(schedule, costs, transport).receives or _PREFERRED[0]
    except CircleError:
        return _PREFERRED[0]


def _find_shortest(
    schedule: Schedule, costs: CostModel, transport: Transport, receives: Receives | None = None
) -> Timeline:
    """One step with receives where they are best, or as given; CircleError if messages then wait in a circle."""
    usual = _WITH_SHARED if transport is Transport.SHARED else _PREFERRED
    candidates = usual if receives is None else (receives,)
    ideal, messages = simulate(schedule.computations, costs), add_messages(schedule)  # as torch knows it: no copies
    best, shortest, circles = None, inf, list[CircleError]()
    for each in candidates:
        if ideal.makespan >= shortest * _WORTH_IT:
            break
        try:
            trial = _simulate_with_queues(schedule, ideal, messages, transport, each)
        except CircleError as error:
            circles.append(error)
            continue
        if trial.makespan < shortest * _WORTH_IT:
            best, shortest = trial, trial.makespan
    if best is None:
        raise circles[0]
    return best


def _simulate_with_queues(
    schedule: Schedule, ideal: Timeline, messages: Rows, transport: Transport, receives: Receives
) -> Timeline:
    """One step with a transport in which messages wait for each other, from one in which they do not."""
    costs = ideal.costs
    rows = place_receives(messages, receives, ideal)
    times = run(rows, schedule.placement, costs, transport, _copies_wait(schedule))

    def make_spans(kinds: Collection[OpKind]) -> tuple[tuple[Span, ...], ...]:
        return tuple(
            tuple(Span(op, times.start[action_of(op)], times.end[action_of(op)]) for op in ops if op.kind in kinds)
            for ops in schedule
        )

    op_of = {action_of(op): op for ops in schedule.computations for op in ops}
    waited_for = {(0, op): (0, op_of[times.waited_for[each]]) for each, op in op_of.items() if each in times.waited_for}
    return Timeline(
        schedule,
        costs,
        make_spans(COMPUTATIONS),
        transport=transport,
        receives=receives,
        waited_for=waited_for,
        copies=make_spans((*OFFLOADS, *RELOADS)),
    )


def _copies_wait(schedule: Schedule) -> dict[Action, list[Action]]:
    """What each copy waits for, and each computation for copies."""
    found: dict[Action, list[Action]] = {}
    last: dict[tuple[int, bool | None], Op] = {}
    """By rank the last computation, and the last copy in each direction."""
    for rank, op, dependencies in find_order(schedule) if schedule.has_copies else ():
        lane = _direction(op)
        if lane is None:
            before = [each for each in dependencies if each.kind in RELOADS]
        else:
            before = [*dependencies, *(last[rank, each] for each in (None, lane) if (rank, each) in last)]
        found[action_of(op)] = list(map(action_of, before))
        last[rank, lane] = op
    return found


def _repeat(timeline: Timeline, num_steps: int) -> Timeline:
    """Each step begins when the one before is over on all ranks, so they are alike."""

    def delay(span: Span, step: int) -> Span:
        begin = step * timeline.makespan
        return Span(span.op, begin + span.start, begin + span.end, step)

    steps = range(num_steps)
    spans, copies = (
        tuple(tuple(delay(span, step) for step in steps for span in row) for row in rows)
        for rows in (timeline.spans, timeline.copies)
    )
    waited_for = {(step, op): (step, before) for step in steps for (_, op), (_, before) in timeline.waited_for.items()}
    return replace(timeline, spans=spans, copies=copies, num_steps=num_steps, waited_for=waited_for)


def _join_steps(schedule: Schedule, num_steps: int) -> Schedule:
    """One long step, with as many more microbatches."""
    microbatches = schedule.num_microbatches
    ops = tuple(
        tuple(op._replace(microbatch=op.microbatch + step * microbatches) for step in range(num_steps) for op in row)
        for row in schedule
    )
    return replace(schedule, num_microbatches=num_steps * microbatches, ops=ops)


def _split_into_steps(timeline: Timeline, schedule: Schedule, num_steps: int) -> Timeline:
    """The steps of `schedule` that `_join_steps` made one of."""

    def step_of(op: Op) -> tuple[int, Op]:
        step, microbatch = divmod(op.microbatch, schedule.num_microbatches)
        return step, op._replace(microbatch=microbatch)

    def split(span: Span) -> Span:
        step, op = step_of(span.op)
        return Span(op, span.start, span.end, step)

    spans, copies = (tuple(tuple(map(split, row)) for row in rows) for rows in (timeline.spans, timeline.copies))
    waited_for = {step_of(op): step_of(before) for (_, op), (_, before) in timeline.waited_for.items()}
    return replace(timeline, schedule=schedule, spans=spans, copies=copies, num_steps=num_steps, waited_for=waited_for)


def _require_sense(schedule: Schedule, num_steps: int) -> None:
    require_whole(1, num_steps=num_steps)
    num_ops = sum(map(len, schedule))
    if num_steps > 1 and num_steps * num_ops > _MOST_SPANS:
        most = max(_MOST_SPANS // num_ops, 1)
        raise ValueError(f"num_steps={num_steps} of {num_ops} ops are too many: simulate at most {most}")
    # No stage has costs for a foreign op, and a schedule with fewer ops than forwards is no schedule.
    stages = range(schedule.placement.num_stages)
    if num_ops < len(stages) * schedule.num_microbatches or any(
        op.stage not in stages for ops in schedule for op in ops
    ):
        require_valid(schedule)
