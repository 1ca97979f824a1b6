"""Checks that a schedule is complete, that each rank can run its order, and that no ranks wait in a cycle.

In lists with messages, sends match receives.
"""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Literal, NamedTuple, TypeVar

from zbpipe.costs.job import MemoryLimit, MemoryLimitLike, as_cost_model
from zbpipe.costs.model import ROUNDING, SENDS, CostModel, Transport
from zbpipe.schedule import tables
from zbpipe.schedule.graph import CycleError, Graph
from zbpipe.schedule.ir import KINDS, OFFLOADS, RELOADS, Op, OpKind, Schedule, inputs, reload_before
from zbpipe.simulator.actions import COMPUTE, RECEIVES, Action, Rows, dependencies, other_end, parse, sends_by_action
from zbpipe.simulator.time_graph import TimeGraph

N = TypeVar("N", bound=NamedTuple)
Rule = Literal["missing", "doubled", "foreign", "placement", "order", "deadlock", "memory"]
_Places = dict[Op, list[tuple[int, int]]]
"""Places of each op (rank and position): several if it is doubled."""
_MOST_MISSING = 1000
"""Largest number of listed missing ops, in addition to the number of ops."""


@dataclass(frozen=True)
class Finding:
    """One fault of a schedule, and where it is.

    >>> print(Finding("order", 2, 7, Op.parse("3W0"), "it needs 3I0"))
    order: rank 2, position 7, 3W0: it needs 3I0
    """

    rule: Rule
    rank: int
    position: int | None
    """Index into the rank's list. None for an op that is in no list."""
    op: NamedTuple
    """The op, or in a table with communication the action."""
    message: str

    def __str__(self) -> str:
        at = "" if self.position is None else f", position {self.position}"
        return f"{self.rule}: rank {self.rank}{at}, {self.op}: {self.message}"


def validate(
    schedule: Schedule, memory_limit: MemoryLimitLike | None = None, costs: CostModel | None = None
) -> list[Finding]:
    """All faults of `schedule`. An empty list if it is valid.

        >>> zbpipe.validate(zbpipe.generate("ZBV", 4, 8), memory_limit=4)
        []
        >>> print(*zbpipe.validate(zbpipe.Schedule.from_csv("0F0,0W0")))
        missing: rank 0, 0I0: no rank runs it, but 0W0 is there

    It checks for: ops that are missing, doubled or foreign (of an unknown stage or microbatch, or an I or W of a
    microbatch that has a B); a stage with ops on a rank that does not hold it; an order that a rank cannot run (I or W
    too early, a stage before its dependency on the same rank); ranks that wait for each other in a cycle; ranks above
    their memory limit; and copies that do not come back exactly once, after the copy out and before they are needed.
    Memory is counted in list order, where an offload frees at once; `Timeline.memory` counts it over time. If most ops
    are missing, only some of these are listed.

    Args:
        schedule: a schedule with any lists.
        memory_limit: see `zbpipe.costs.MemoryLimit`. Default: no limit.
        costs: costs of the stages. Default: `CostModel.uniform`, whose unit is a rank's activations of one microbatch.

    Raises:
        TypeError: `schedule`, `memory_limit` or `costs` has another type.
        ValueError: a limit is negative, or the number of limits or of the costs' stages is wrong.
    """
    require_schedule(schedule)

    def dependencies(op: Op) -> Iterator[tuple[Op, ...]]:
        yield from inputs(op, schedule.placement.num_stages)
        if reload := reload_before(op):
            yield (reload,)

    over = find_excess(schedule, memory_limit, costs)
    return [*find_miscounted(schedule), *find_disordered(schedule.ops, dependencies), *over]


def find_miscounted(schedule: Schedule) -> Iterator[Finding]:
    """Ops that are missing, doubled, foreign or on a wrong rank."""
    places: _Places = defaultdict(list)
    for rank, ops in enumerate(schedule):
        for position, op in enumerate(ops):
            places[op].append((rank, position))
    yield from _find_misplaced(schedule, places)
    yield from islice(_find_missing(schedule, places), len(places) + _MOST_MISSING)


