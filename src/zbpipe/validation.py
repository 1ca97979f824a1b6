"""Is a schedule complete, in an order that each rank can run, with every stage on one rank, and free of deadlock?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Literal, NamedTuple, TypeVar

from zbpipe.ir import Op, OpKind, Schedule

T = TypeVar("T", bound=Hashable)
Rule = Literal["missing", "doubled", "foreign", "placement", "order", "deadlock", "memory"]
_Places = dict[Op, list[tuple[int, int]]]
"""Where each op stands: rank and position, more than once if it is doubled."""
_MOST_MISSING = 1000
"""So many more missing ops than there are ops are listed."""


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a schedule, and where."""

    rule: Rule
    rank: int
    position: int | None
    """Index into the rank's list; None for an op that is in no list."""
    op: NamedTuple
    """The op, or in a table with communication the action; `str` gives its text form."""
    message: str

    def __str__(self) -> str:
        at = "" if self.position is None else f", position {self.position}"
        return f"{self.rule}: rank {self.rank}{at}, {self.op}: {self.message}"


def validate(schedule: Schedule, memory_limit: float | None = None, *, freed_by_i: float = 0.0) -> list[Finding]:
    """Everything that is wrong with `schedule`; an empty list if nothing is.

    Checked are: ops that are missing, doubled or foreign (a stage or microbatch that the schedule does not have, or
    an I or W beside a B); a stage whose ops stand on a rank that does not hold it; an order that a rank cannot run (I
    or W too early, a stage before the one that feeds it on the same rank); ranks that wait for each other in a
    circle; and ranks that hold too much. Of missing ops that outnumber by far those that are there, some are listed.

    Args:
        schedule: any lists at all.
        memory_limit: peak activations per rank, in units of the rank's share of one microbatch; None for no limit.
        freed_by_i: the share of the activations that I frees, as in `CostModel`; below zero where it takes more.

    Raises:
        ValueError: a limit below zero or a share above 1, or what is no number.
    """
    if memory_limit is not None and not memory_limit >= 0:
        raise ValueError(f"memory_limit={memory_limit} is no amount: give a number from zero on, or None for no limit")
    if not -inf < freed_by_i <= 1:
        raise ValueError(f"freed_by_i={freed_by_i} is no share: give a number up to 1")
    places: _Places = defaultdict(list)
    for rank, ops in enumerate(schedule):
        for position, op in enumerate(ops):
            places[op].append((rank, position))
    return [
        *_strangers(schedule, places),
        *islice(_incomplete(schedule, places), len(places) + _MOST_MISSING),
        *_disordered(schedule),
        *_deadlocked(schedule, places),
        *(_out_of_memory(schedule, memory_limit, freed_by_i) if memory_limit is not None else ()),
    ]


def require_valid(schedule: Schedule) -> None:
    """Refuse a schedule that `validate` objects to.

    Raises:
        ValueError: with all findings, one a line.
    """
    findings = validate(schedule)
    if findings:
        lines = [f"schedule {schedule.name} cannot run, {len(findings)} finding(s):", *map(str, findings)]
        raise ValueError("\n  ".join(lines))


def _strangers(schedule: Schedule, places: _Places) -> Iterator[Finding]:
    """Ops that do not belong where they stand: unknown, on another stage's rank, or there for the second time."""
    placement, microbatches = schedule.placement, schedule.num_microbatches
    for op, standing in places.items():
        for again, (rank, position) in enumerate(standing):
            if not 0 <= op.stage < placement.num_stages:
                message = f"there are only the stages 0 to {placement.num_stages - 1}"
                yield Finding("foreign", rank, position, op, message)
            elif not 0 <= op.microbatch < microbatches:
                message = f"there are only the microbatches 0 to {microbatches - 1}"
                yield Finding("foreign", rank, position, op, message)
            elif placement.rank_of[op.stage] != rank:
                message = f"stage {op.stage} is on rank {placement.rank_of[op.stage]}, and a stage stays on its rank"
                yield Finding("placement", rank, position, op, message)
            if again:
                first_rank, first_position = standing[0]
                message = f"it stands on rank {first_rank}, position {first_position} already"
                yield Finding("doubled", rank, position, op, message)


def _incomplete(schedule: Schedule, places: _Places) -> Iterator[Finding]:
    """One F and either one B or one I and one W, for every stage and microbatch."""
    for stage, rank in enumerate(schedule.placement.rank_of):
        for microbatch in range(schedule.num_microbatches):
            f, i, w, b = (Op(stage, kind, microbatch) for kind in (OpKind.F, OpKind.I, OpKind.W, OpKind.B))
            if f not in places:
                yield Finding("missing", rank, None, f, "no rank runs this forward")
            halves = [half for half in (i, w) if half in places]
            if b in places:
                for half in halves:
                    yield Finding("foreign", *places[half][0], half, f"{b} does the whole backward")
            elif not halves:
                yield Finding("missing", rank, None, b, f"no rank runs this backward, as {b} or as {i} and {w}")
            elif len(halves) == 1:
                lost = w if halves == [i] else i
                yield Finding("missing", rank, None, lost, f"no rank runs it, but {halves[0]} is there")


