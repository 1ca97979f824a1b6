"""The actions of torch's tables with communication.

A cell is an action in torch's form: the compute ops, and `0SEND_F1`, `1RECV_F1`, `0WAIT_SEND_F1`, `0UNSHARD`, ... A
send does not block its rank. A receive waits for its send, and a wait for a send waits for the receive. Messages carry
no tags, so a rank has to receive them in the order of the other rank's sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from zbpipe.costs.model import SENDS
from zbpipe.schedule import tables
from zbpipe.schedule.ir import COMPUTATIONS, KINDS, Op, OpKind, inputs, new_tuple

RECEIVES = ("RECV_F", "RECV_B")
WAITS = tuple(f"WAIT_{send}" for send in SENDS)
COMPUTE = frozenset(COMPUTATIONS)


class Action(NamedTuple):
    """One cell: stage, torch's name of the action, microbatch (-1 for none)."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


Rows = tuple[tuple[Action, ...], ...]

# Tables, because a step of a new size processes tens of thousands of actions before it can run.
_OTHER_END = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}
"""The other end of a message: (kind, stage offset)."""
_MESSAGE_OF = {
    **dict.fromkeys(("SEND_F", "WAIT_SEND_F"), ("SEND_F", 0)),
    **dict.fromkeys(("SEND_B", "WAIT_SEND_B"), ("SEND_B", 0)),
    **dict.fromkeys(("F", "RECV_F"), ("SEND_F", -1)),
    **dict.fromkeys(("I", "B", "RECV_B"), ("SEND_B", 1)),
}
"""The send of an action's message: (kind, stage offset)."""


def op_of(action: Action) -> Op:
    return Op(action.stage, KINDS[action.kind], action.microbatch)


def other_end(action: tables.Cell) -> Action:
    """The receive of a send, or the send of a receive.

    >>> print(other_end(Action(0, "SEND_F", 3)), other_end(Action(0, "RECV_B", 3)))
    1RECV_F3 1SEND_B3
    """
    stage, kind, microbatch = action
    kind, step = _OTHER_END[kind]
    return new_tuple(Action, (stage + step, kind, microbatch))


def message_of(action: Action) -> Action | None:
    """The send of the message that the action takes, makes or waits for, if it is between two ranks."""
    if action.kind not in _MESSAGE_OF:
        return None
    kind, step = _MESSAGE_OF[action.kind]
    return new_tuple(Action, (action.stage + step, kind, action.microbatch))


def sends_by_action(rank_of: Sequence[int]) -> dict[tuple[int, str], tuple[int, str]]:
    """`message_of` by stage and kind, for the actions whose message goes to another rank."""
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


def dependencies(action: Action, rank_of: Sequence[int]) -> list[tuple[Action, ...]]:
    """Groups of actions, of each of which one has to be over before `action`."""
    if action.kind in COMPUTE:
        op = op_of(action)
        own, receive = rank_of[op.stage], Action(op.stage, "RECV_F" if op.kind is OpKind.F else "RECV_B", op.microbatch)
        return [
            tuple(new_tuple(Action, each) for each in group) if rank_of[group[0].stage] == own else (receive,)
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