def require_runnable(schedule: Schedule) -> None:
    """Raise ValueError with all findings if an op never runs, or runs twice."""
    try:
        schedule.graph.order  # noqa: B018 -- which raises if there is none
    except CycleError:
        require_valid(schedule)
        raise ValueError(f"schedule {schedule.name} cannot run") from None


def require_schedule(schedule: Schedule) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"{reprlib.repr(schedule)} is not a zbpipe.Schedule: make one with zbpipe.generate('ZBV', 4, 8) or"
            " zbpipe.Schedule.from_csv(table)"
        )


def require_valid(schedule: Schedule) -> None:
    """Raise ValueError with all findings, one per line, for a schedule with faults."""
    findings = validate(schedule)
    if findings:
        lines = [f"schedule {schedule.name} cannot run, {len(findings)} finding(s):", *map(str, findings)]
        raise ValueError("\n  ".join(lines))


def _find_misplaced(schedule: Schedule, places: _Places) -> Iterator[Finding]:
    """Ops in a wrong place: unknown, on another stage's rank, or doubled."""
    placement, microbatches = schedule.placement, schedule.num_microbatches
    for op, standing in places.items():
        first_rank, first_position = standing[0]
        for again, (rank, position) in enumerate(standing):
            found: dict[Rule, str] = {}
            if not 0 <= op.stage < placement.num_stages:
                found["foreign"] = f"there are only the stages 0 to {placement.num_stages - 1}"
            elif not 0 <= op.microbatch < microbatches:
                found["foreign"] = f"there are only the microbatches 0 to {microbatches - 1}"
            elif (own := placement.rank_of[op.stage]) != rank:
                found["placement"] = f"stage {op.stage} is on rank {own}, and a stage stays on its rank"
            if again:
                found["doubled"] = f"it is already on rank {first_rank}, position {first_position}"
            yield from (Finding(rule, rank, position, op, message) for rule, message in found.items())


def _find_missing(schedule: Schedule, places: _Places) -> Iterator[Finding]:
    """Missing ops, and those that a B makes needless. A microbatch needs F on each stage, and a B or an I and a W."""
    copies = list(zip(OFFLOADS, RELOADS, strict=True)) if schedule.has_copies else []
    needless = {OpKind.I: "does the whole backward", OpKind.OI: "leaves nothing for a W"}
    for stage, rank in enumerate(schedule.placement.rank_of):
        for microbatch in range(schedule.num_microbatches):
            f, i, w, b = (Op(stage, kind, microbatch) for kind in (OpKind.F, OpKind.I, OpKind.W, OpKind.B))
            if f not in places:
                yield Finding("missing", rank, None, f, "no rank runs this forward")
            if b not in places and i not in places and w not in places:
                yield Finding("missing", rank, None, b, f"no rank runs this backward, as {b} or as {i} and {w}")
            pairs = ((Op(stage, out, microbatch), Op(stage, back, microbatch)) for out, back in copies)
            for one, other in ((i, w), *pairs):
                there = [op for op in (one, other) if op in places]
                if b in places and one.kind in needless:
                    for op in there:
                        yield Finding("foreign", *places[op][0], op, f"{b} {needless[one.kind]}")
                elif len(there) == 1:
                    lost = other if there == [one] else one
                    yield Finding("missing", rank, None, lost, f"no rank runs it, but {there[0]} is there")


