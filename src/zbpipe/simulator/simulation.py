"""Schedule x CostModel -> Timeline: the times of all ops.

Every rank runs its list in order. An op starts when its rank is free and its inputs (`ir.inputs`) have arrived over the
links. Transports make messages wait for each other (`zbpipe.costs.model.Transport`). Copies to the host and back, and
FSDP's collectives, run parallel to the computations. All of it is one graph (`zbpipe.simulator.time_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import inf

from zbpipe.costs.job import JobCosts, as_cost_model
from zbpipe.costs.model import GATHER, CostModel, Receives, Transport
from zbpipe.schedule.ir import COMPUTATIONS, Schedule, require_whole
from zbpipe.simulator.actions import Rows
from zbpipe.simulator.passes import add_messages, place_receives
from zbpipe.simulator.time_graph import Overlap, TimeGraph, durations, longest_path
from zbpipe.simulator.timeline import Collective, Span, Timeline
from zbpipe.simulator.validation import require_runnable, require_schedule, require_valid

_MOST_SPANS = 2**22
"""Largest number of spans in a timeline of several steps: half a gigabyte."""
_PREFERRED = (Receives.TIMED, Receives.NEAREST, Receives.LATE, Receives.EARLY)
"""Ways to receive. Ties go to the first."""
_WORTH_IT = 1 - 1e-3
"""A way to receive replaces a preferred one only below this ratio of their steps: a gain of a thousandth."""


def simulate(
    schedule: Schedule,
    costs: CostModel | JobCosts | Sequence[float] = (1.0, 1.0, 1.0),
    *,
    num_steps: int = 1,
    synchronous: bool = True,
    ahead: Sequence[int] | None = None,
    transport: Transport | str = Transport.IDEAL,
    receives: Receives | str | None = None,
    overlaps_fsdp: Overlap = True,
) -> Timeline:
    """Run `schedule` in the simulator.

        >>> zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1.0, 1.2, 0.8)).bubble < 0.1
        True

    Args:
        schedule: a valid schedule.
        costs: costs of its stages, or three numbers `(f, i, w)`, the seconds of each rank for one microbatch. Default:
            one second each.
        num_steps: number of consecutive steps.
        synchronous: whether all ranks wait for each other between steps, as for a global gradient norm. Otherwise each
            rank begins the next step when it is done, as ZBH2 and ZB2P assume.
        ahead: number of a step's ops that each rank may start before all ranks are done with the previous step, instead
            of none (synchronous) or all. For the ideal transport.
        transport: which messages wait for each other: "ideal", "one queue", "queue per peer", "shared with compute",
            "blocking".
        receives: where ranks post their receives, which matters for transports with queues: "early", "late", "timed",
            "nearest", "rendezvous". Default: the way with the shortest step, as zbpipe's schedules choose it.
        overlaps_fsdp: whether FSDP gathers beside the first F of a stage and reduces beside its last W or B, as
            zbpipe's schedules do, or before the one and after the other, as always with "shared with compute". With
            "gathers" only these overlap, see `overlap_of`.

    TypeError for another type of `schedule` or `costs`. ValueError if the costs are for another number of stages, there
    is no step or there are millions of ops, `ahead` is for other ranks or another transport, the schedule cannot run,
    or a name is unknown.
    """
    require_schedule(schedule)
    costs = as_cost_model(costs, schedule.placement, schedule.num_microbatches)
    require_whole(1, num_steps=num_steps)
    num_ops = sum(map(len, schedule))
    if num_steps > 1 and num_steps * num_ops > _MOST_SPANS:
        most = max(_MOST_SPANS // num_ops, 1)
        raise ValueError(f"num_steps={num_steps} of {num_ops} ops are too many: simulate at most {most}")
    if num_ops < schedule.placement.num_stages * schedule.num_microbatches:  # too few for the forwards
        require_valid(schedule)
    transport = Transport.parse(transport)
    chosen = None if receives is None else Receives.parse(receives)
    overlaps_fsdp = transport is not Transport.SHARED and overlaps_fsdp
    if ahead is not None and transport is not Transport.IDEAL:
        raise ValueError(f"ahead = {ahead} is only for the ideal transport, got {str(transport)!r}")
    if ahead is not None and len(ahead) != schedule.num_ranks:
        raise ValueError(f"ahead = {ahead} has to be one number for each of {schedule.num_ranks} ranks")
    require_runnable(schedule)
    rows: Rows = ()
    if transport.has_queues:
        chosen, rows = _find_receives(schedule, costs, transport, chosen, overlaps_fsdp)
    if ahead is None:
        ahead = [0 if synchronous else len(row) for row in schedule]
    graph = TimeGraph(
        schedule,
        transport,
        rows,
        ahead=None if num_steps == 1 else ahead,
        has_fsdp=costs.has_fsdp,
        overlaps_fsdp=overlaps_fsdp,
    )
    timeline = _make_timeline(graph, costs, num_steps)
    return replace(timeline, transport=transport, receives=chosen if rows else None, overlaps_fsdp=overlaps_fsdp)


def _make_timeline(graph: TimeGraph, costs: CostModel, num_steps: int) -> Timeline:
    schedule, seconds = graph.schedule, durations(graph, costs)
    spans: list[list[Span]] = [[] for _ in schedule]
    copies: list[list[Span]] = [[] for _ in schedule]
    collectives: list[list[Collective]] = [[] for _ in schedule]
    for step in range(num_steps):
        starts, ends = longest_path(graph, seconds)
        for begin, lasts in graph.begins.items():
            seconds[begin] = max(ends[each] for each in lasts)
        for rank, ops in enumerate(graph.ops):
            place = slice(ops.start, ops.stop)
            ran = list(map(Span, schedule.ops[rank], starts[place], ends[place], repeat(step)))
            if schedule.has_copies:
                copies[rank] += [span for span in ran if span.op.kind not in COMPUTATIONS]
                ran = [span for span in ran if span.op.kind in COMPUTATIONS]
            spans[rank] += ran
            for node, op in graph.collectives[rank]:
                stage, kind, _ = graph.nodes[node]
                if ends[node] > starts[node] and kind == GATHER:
                    collectives[rank].append(Collective("gather", stage, starts[node], ends[node], step))
                elif ends[node] > starts[node]:
                    collectives[rank].append(Collective("reduce", stage, starts[node], max(ends[node], ends[op]), step))
    return Timeline(
        schedule,
        costs,
        tuple(map(tuple, spans)),
        num_steps,
        copies=tuple(map(tuple, copies)),
        collectives=tuple(tuple(sorted(row, key=lambda each: each.start)) for row in collectives),
        graph=graph,
    )


def overlap_of(source: str, stages_per_rank: int) -> Overlap:
    """How the class of a schedule overlaps FSDP's collectives, by its owner: see `Algorithm.source`.

    torch's own wait for whole stages. But with one stage per rank there is no action that gathers it, so FSDP2's hooks
    gather module by module in the first F.
    """
    return source != "torch" or ("gathers" if stages_per_rank == 1 else False)


def exposed_fsdp(timeline: Timeline) -> float:
    """Seconds that FSDP's gathers and reductions add to one step."""
    costs = timeline.costs
    if not costs.has_fsdp:
        return 0.0
    return _step(timeline, costs) - _step(timeline, replace(costs, gather=0.0, reduce=0.0))


