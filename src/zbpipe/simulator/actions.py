"""torch's tables with communication: actions, and checks that sends and receives match and cannot deadlock.

A cell is an action in torch's form: the compute ops, and `0SEND_F1`, `1RECV_F1`, `1SEND_B1`, `0RECV_B1`,
`0WAIT_SEND_F1`, `0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`, ... A send does not block its rank. A receive waits for its
send, and a wait for a send waits for the receive. Messages carry no tags, so a rank has to receive them in the order in
which the other rank sends them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from zbpipe.costs.memory_limit import MemoryLimitLike
from zbpipe.schedule import tables
from zbpipe.schedule.ir import COMPUTATIONS, KINDS, Op, OpKind, Schedule, inputs, new_tuple
from zbpipe.simulator.validation import Finding, Rule, find_deadlocks, find_disordered, validate

SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
WAITS = tuple(f"WAIT_{send}" for send in SENDS)
_LEFT_OUT = {
    **dict.fromkeys((*SENDS, *RECEIVES), "sends and receives"),
    **dict.fromkeys(WAITS, "waits for sends"),
    "UNSHARD": "unshards",
    "RESHARD": "reshards",
    "REDUCE_GRAD": "reductions of gradients",
    "WAIT_REDUCE_GRAD": "waits for reductions",
}
"""User-facing name of each kind of communication, in display order."""
COMPUTE = frozenset(COMPUTATIONS)


class Action(NamedTuple):
    """One cell: stage, torch's name of the action, microbatch (-1 where the action has none)."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


Rows = tuple[tuple[Action, ...], ...]
"""Actions of each rank, in order."""

# Tables, because a step of a new size processes tens of thousands of actions before it can run.
_NAMES = {kind: kind.value for kind in OpKind}
_STEP = {"F": 1, "B": -1}
"""Stage offset of a message: the output of a forward goes to the next stage, a gradient to the previous one."""
_OTHER_END = {
    **{f"SEND_{way}": (f"RECV_{way}", step) for way, step in _STEP.items()},
    **{f"RECV_{way}": (f"SEND_{way}", -step) for way, step in _STEP.items()},
}
"""Other end of each end of a message: (kind, stage offset)."""
_MESSAGE_OF = {
    **dict.fromkeys(("SEND_F", "WAIT_SEND_F"), ("SEND_F", 0)),
    **dict.fromkeys(("SEND_B", "WAIT_SEND_B"), ("SEND_B", 0)),
    **dict.fromkeys(("F", "RECV_F"), ("SEND_F", -_STEP["F"])),
    **dict.fromkeys(("I", "B", "RECV_B"), ("SEND_B", -_STEP["B"])),
}
"""Send of the message of each action: (kind, stage offset)."""


def action_of(op: Op) -> Action:
    """The op as an action in torch's lists."""
    return new_tuple(Action, (op.stage, _NAMES[op.kind], op.microbatch))


def op_of(action: Action) -> Op:
    """The op of an action in `COMPUTE`."""
    return Op(action.stage, KINDS[action.kind], action.microbatch)


def send_of(op: Op) -> Action:
    """The send of the result that an F, I or B computes for another rank."""
    return new_tuple(Action, (op.stage, "SEND_F" if op.kind is OpKind.F else "SEND_B", op.microbatch))


def other_end(action: tables.Cell) -> Action:
    """The receive of a send, or the send of a receive.

    >>> print(other_end(Action(0, "SEND_F", 3)), other_end(Action(0, "RECV_B", 3)))
    1RECV_F3 1SEND_B3
    """
    stage, kind, microbatch = action
    kind, step = _OTHER_END[kind]
    return new_tuple(Action, (stage + step, kind, microbatch))


def message_of(action: Action) -> Action | None:
    """The send whose message the action takes, makes or waits for, if it is between two ranks.

    >>> print(message_of(Action(3, "F", 0)), message_of(Action(3, "WAIT_SEND_B", 0)))
    2SEND_F0 3SEND_B0
    """
    stage, kind, microbatch = action
    if kind not in _MESSAGE_OF:
        return None
    kind, step = _MESSAGE_OF[kind]
    return new_tuple(Action, (stage + step, kind, microbatch))