def find_disordered(
    rows: Sequence[Sequence[N]], dependencies: Callable[[N], Iterable[tuple[N, ...]]]
) -> Iterator[Finding]:
    """Items before their dependencies in one rank's list, then the first ranks that wait for each other in a cycle.
    Missing or doubled items have separate findings. One item of each group of `dependencies` has to be over. They are
    of the item's microbatch, and do not depend on the item."""
    items: list[tuple[int, str, int]] = [*chain.from_iterable(rows)]
    node_of = dict(zip(reversed(items), range(len(items) - 1, -1, -1), strict=True))
    known: dict[tuple[int, str], list[list[tuple[int, str]]]] = {}
    before: list[list[int]] = []
    for rank, row in enumerate(rows):
        first, end = len(before), len(before) + len(row)
        for node in range(first, end):
            stage, kind, microbatch = items[node]
            if (groups := known.get((stage, kind))) is None:
                asked = dependencies(row[node - first])
                groups = known[stage, kind] = [[(each[0], each[1]) for each in group] for group in asked]
            waits = [node - 1] if node > first else []
            for group in groups:
                found = [node_of[each] for giver in group if (each := (*giver, microbatch)) in node_of]
                here = [each for each in found if first <= each < end]
                if here and min(here) > node:
                    text = f"it needs {row[min(here) - first]}, which comes later, at position {min(here) - first}"
                    yield Finding("order", rank, node - first, row[node - first], text)
                elif found and not here:
                    waits.append(min(found))
            before.append(waits)
    try:
        Graph(list(range(len(items))), before).order  # noqa: B018 -- which raises if there is none
    except CycleError as error:
        yield _describe_cycle(rows, error.cycle[::-1])


def _describe_cycle(rows: Sequence[Sequence[N]], cycle: Sequence[int]) -> Finding:
    """The deadlock of a cycle of items, each of which waits for the next one."""
    places = [(rank, position) for rank, row in enumerate(rows) for position in range(len(row))]
    # A rank's ops follow each other.
    pairs = pairwise([places[node] for node in (*cycle, cycle[0])])
    hops = [(one, other) for one, other in pairs if one[0] != other[0]]
    first = hops.index(min(hops))
    text = ", ".join(
        f"rank {rank} (position {position}, {rows[rank][position]}) waits for {rows[giver][place]} on rank {giver}"
        f" (position {place})"
        for (rank, position), (giver, place) in (*hops[first:], *hops[:first])
    )
    rank, position = hops[first][0]
    return Finding("deadlock", rank, position, rows[rank][position], text)


def find_excess(
    schedule: Schedule, memory_limit: MemoryLimitLike | None, costs: CostModel | None = None
) -> Iterator[Finding]:
    """The first op of every rank that exceeds its limit."""
    costs = as_cost_model((1, 1, 1) if costs is None else costs, schedule.placement, schedule.num_microbatches)
    parsed = MemoryLimit.parse(memory_limit)
    limits = parsed.resolve(costs, schedule.num_ranks, schedule.num_microbatches) if parsed else ()
    # A row beyond the placement only has ops in a wrong place.
    for rank, (ops, limit) in enumerate(zip(schedule, limits, strict=False)):
        held, holders = 0.0, dict[tuple[int, int], Op]()
        for position, op in enumerate(ops):
            if not 0 <= op.stage < costs.num_stages:
                continue
            cost = costs.of(*op)
            most = held + cost.needs
            held += cost.adds
            holders.pop((op.stage, op.microbatch), None)
            if op.kind in (OpKind.F, OpKind.I, *RELOADS):
                holders[op.stage, op.microbatch] = op
            if most > limit * (1 + ROUNDING):
                ops_held = " ".join(map(str, holders.values()))
                message = f"its activations take {most:g}, the limit is {limit:g}; held by {ops_held}"
                yield Finding("memory", rank, position, op, message)
                break


_ENDS = frozenset((*SENDS, *RECEIVES))
_MESSAGES = frozenset(tables.MESSAGES)


def validate_table(
    table: str, name: str, memory_limit: MemoryLimitLike | None = None
) -> tuple[Schedule, list[Finding]]:
    """The schedule in a CSV table, with or without communication, and its faults. ValueError for another text."""
    rows = parse(table)
    schedule = Schedule.from_actions(rows, name)
    is_lowered = any(action.kind not in KINDS for row in rows for action in row)
    return schedule, validate_lowered(rows, memory_limit) if is_lowered else validate(schedule, memory_limit)


