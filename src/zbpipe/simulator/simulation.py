"""Schedule x CostModel -> Timeline: the times of all ops.

Every rank runs its list in order. An op starts when its rank is free and its inputs (`ir.inputs`) have arrived over the
links. Transports make messages wait for each other (`zbpipe.costs.model.Transport`). Copies to the host and back, and
FSDP's collectives, run parallel to the computations. All of it is one graph (`zbpipe.simulator.time_graph`).

Several steps in a row have a period: a rank that is done steps its optimizer and begins the next step. When the other
ranks are done, too, the norm of all gradients is known. That is the validation, at a fixed place in each rank's list
(Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4: post-validation). If the gradients should have been
clipped, the rank discards the ops that ran ahead, steps again, and runs its list again.

Only forwards run ahead, and none of the last stage, because they change no gradient and no loss. A message is received
early only if it was sent early, so on failure a rank knows which messages come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from operator import add
from typing import Any

from zbpipe.costs.job import JobCosts, as_cost_model
from zbpipe.costs.model import GATHER, ROUNDING, SENDS, CostModel, FillWaits, Receives, Transport
from zbpipe.schedule.ir import COMPUTATIONS, Schedule
from zbpipe.simulator.actions import COMPUTE, RECEIVES, Action, Rows, other_end
from zbpipe.simulator.passes import add_messages, place_receives, wait_of
from zbpipe.simulator.time_graph import Overlap, TimeGraph, durations, longest_path
from zbpipe.simulator.timeline import Collective, Span, Timeline
from zbpipe.simulator.validation import require_runnable, require_schedule, require_valid

_PREFERRED = (Receives.TIMED, Receives.NEAREST, Receives.LATE, Receives.EARLY)
"""Ways to receive. Ties go to the first."""
_WORTH_IT = 1 - 1e-3
"""A way to receive replaces a preferred one only below this ratio of their steps: a gain of a thousandth."""


def simulate(
    schedule: Schedule,
    costs: CostModel | JobCosts | Sequence[float] = (1.0, 1.0, 1.0),
    *,
    transport: Transport | str = Transport.IDEAL,
    receives: Receives | str | None = None,
    overlaps_fsdp: Overlap = True,
    fill_waits: FillWaits | None = None,
) -> Timeline:
    """Run `schedule` in the simulator.

        >>> zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1.0, 1.2, 0.8)).bubble < 0.1
        True

    Args:
        schedule: a valid schedule.
        costs: costs of its stages, or three numbers `(f, i, w)`, the seconds of each rank for one microbatch. Default:
            one second each.
        transport: which messages wait for each other: "ideal", "one queue", "queue per peer", "shared with compute",
            "blocking".
        receives: where ranks post their receives, which matters for transports with queues: "early", "late", "timed",
            "nearest", "rendezvous". Default: the way with the shortest step, as zbpipe's schedules choose it.
        overlaps_fsdp: whether FSDP gathers during the first F of a stage and reduces during its last W or B, as
            zbpipe's schedules do, or before the one and after the other, as always with "shared with compute". With
            "gathers" only these overlap, see `how_runs`.
        fill_waits: which waits for collectives (`CostModel.waits`) run products of W: "off", "own", "all". Default:
            that of the costs. W and B are shorter by what ran before, and memory counts as without. zbpipe's runtime
            fills them in schedules with I and W, and where nothing is copied to the host.

    TypeError for another type of `schedule` or `costs`. ValueError if the costs are for another number of stages, the
    schedule cannot run, or a name is unknown.
    """
    require_schedule(schedule)
    costs = as_cost_model(costs, schedule.placement, schedule.num_microbatches)
    if fill_waits is not None:
        costs = replace(costs, fill_waits=fill_waits)
    if sum(map(len, schedule)) < schedule.placement.num_stages * schedule.num_microbatches:  # too few for the forwards
        require_valid(schedule)
    transport = Transport.parse(transport)
    chosen = None if receives is None else Receives.parse(receives)
    overlaps_fsdp = transport is not Transport.SHARED and overlaps_fsdp
    require_runnable(schedule)
    if transport.has_queues:
        chosen, graph = _find_receives(schedule, costs, transport, chosen, overlaps_fsdp)
    else:
        chosen, graph = None, TimeGraph(schedule, transport, has_fsdp=costs.has_fsdp, overlaps_fsdp=overlaps_fsdp)
    timeline = _make_timeline(graph, costs)
    return replace(timeline, transport=transport, receives=chosen, overlaps_fsdp=overlaps_fsdp)


def _make_timeline(graph: TimeGraph, costs: CostModel) -> Timeline:
    schedule = graph.schedule
    starts, ends = longest_path(graph, durations(graph, costs))
    ran = [
        tuple(map(Span, row, starts[ops.start : ops.stop], ends[ops.start : ops.stop]))
        for row, ops in zip(schedule, graph.ops, strict=True)
    ]
    copies: list[tuple[Span, ...]] = []
    if schedule.has_copies:
        copies = [tuple(span for span in row if span.op.kind not in COMPUTATIONS) for row in ran]
        ran = [tuple(span for span in row if span.op.kind in COMPUTATIONS) for row in ran]
    collectives: list[list[Collective]] = [[] for _ in schedule]
    for rank, row in enumerate(graph.collectives):
        for node, op in row:
            stage, kind, _ = graph.nodes[node]
            if ends[node] > starts[node] and kind == GATHER:
                collectives[rank].append(Collective("gather", stage, starts[node], ends[node]))
            elif ends[node] > starts[node]:
                collectives[rank].append(Collective("reduce", stage, starts[node], max(ends[node], ends[op])))
    return Timeline(
        schedule,
        costs,
        tuple(ran),
        copies=tuple(copies),
        collectives=tuple(tuple(sorted(row, key=lambda each: each.start)) for row in collectives),
        graph=graph,
    )


def how_runs(source: str, stages_per_rank: int) -> dict[str, Any]:
    """How the class of a schedule overlaps FSDP's collectives and fills waits, by its owner: see `Algorithm.source`.

    torch's own fill none, and wait for whole stages. But with one stage per rank there is no action that gathers it, so
    FSDP2's hooks gather module by module in the first F.
    """
    if source != "torch":
        return {"overlaps_fsdp": True}
    return {"overlaps_fsdp": stages_per_rank == 1 and "gathers", "fill_waits": "off"}


def exposed_fsdp(timeline: Timeline) -> float:
    """Seconds that FSDP's gathers and reductions add to one step."""
    costs = timeline.costs
    if not costs.has_fsdp:
        return 0.0
    return _step(timeline, costs) - _step(timeline, replace(costs, gather=0.0, reduce=0.0))