def feeders(op: Op, num_stages: int) -> tuple[tuple[Op, ...], ...]:
    """What has to be over before `op`: one op of each inner tuple (a gradient comes out of an I or out of a B)."""
    stage, kind, microbatch = op
    if kind is OpKind.F:
        return ((Op(stage - 1, OpKind.F, microbatch),),) if stage > 0 else ()
    if kind is OpKind.W:
        return ((Op(stage, OpKind.I, microbatch),),)
    forward = (Op(stage, OpKind.F, microbatch),)
    if stage == num_stages - 1:
        return (forward,)
    return (forward, (Op(stage + 1, OpKind.I, microbatch), Op(stage + 1, OpKind.B, microbatch)))


def first_positions(row: Sequence[T]) -> dict[T, int]:
    """By item where it first stands."""
    first: dict[T, int] = {}
    for position, item in enumerate(row):
        first.setdefault(item, position)
    return first


def _disordered(schedule: Schedule) -> Iterator[Finding]:
    """Ops that come before what feeds them in one rank's list."""
    for rank, ops in enumerate(schedule):
        first = first_positions(ops)
        for position, op in enumerate(ops):
            for choices in feeders(op, schedule.placement.num_stages):
                here = [first[choice] for choice in choices if choice in first]
                if here and min(here) > position:
                    message = f"it needs {ops[min(here)]}, which comes later, at position {min(here)}"
                    yield Finding("order", rank, position, op, message)


def _out_of_memory(schedule: Schedule, limit: float, freed_by_i: float) -> Iterator[Finding]:
    """The first op of every rank that takes it over the limit. Activations live from F to W or B, some only to I."""
    # A row beyond the placement holds strangers only.
    for rank, ops in enumerate(schedule.ops[: schedule.placement.num_ranks]):
        share = 1 / len(schedule.placement.stages_on(rank))
        live: dict[tuple[int, int], Op] = {}
        alive = {OpKind.F: 0, OpKind.I: 0}
        for position, op in enumerate(ops):
            key = (op.stage, op.microbatch)
            if (before := live.pop(key, None)) is not None:
                alive[before.kind] -= 1
            if op.kind in alive:
                live[key] = op
                alive[op.kind] += 1
            # What F has left counts whole, and after I the part that waits for W.
            total = share * (alive[OpKind.F] + alive[OpKind.I] * (1 - freed_by_i))
            if total > limit + 1e-9:
                held = " ".join(map(str, live.values()))
                message = f"it holds {total:g} microbatches, the limit is {limit:g}; live are {held}"
                yield Finding("memory", rank, position, op, message)
                break


def _deadlocked(schedule: Schedule, places: _Places) -> Iterator[Finding]:
    """Circles of ranks that wait for each other."""
    num_stages = schedule.placement.num_stages
    for rank, position, message in waiting_circles(schedule.ops, places, lambda op: feeders(op, num_stages)):
        yield Finding("deadlock", rank, position, schedule.ops[rank][position], message)


def waiting_circles(
    rows: Sequence[Sequence[T]],
    places: Mapping[T, Sequence[tuple[int, int]]],
    needs: Callable[[T], Iterable[tuple[T, ...]]],
) -> Iterator[tuple[int, int, str]]:
    """Run every row in order without a clock, and tell which ranks end up waiting for each other in a circle.

    Only waiting between ranks counts: an item that is missing, or late on its own rank, has a finding of its own.

    Args:
        rows: what each rank does.
        places: ranks and positions of every item.
        needs: for an item, groups of items of which one each has to be over before it.

    Yields:
        For each circle its lowest rank, the position at which that is stuck, and the whole chain in words.
    """
    place = {item: standing[0] for item, standing in places.items()}
    own = [frozenset(row) for row in rows]
    done = [0] * len(rows)
    sleepers: dict[T, list[int]] = defaultdict(list)
    waiting_for: dict[int, T] = {}

    def missing(rank: int) -> tuple[T, ...]:
        """Items on other ranks of which the rank needs one to go on; empty if it can."""
        for choices in needs(rows[rank][done[rank]]):
            known = tuple(choice for choice in choices if choice in place)
            elsewhere = own[rank].isdisjoint(known)
            if known and elsewhere and all(done[place[choice][0]] <= place[choice][1] for choice in known):
                return known
        return ()

    awake = list(range(len(rows)))
    while awake:
        rank = awake.pop()
        waiting_for.pop(rank, None)
        while done[rank] < len(rows[rank]):
            if choices := missing(rank):
                waiting_for[rank] = choices[0]
                for choice in choices:
                    sleepers[choice].append(rank)
                break
            awake += sleepers.pop(rows[rank][done[rank]], ())
            done[rank] += 1

    for circle in _circles({rank: place[item][0] for rank, item in waiting_for.items()}):
        steps = [
            f"rank {rank} (position {done[rank]}, {rows[rank][done[rank]]}) waits for {waiting_for[rank]}"
            f" on rank {place[waiting_for[rank]][0]} (position {place[waiting_for[rank]][1]})"
            for rank in circle
        ]
        yield circle[0], done[circle[0]], ", ".join(steps)


def _circles(successor: dict[int, int]) -> Iterator[list[int]]:
    """The circles in "rank waits for rank", each once, starting at its lowest rank."""
    seen: set[int] = set()
    for start in sorted(successor):
        path: list[int] = []
        rank = start
        while rank in successor and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = successor[rank]
        if rank in path:
            circle = path[path.index(rank) :]
            turn = circle.index(min(circle))
            yield circle[turn:] + circle[:turn]