def validate_lowered(rows: Rows, memory_limit: MemoryLimitLike | None = None) -> list[Finding]:
    compute = Schedule.from_actions(rows, "table")
    rank_of = compute.placement.rank_of
    return [
        *find_miscounted(compute),
        *find_excess(compute, memory_limit),
        *_find_unmatched(rows, compute),
        *_find_ungathered(rows),
        *_find_crossed(rows, rank_of),
        *find_disordered(rows, lambda action: dependencies(action, rank_of)),
    ]


def _find_ungathered(rows: Rows) -> Iterator[Finding]:
    """Compute on a stage whose FSDP parameters are not gathered, in rows with gathers."""
    for rank, row in enumerate(rows):
        if "UNSHARD" not in [action.kind for action in row]:
            continue
        gathered: set[int] = set()
        for position, action in enumerate(row):
            if action.kind == "UNSHARD":
                gathered.add(action.stage)
            elif action.kind == "RESHARD":
                gathered.discard(action.stage)
            elif action.kind in COMPUTE and action.stage not in gathered:
                yield Finding("order", rank, position, action, f"it needs {action.stage}UNSHARD before it")


def _find_unmatched(rows: Rows, compute: Schedule) -> Iterator[Finding]:
    """Messages that are missing, doubled, not requested, or on a rank that does not hold their stage."""
    rank_of, microbatches = compute.placement.rank_of, range(compute.num_microbatches)
    ends = sorted(end for end in sends_by_action(rank_of) if end[1] in _ENDS)
    expected = {end for stage, kind in ends for end in ((stage, kind), (stage, f"WAIT_{kind}"))}
    found: set[tuple[int, str, int]] = set()
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if action.kind not in _MESSAGES:
                continue
            stage, kind, microbatch = action
            if (stage, kind) not in expected or microbatch not in microbatches:
                yield Finding("foreign", rank, position, action, "no other rank has the stage next to it")
            elif rank_of[stage] != rank:
                yield Finding("placement", rank, position, action, f"stage {stage} is on rank {rank_of[stage]}")
            if action in found:
                yield Finding("doubled", rank, position, action, "it is already in the table")
            found.add(action)
    for stage, kind in ends:
        for microbatch in microbatches:
            if (stage, kind, microbatch) not in found:
                done = "received" if kind in RECEIVES else "sent"
                lost = Action(stage, kind, microbatch)
                yield Finding("missing", rank_of[stage], None, lost, f"the message is never {done}")


def _find_crossed(rows: Rows, rank_of: Sequence[int]) -> Iterator[Finding]:
    """Messages between two ranks that are received in another order than sent."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Action, Action, int]]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if action.kind in _ENDS:
                end = other_end(action)
                peer = rank_of[end.stage] if 0 <= end.stage < len(rank_of) else rank
                if action.kind in SENDS:
                    sent[rank, peer].append(action)
                else:
                    received[peer, rank].append((end, action, position))
    for (sender, rank), receives in received.items():
        for (message, action, position), posted in zip(receives, sent[sender, rank], strict=False):
            if message != posted:
                text = f"rank {sender} sends {posted} here, and messages arrive in the order of their sends"
                yield Finding("order", rank, position, action, text)
                break


def find_blocked_queues(rows: Rows) -> list[Finding]:
    """A cycle of messages that wait for each other if each rank has one message at a time, in order. A message begins
    when the computations before it are over, and ends when both ends have met. The table must have no findings of
    `validate_lowered`."""
    cycle = TimeGraph(Schedule.from_actions(rows, ""), Transport.ONE_QUEUE, rows).find_cycle()
    if not cycle:
        return []
    rank = next(rank for rank, row in enumerate(rows) if cycle[0] in row)
    text = "messages wait for each other: " + " before ".join(map(str, cycle))
    return [Finding("deadlock", rank, rows[rank].index(cycle[0]), cycle[0], text)]
