"""Checks of lists with messages: sends match receives, and no messages wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from zbpipe.costs.job import MemoryLimitLike
from zbpipe.costs.model import SENDS, Transport
from zbpipe.schedule import tables
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.actions import (
    COMPUTE,
    RECEIVES,
    Action,
    Rows,
    dependencies,
    other_end,
    sends_by_action,
)
from zbpipe.simulator.time_graph import TimeGraph
from zbpipe.simulator.validation import Finding, find_disordered, find_excess, find_miscounted

_ENDS = frozenset((*SENDS, *RECEIVES))
_MESSAGES = frozenset(tables.MESSAGES)


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


def find_mixed_up_messages(rows: Rows) -> list[Finding]:
    """Receives that take another receive's message, so that results are wrong without an error."""
    return list(_find_crossed(rows, Schedule.from_actions(rows, "").placement.rank_of))


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
