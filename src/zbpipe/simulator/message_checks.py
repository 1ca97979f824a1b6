"""Checks of lists with messages: sends and receives match, and no messages wait for each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from zbpipe.costs.memory_limit import MemoryLimitLike
from zbpipe.costs.model import SENDS
from zbpipe.costs.transport import Transport
from zbpipe.schedule import tables
from zbpipe.schedule.ir import OpKind, Schedule
from zbpipe.simulator import actions
from zbpipe.simulator.actions import COMPUTE, RECEIVES, WAITS, Action, Rows, dependencies, other_end
from zbpipe.simulator.time_graph import TimeGraph
from zbpipe.simulator.validation import Finding, Rule, find_deadlocks, find_disordered, find_places, validate

_ENDS = frozenset((*SENDS, *RECEIVES))
_LEFT_OUT = {
    **dict.fromkeys((*SENDS, *RECEIVES), "sends and receives"),
    **dict.fromkeys(WAITS, "waits for sends"),
    "UNSHARD": "unshards",
    "RESHARD": "reshards",
    "REDUCE_GRAD": "reductions of gradients",
    "WAIT_REDUCE_GRAD": "waits for reductions",
}
"""User-facing name of each kind of communication, in display order."""


def check_table(
    table: str, name: str, memory_limit: MemoryLimitLike | None = None
) -> tuple[Schedule, list[Finding], str]:
    """The ops of a table, all findings about it and its communication, and how it was read.

    >>> schedule, findings, how = check_table("0F0,0SEND_F0,0RECV_B0,0B0\\n1F0,1B0,1SEND_B0", "mine")
    >>> print(*findings)
    missing: rank 1, 1RECV_F0: the message is never received
    >>> how
    'read: 2 F, 2 B; omitted: 3 sends and receives; jobs place their own'
    """
    rows = actions.parse(table)
    schedule = Schedule.from_actions(rows, name)
    left_out = Counter(_LEFT_OUT[each.kind] for row in rows for each in row if each.kind in _LEFT_OUT)
    findings = validate_lowered(rows, memory_limit) if left_out else validate(schedule, memory_limit)
    if [[cell.strip() for cell in row if cell.strip()] for row in tables.cells(table)] == [
        list(map(str, row)) for row in schedule
    ]:
        return schedule, findings, ""
    read = Counter(op.kind for row in schedule for op in row)
    how = "read: " + ", ".join(f"{read[kind]} {kind}" for kind in OpKind if kind in read)
    if left_out:
        counts = (f"{left_out[what]} {what}" for what in dict.fromkeys(_LEFT_OUT.values()) if what in left_out)
        how += f"; omitted: {', '.join(counts)}; jobs place their own"
    return schedule, findings, how


def validate_lowered(rows: Rows, memory_limit: MemoryLimitLike | None = None) -> list[Finding]:
    """Findings about the compute ops, the messages between ranks, and their order."""
    compute = Schedule.from_actions(rows, "table")
    checks = _Table(rows, compute)
    # The messages show more clearly which rank waits for which.
    alone = [finding for finding in validate(compute, memory_limit) if finding.rule != "deadlock"]
    ordered = (*checks.find_unmatched(), *checks.find_disordered(), *find_ungathered(rows), *checks.find_crossed())
    return [*alone, *ordered, *find_deadlocks(rows, checks.places, lambda each: dependencies(each, checks.rank_of))]


def find_mixed_up_messages(rows: Rows) -> list[Finding]:
    """Receives that take the message of another receive, which no error shows."""
    return list(_Table(rows, Schedule.from_actions(rows, "")).find_crossed())


def find_ungathered(rows: Rows) -> Iterator[Finding]:
    """Compute on a stage whose FSDP parameters are not gathered, in rows that gather any."""
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


class _Table:
    def __init__(self, rows: Rows, compute: Schedule) -> None:
        self.rows = rows
        self.rank_of = compute.placement.rank_of
        self.num_microbatches = compute.num_microbatches
        self.places = find_places(rows)

    def make_finding(self, rule: Rule, action: Action, message: str, place: tuple[int, int] | None = None) -> Finding:
        rank, position = place or (self.rank_of[min(action.stage, len(self.rank_of) - 1)], None)
        return Finding(rule, rank, position, action, message)

    def find_unmatched(self) -> Iterator[Finding]:
        """Messages that are missing, doubled, not requested, or on a rank that does not hold their stage."""
        ends = [(stage, kind) for stage, kind in actions.sends_by_action(self.rank_of) if kind in _ENDS]
        expected = {Action(*end, microbatch) for end in ends for microbatch in range(self.num_microbatches)}
        for action in sorted(expected - self.places.keys()):
            done = "received" if action.kind in RECEIVES else "sent"
            yield self.make_finding("missing", action, f"the message is never {done}")
        for action, standing in self.places.items():
            if action.kind not in tables.MESSAGES:
                continue
            message = action._replace(kind=action.kind.removeprefix("WAIT_"))
            for again, place in enumerate(standing):
                if message not in expected:
                    yield self.make_finding("foreign", action, "no other rank has the stage next to it", place)
                elif self.rank_of[action.stage] != place[0]:
                    where = self.rank_of[action.stage]
                    yield self.make_finding("placement", action, f"stage {action.stage} is on rank {where}", place)
                if again:
                    yield self.make_finding("doubled", action, "it is already in the table", place)

    def find_disordered(self) -> Iterator[Finding]:
        """Messages around compute in the wrong order on one rank. `validate` only knows compute."""

        def around_messages(action: Action) -> Iterator[tuple[Action, ...]]:
            for choices in dependencies(action, self.rank_of):
                if action.kind not in COMPUTE or any(choice.kind not in COMPUTE for choice in choices):
                    yield choices

        return find_disordered(self.rows, around_messages)

    def find_crossed(self) -> Iterator[Finding]:
        """Messages from one rank to another that are not received in the order in which they are sent."""
        sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[Action, Action, tuple[int, int]]]] = defaultdict(list)
        for rank, row in enumerate(self.rows):
            for position, action in enumerate(row):
                if action.kind not in _ENDS:
                    continue
                end = other_end(action)
                if not 0 <= end.stage < len(self.rank_of):
                    continue
                peer = self.rank_of[end.stage]
                if action.kind in SENDS:
                    sent[rank, peer].append(action)
                else:
                    received[peer, rank].append((end, action, (rank, position)))
        for way, receives in received.items():
            for (message, action, place), posted in zip(receives, sent[way], strict=False):
                if message != posted:
                    text = f"rank {way[0]} sends {posted} here, and messages arrive in the order of their sends"
                    yield self.make_finding("order", action, text, place)
                    break


def find_blocked_queues(rows: Rows) -> list[Finding]:
    """A cycle of messages that wait for each other if each rank sends and receives one at a time, in order."""
    cycle = TimeGraph(Schedule.from_actions(rows, ""), Transport.ONE_QUEUE, rows).find_cycle()
    if not cycle:
        return []
    rank = next(rank for rank, row in enumerate(rows) if cycle[0] in row)
    text = "messages wait for each other: " + " before ".join(map(str, cycle))
    return [Finding("deadlock", rank, rows[rank].index(cycle[0]), cycle[0], text)]