def price_of_resharding(timeline: Timeline) -> float:
    """Share of a step that `fsdp_mode="reshard"` adds: each F and each backward gathers its parameters."""
    return _step(timeline, gather_in_each_op(timeline.costs)) / _step(timeline, timeline.costs) - 1


def gather_in_each_op(costs: CostModel) -> CostModel:
    """The costs with `fsdp_mode="reshard"`: each F and each backward gathers the parameters, takes no less time than
    that, and no gather precedes the step."""
    f, i = (
        tuple(max(each, costs.of(stage, GATHER).seconds) for stage, each in enumerate(own))
        for own in (costs.f, costs.i)
    )
    return replace(costs, f=f, i=i, gather=0.0)


def _step(timeline: Timeline, costs: CostModel) -> float:
    return simulate(
        timeline.schedule,
        costs,
        transport=timeline.transport,
        receives=timeline.receives,
        overlaps_fsdp=timeline.overlaps_fsdp,
    ).makespan


def best_receives(schedule: Schedule, costs: CostModel, transport: Transport) -> Receives:
    """The way to receive with the shortest step for this transport. Without queues all are equal."""
    return _find_receives(schedule, costs, transport)[0] if transport.has_queues else _PREFERRED[0]


def _find_receives(
    schedule: Schedule,
    costs: CostModel,
    transport: Transport,
    receives: Receives | None = None,
    overlaps_fsdp: Overlap = True,
) -> tuple[Receives, Rows]:
    """The best way to receive, or the given one, and the lists with messages."""
    ideal = simulate(schedule.computations, costs, overlaps_fsdp=overlaps_fsdp)  # torch knows no copies
    messages = add_messages(schedule)
    if receives:
        return receives, place_receives(messages, receives, ideal)
    best, shortest = _PREFERRED[0], inf
    best_rows: Rows = ()
    for each in (*_PREFERRED, Receives.RENDEZVOUS) if transport is Transport.SHARED else _PREFERRED:
        if ideal.makespan >= shortest * _WORTH_IT:
            break
        rows = place_receives(messages, each, ideal)
        graph = TimeGraph(schedule, transport, rows, has_fsdp=costs.has_fsdp, overlaps_fsdp=overlaps_fsdp)
        makespan = max(longest_path(graph, durations(graph, costs))[1])
        if makespan < shortest * _WORTH_IT:
            best, best_rows, shortest = each, rows, makespan
    return best, best_rows