def price_of_resharding(timeline: Timeline) -> float:
    """Share of a step that `fsdp_mode="reshard"` adds: each F and each backward gathers its parameters."""
    return _step(timeline, gather_in_each_op(timeline.costs)) / _step(timeline, timeline.costs) - 1


def gain_of_fills(timeline: Timeline) -> float:
    """Share of a step that `fill_waits="own"` saves."""
    return 1 - _step(timeline, replace(timeline.costs, fill_waits="own")) / (timeline.makespan or 1.0)


def gather_in_each_op(costs: CostModel) -> CostModel:
    """The costs with `fsdp_mode="reshard"`: each F and each backward gathers the parameters, takes no less time than
    that, and no gather precedes the step."""
    f, i = (tuple(map(max, own, costs.by_stage(costs.gather))) for own in (costs.f, costs.i))
    return replace(costs, f=f, i=i, gather=0.0)


def _step(timeline: Timeline, costs: CostModel) -> float:
    how: Any = {name: getattr(timeline, name) for name in ("transport", "receives", "overlaps_fsdp")}
    return simulate(timeline.schedule, costs, **how).makespan


def best_receives(schedule: Schedule, costs: CostModel, transport: Transport) -> Receives:
    """The way to receive with the shortest step for this transport. Without queues all are equal."""
    return _find_receives(schedule, costs, transport)[0] if transport.has_queues else _PREFERRED[0]


def _find_receives(
    schedule: Schedule,
    costs: CostModel,
    transport: Transport,
    receives: Receives | None = None,
    overlaps_fsdp: Overlap = True,
) -> tuple[Receives, TimeGraph]:
    """The best way to receive, or the given one, and the step's graph with its messages."""
    fills: FillWaits | None = "off" if schedule.has_copies else None
    ideal = simulate(schedule.computations, costs, overlaps_fsdp=overlaps_fsdp, fill_waits=fills)
    messages = add_messages(schedule)
    ways = (*_PREFERRED, Receives.RENDEZVOUS) if transport is Transport.SHARED else _PREFERRED
    found: list[tuple[Receives, TimeGraph]] = []
    shortest = inf
    for each in [receives] if receives else ways:
        if ideal.makespan >= shortest * _WORTH_IT:
            break
        rows = place_receives(messages, each, ideal)
        graph = TimeGraph(schedule, transport, rows, has_fsdp=costs.has_fsdp, overlaps_fsdp=overlaps_fsdp)
        makespan = max(longest_path(graph, durations(graph, costs))[1])
        if makespan < shortest * _WORTH_IT:
            found.append((each, graph))
            shortest = makespan
    return found[-1]


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
    graph = _between_steps(schedule)
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
    return _mean_step(_delays(_between_steps(schedule, ahead), costs))


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


def _between_steps(schedule: Schedule, ahead: Sequence[int] | None = None) -> TimeGraph:
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

        def cut(row: tuple[Action, ...], number: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
            computations = (n for n, each in enumerate(row) if each.kind in COMPUTE)
            position = next(islice(computations, number, None), len(row))
            return row[:position], row[position:]

        heads, tails = zip(*map(cut, rows, ahead), strict=True)
        sent = {each for head in heads for each in head if each.kind in SENDS}

        def is_late(action: Action) -> bool:
            return action.kind in RECEIVES and other_end(action) not in sent

        before = tuple(tuple(each for each in head if not is_late(each)) for head in heads)
        after = tuple((*filter(is_late, head), *tail) for head, tail in zip(heads, tails, strict=True))
        drain = [[each for each in row if each.kind in RECEIVES and other_end(each) in sent] for row in after]
        for row, mine in zip(drain, before, strict=True):
            row += [wait for each in mine if each.kind in SENDS and (wait := wait_of(each)) not in mine]
        return cls(before, after, tuple(map(tuple, drain)))
