"""Schedule x CostModel -> Timeline: the times of all ops.

Every rank runs its list in order. An op starts when its rank is free and its inputs (`ir.inputs`) have arrived. A value
from another rank arrives after the link's time, one from the same rank at once. Sends cost the rank no time. That is
the ideal transport. With the blocking one the sender waits for the arrival, and with the others messages wait for each
other (`zbpipe.costs.transport`). Copies to the host and
back run parallel to the computations, one at a time in each direction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from zbpipe.costs.job import JobCosts, as_cost_model
from zbpipe.costs.model import CostModel, message_seconds
from zbpipe.costs.transport import Receives, Transport
from zbpipe.schedule.event_loop import Clock
from zbpipe.schedule.ir import COMPUTATIONS, OFFLOADS, RELOADS, Op, OpKind, Schedule, require_whole
from zbpipe.simulator.actions import Action, Rows, action_of
from zbpipe.simulator.collectives import (
    Collective,
    find_earliest,
    find_gathers,
    find_reductions,
    find_waits,
    gather_in_each_op,
)
from zbpipe.simulator.message_times import CycleError, run
from zbpipe.simulator.passes import add_messages, place_receives
from zbpipe.simulator.timeline import Span, Timeline
from zbpipe.simulator.validation import find_order, require_schedule, require_valid

_MOST_SPANS = 2**22
"""Largest number of spans in a timeline of several steps: half a gigabyte."""
_PREFERRED = (Receives.TIMED, Receives.NEAREST, Receives.LATE, Receives.EARLY)
"""Ways to receive. Ties go to the first."""
_WITH_SHARED = (*_PREFERRED, Receives.RENDEZVOUS)
"""Ways to receive where a message blocks both of its ranks."""
_WORTH_IT = 1 - 1e-3
"""Factor below which a way to receive replaces a preferred one: it has to save a thousandth of a step."""


def simulate(
    schedule: Schedule,
    costs: CostModel | JobCosts | Sequence[float] = (1.0, 1.0, 1.0),
    *,
    num_steps: int = 1,
    synchronous: bool = True,
    ahead: Sequence[int] | None = None,
    transport: Transport | str = Transport.IDEAL,
    receives: Receives | str | None = None,
    overlaps_fsdp: bool = True,
) -> Timeline:
    """Run `schedule` in the simulator.

        >>> zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1.0, 1.2, 0.8)).bubble < 0.1
        True

    Args:
        schedule: a valid schedule.
        costs: costs of its stages, or three numbers `(f, i, w)`, the seconds of each rank for one microbatch. Default:
            one second each.
        num_steps: number of consecutive steps.
        synchronous: whether all ranks wait for each other between steps, as for an optimizer that needs a global
            gradient norm. Otherwise each rank begins the next step when it is done, as ZBH2 and ZB2P assume.
        ahead: number of ops of a step that each rank may start before all ranks are done with the previous step,
            instead of none (synchronous) or all (see `zbpipe.simulator.post_validation`). For the ideal transport.
        transport: which messages wait for each other, or its name: "ideal", "one queue", "queue per peer", "shared with
            compute", "blocking".
        receives: where ranks post their receives ("early", "late", "timed", "nearest", "rendezvous"), which matters for
            transports with queues. Default: the way with the shortest step, as zbpipe's schedules choose
            it ("rendezvous" only for "shared with compute").
        overlaps_fsdp: whether FSDP gathers beside the first F of a stage and reduces beside its last W or B
            (`costs.gather`, `costs.reduce`), as zbpipe's schedules do, or before the one and after the other. With
            "shared with compute" they always run before and after these.

    Raises:
        TypeError: `schedule` or `costs` has another type.
        ValueError: the costs are for another number of stages, there is no step at all or there are millions of ops in
            all steps, `ahead` is for another number of ranks or another transport, the schedule cannot run, the
            transport is unknown, or messages wait for each other in a cycle.
    """
    require_schedule(schedule)
    costs = as_cost_model(costs, schedule.placement)
    _require_sense(schedule, num_steps)
    transport = Transport.parse(transport)
    asked = None if receives is None else Receives.parse(receives)
    overlaps_fsdp = overlaps_fsdp and transport is not Transport.SHARED
    if ahead is not None and transport is not Transport.IDEAL:
        raise ValueError(f"ahead = {ahead} is only for the ideal transport, got {str(transport)!r}")
    if not transport.has_queues:
        everything = tuple(0 if synchronous else len(row) for row in schedule)
        gate = everything if ahead is None else tuple(ahead)
        return _simulate_without_queues(schedule, costs, num_steps, gate, transport, overlaps_fsdp)
    one_step = _find_shortest(schedule, costs, transport, asked, overlaps_fsdp)
    if synchronous or num_steps == 1:
        return _repeat(one_step, num_steps)
    assert one_step.receives is not None, "with queues receives have places"
    in_a_row = _find_shortest(_join_steps(schedule, num_steps), costs, transport, one_step.receives, overlaps_fsdp)
    return _split_into_steps(in_a_row, schedule, num_steps)


def _simulate_without_queues(
    schedule: Schedule,
    costs: CostModel,
    num_steps: int,
    ahead: tuple[int, ...],
    transport: Transport,
    overlaps_fsdp: bool,
) -> Timeline:
    """Simulate a transport in which messages do not wait."""
    if len(ahead) != schedule.num_ranks:
        raise ValueError(f"ahead = {ahead} has to be one number for each of {schedule.num_ranks} ranks")
    rank_of, stages = schedule.placement.rank_of, range(schedule.placement.num_stages)
    seconds = [{kind: costs.seconds(stage, kind) for kind in OpKind} for stage in stages]
    lag = {
        (giver, taker): costs.transfer(rank_of[giver], rank_of[taker])
        for giver in stages
        for taker in range(max(giver - 1, 0), min(giver + 2, len(stages)))
    }
    blocked: dict[tuple[int, OpKind], float] = {}
    """Seconds for which a rank waits for its message, by stage and kind."""
    if transport is Transport.BLOCKING:
        blocked = {
            (stage, kind): message_seconds(Op(stage, kind, 0), schedule.placement, costs)
            for stage in stages
            for kind in COMPUTATIONS
        }
        lag = dict.fromkeys(lag, 0.0)
        seconds = [
            {kind: each + blocked.get((stage, kind), 0.0) for kind, each in seconds[stage].items()} for stage in stages
        ]
    free = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in free]
    copies: list[list[Span]] = [[] for _ in free]
    clock = Clock(
        free,
        lambda rank, op: seconds[op.stage][op.kind],
        lambda giver, taker: lag[giver.stage, taker.stage],
        waits=find_waits(schedule, costs, overlaps=overlaps_fsdp),
        lane_of=_direction if schedule.has_copies else None,
    )
    earliest = find_earliest(schedule, costs, overlaps=overlaps_fsdp)
    gathers: list[list[Collective]] = [[] for _ in free]
    for step in range(num_steps):
        gate = (ahead, max(free)) if step else None
        begin = [now if gate is None or ahead[rank] else gate[1] for rank, now in enumerate(free)]
        clock.earliest = {op: begin[rank_of[op.stage]] + time for op, time in earliest.items()}
        for ran, ops, now in zip(gathers, schedule, begin, strict=True):
            for each in find_gathers(ops, costs):
                ran.append(each._replace(start=now + each.start, end=now + each.end, step=step))
        for rank, op, start, end in clock.run(find_order(schedule), gate):
            computed = end - blocked.get((op.stage, op.kind), 0.0)
            (spans if op.kind in COMPUTATIONS else copies)[rank].append(Span(op, start, computed, step))
        for rank, row in enumerate(spans if costs.reduce and num_steps > 1 else ()):
            free[rank] = max([free[rank], *(each.end for each in find_reductions(row, costs, overlaps=overlaps_fsdp))])
    return Timeline(
        schedule,
        costs,
        tuple(map(tuple, spans)),
        num_steps,
        transport,
        copies=tuple(map(tuple, copies)),
        gathers=tuple(map(tuple, gathers)),
        overlaps_fsdp=overlaps_fsdp,
    )


def exposed_fsdp(timeline: Timeline) -> float:
    """Seconds that FSDP's gathers and reductions add to one step.

    >>> costs = CostModel(f=(1,), i=(1,), w=(2,), activations=(1,), gather=2, reduce=3)
    >>> exposed_fsdp(simulate(zbpipe.generate("ZBH1", 1, 1), costs))
    2.0
    """
    costs = timeline.costs
    if not (costs.gather or costs.reduce):
        return 0.0
    return _step(timeline, costs) - _step(timeline, replace(costs, gather=0.0, reduce=0.0))


def price_of_resharding(timeline: Timeline) -> float:
    """Share of a step that `fsdp_mode="reshard"` adds, with which each F and each backward gathers its parameters.

    >>> costs = CostModel(f=(1,), i=(2,), w=(2,), activations=(1,), gather=2)
    >>> price_of_resharding(simulate(zbpipe.generate("ZBH1", 1, 3), costs))
    0.125
    """
    return _step(timeline, gather_in_each_op(timeline.costs)) / _step(timeline, timeline.costs) - 1


def _step(timeline: Timeline, costs: CostModel) -> float:
    """Seconds of one step with other costs."""
    return simulate(
        timeline.schedule,
        costs,
        transport=timeline.transport,
        receives=timeline.receives,
        overlaps_fsdp=timeline.overlaps_fsdp,
    ).makespan


def _direction(op: Op) -> bool | None:
    """Direction of a copy: whether it goes to the host. There is one stream for each direction."""
    return None if op.kind in COMPUTATIONS else op.kind in OFFLOADS


def best_receives(schedule: Schedule, costs: CostModel, transport: Transport) -> Receives:
    """The way to receive with the shortest step for this transport. Without queues it makes no difference."""
    if not transport.has_queues:
        return _PREFERRED[0]
    try:
        return _find_shortest(schedule, costs, transport).receives or _PREFERRED[0]
    except CycleError:
        return _PREFERRED[0]


def _find_shortest(
    schedule: Schedule,
    costs: CostModel,
    transport: Transport,
    receives: Receives | None = None,
    overlaps_fsdp: bool = True,
) -> Timeline:
    """One step with the best way to receive, or the given one. CycleError if messages then wait in a cycle."""
    usual = _WITH_SHARED if transport is Transport.SHARED else _PREFERRED
    candidates = usual if receives is None else (receives,)
    ideal = simulate(schedule.computations, costs, overlaps_fsdp=overlaps_fsdp)  # torch knows no copies
    messages = add_messages(schedule)
    best, shortest, cycles = None, inf, list[CycleError]()
    for each in candidates:
        if ideal.makespan >= shortest * _WORTH_IT:
            break
        try:
            trial = _simulate_with_queues(schedule, ideal, messages, transport, each)
        except CycleError as error:
            cycles.append(error)
            continue
        if trial.makespan < shortest * _WORTH_IT:
            best, shortest = trial, trial.makespan
    if best is None:
        raise cycles[0]
    return best


def _simulate_with_queues(
    schedule: Schedule, ideal: Timeline, messages: Rows, transport: Transport, receives: Receives
) -> Timeline:
    """One step with a transport in which messages wait for each other, from the ideal one."""
    costs = ideal.costs
    rows = place_receives(messages, receives, ideal)
    overlaps = ideal.overlaps_fsdp
    earliest = {action_of(op): time for op, time in find_earliest(schedule, costs, overlaps=overlaps).items()}
    waits = {action_of(op): time for op, time in find_waits(schedule, costs, overlaps=overlaps).items()}
    times = run(rows, schedule.placement, costs, transport, _copies_wait(schedule), earliest, waits)

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
        gathers=tuple(find_gathers(row, costs) for row in schedule),
        overlaps_fsdp=overlaps,
    )


def _copies_wait(schedule: Schedule) -> dict[Action, list[Action]]:
    """Dependencies of each copy, and the copies that each computation waits for."""
    found: dict[Action, list[Action]] = {}
    last: dict[tuple[int, bool | None], Op] = {}
    """Last computation of each rank, and its last copy in each direction."""
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
    """Several equal steps. Each begins when the previous one is over on all ranks."""

    def delay(span: Span, step: int) -> Span:
        begin = step * timeline.makespan
        return Span(span.op, begin + span.start, begin + span.end, step)

    steps = range(num_steps)
    spans, copies = (
        tuple(tuple(delay(span, step) for step in steps for span in row) for row in rows)
        for rows in (timeline.spans, timeline.copies)
    )
    gathers = tuple(
        tuple(
            each._replace(start=begin + each.start, end=begin + each.end, step=step)
            for step, begin in ((step, step * timeline.makespan) for step in steps)
            for each in row
        )
        for row in timeline.gathers
    )
    waited_for = {(step, op): (step, before) for step in steps for (_, op), (_, before) in timeline.waited_for.items()}
    return replace(timeline, spans=spans, copies=copies, gathers=gathers, num_steps=num_steps, waited_for=waited_for)


def _join_steps(schedule: Schedule, num_steps: int) -> Schedule:
    """One long step with the microbatches of all steps."""
    microbatches = schedule.num_microbatches
    ops = tuple(
        tuple(op._replace(microbatch=op.microbatch + step * microbatches) for step in range(num_steps) for op in row)
        for row in schedule
    )
    return replace(schedule, num_microbatches=num_steps * microbatches, ops=ops)


def _split_into_steps(timeline: Timeline, schedule: Schedule, num_steps: int) -> Timeline:
    """The steps of `schedule` that `_join_steps` joined."""

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
    # No stage has costs for a foreign op, and fewer ops than forwards do not form a schedule.
    stages = range(schedule.placement.num_stages)
    if num_ops < len(stages) * schedule.num_microbatches or any(
        op.stage not in stages for ops in schedule for op in ops
    ):
        require_valid(schedule)