def sends_by_action(rank_of: Sequence[int]) -> dict[tuple[int, str], tuple[int, str]]:
    """`message_of` by stage and kind, for the actions whose message goes to another rank.

    >>> sends_by_action((0, 1))[1, "F"]
    (0, 'SEND_F')
    """
    stages = range(len(rank_of))
    found = {}
    for stage, (kind, (send, step)) in product(stages, _MESSAGE_OF.items()):
        giver = stage + step
        taker = giver + _OTHER_END[send][1]
        if giver in stages and taker in stages and rank_of[giver] != rank_of[taker]:
            found[stage, kind] = giver, send
    return found


def parse(table: str) -> Rows:
    """The actions of each rank. Overlapped ones, `(0F1;3B0)OVERLAP_F_B`, become consecutive actions."""
    return tuple(tuple(Action(*cell) for cell in row) for row in tables.read(table))


def check_table(
    table: str, name: str, memory_limit: MemoryLimitLike | None = None
) -> tuple[Schedule, list[Finding], str]:
    """The ops of a table, all findings about it and its communication, and how it was read.

    The last is empty if the cells are the ops. ValueError for text that is not a table.

    >>> schedule, findings, how = check_table("0F0,0SEND_F0,0RECV_B0,0B0\\n1F0,1B0,1SEND_B0", "mine")
    >>> print(*findings)
    missing: rank 1, 1RECV_F0: the message is never received
    >>> how
    'read: 2 F, 2 B; omitted: 3 sends and receives; jobs place their own'
    """
    rows = parse(table)
    schedule = Schedule.from_actions(rows, name)
    left_out = Counter(_LEFT_OUT[each.kind] for row in rows for each in row if each.kind in _LEFT_OUT)
    findings = validate_lowered(rows, memory_limit) if left_out else validate(schedule, memory_limit)
    written = [[cell.strip() for cell in row if cell.strip()] for row in tables.cells(table)]
    if written == [list(map(str, row)) for row in schedule]:
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
    return [
        *alone,
        *checks.find_unmatched(),
        *checks.find_disordered(),
        *find_ungathered(rows),
        *checks.find_crossed(),
        *find_deadlocks(rows, checks.places, lambda action: dependencies(action, checks.rank_of)),
    ]


def find_mixed_up_messages(rows: Rows) -> list[Finding]:
    """Receives that take the message of another receive, so that results are wrong without an error."""
    return list(_Table(rows, Schedule.from_actions(rows, "")).find_crossed())


def dependencies(action: Action, rank_of: Sequence[int]) -> list[tuple[Action, ...]]:
    """Groups of actions. One of each group has to be over before `action`.

    >>> [[str(each) for each in group] for group in dependencies(Action(1, "I", 0), (0, 1, 0))]
    [['1F0'], ['1RECV_B0']]
    """
    if action.kind in COMPUTE:
        op = op_of(action)
        receive = Action(op.stage, "RECV_F" if op.kind is OpKind.F else "RECV_B", op.microbatch)
        return [
            tuple(map(action_of, group)) if rank_of[group[0].stage] == rank_of[op.stage] else (receive,)
            for group in inputs(op, len(rank_of))
        ]
    if action.kind in SENDS:
        makers = ("F",) if action.kind == "SEND_F" else ("I", "B")
        return [tuple(action._replace(kind=kind) for kind in makers)]
    if action.kind in RECEIVES:
        return [(other_end(action),)]
    if action.kind in WAITS:
        send = action._replace(kind=action.kind.removeprefix("WAIT_"))
        return [(send,), (other_end(send),)]
    return []


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
    """A table with communication, and the lookups for the checks."""

    def __init__(self, rows: Rows, compute: Schedule) -> None:
        self.rows = rows
        self.rank_of = compute.placement.rank_of
        self.num_microbatches = compute.num_microbatches
        self.places: dict[Action, list[tuple[int, int]]] = defaultdict(list)
        for rank, row in enumerate(rows):
            for position, action in enumerate(row):
                self.places[action].append((rank, position))

    def make_finding(self, rule: Rule, action: Action, message: str, place: tuple[int, int] | None = None) -> Finding:
        rank, position = place or (self.rank_of[min(action.stage, len(self.rank_of) - 1)], None)
        return Finding(rule, rank, position, action, message)

    def find_unmatched(self) -> Iterator[Finding]:
        """Messages that are missing, doubled, not requested, or on a rank that does not hold their stage."""
        ends = [(stage, kind) for stage, kind in sends_by_action(self.rank_of) if kind in _OTHER_END]
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
                if action.kind not in _OTHER_END:
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
