"""Tables of actions that were moved about, and machines that run the messages of a table: one made of tokens, one real.

Neither looks for circles: they go on until all is over, or nothing more can be done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fifo import BACKENDS
from hypothesis import strategies as st

from zbpipe import simulate, testing
from zbpipe.actions import COMPUTE, Action, Rows
from zbpipe.passes import default_costs, free_sends_early, place_receives, with_messages
from zbpipe.transport import Receives


class Message(NamedTuple):
    """A message between two ranks, the same at both ends."""

    sender: int
    receiver: int
    send: Action


def messages_of(rows: Rows) -> Iterator[tuple[int, Action, Message | None]]:
    """Every action but those of sharding, its rank, and the message that it posts or waits for."""
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row if action.kind in COMPUTE}
    steps = {"SEND_F": 1, "SEND_B": -1, "WAIT_SEND_F": 1, "WAIT_SEND_B": -1}
    takes = {"RECV_F": ("F", -1), "F": ("F", -1), "RECV_B": ("B", 1), "I": ("B", 1), "B": ("B", 1)}
    for rank, row in enumerate(rows):
        for action in row:
            stage, kind, microbatch = action
            message = None
            if kind in steps:
                send = Action(stage, kind.removeprefix("WAIT_"), microbatch)
                message = Message(rank, rank_of[stage + steps[kind]], send)
            elif kind in takes and rank_of.get(stage + takes[kind][1], rank) != rank:
                direction, step = takes[kind]
                message = Message(rank_of[stage + step], rank, Action(stage + step, f"SEND_{direction}", microbatch))
            if kind not in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"):
                yield rank, action, message


def posts(action: Action) -> bool:
    return action.kind.startswith(("SEND", "RECV"))


def gets_stuck(rows: Rows, backend: str) -> bool:
    """Whether the table does not come to its end if its messages stand in queues as those of `backend` do."""
    queue_of = BACKENDS[backend]
    to_do: list[deque[tuple[Action, Message | None]]] = [deque() for _ in rows]
    for rank, action, message in messages_of(rows):
        to_do[rank].append((action, message))
    queues: dict[tuple[int, Hashable], deque[Message]] = {}
    over: set[Message] = set()

    def queue(rank: int, message: Message) -> deque[Message]:
        sends = message.sender == rank
        key = queue_of(message.receiver if sends else message.sender, sends)
        return queues.setdefault((rank, key), deque())

    def advance(rank: int) -> bool:
        action, message = to_do[rank][0]
        if message is not None and posts(action):
            queue(rank, message).append(message)
        elif message is not None and message not in over:
            return False
        to_do[rank].popleft()
        return True

    def meet(message: Message) -> bool:
        """Both ends stand first in their queues."""
        ends = [queue(rank, message) for rank in (message.sender, message.receiver)]
        if any(not end or end[0] != message for end in ends):
            return False
        for end in ends:
            end.popleft()
        over.add(message)
        return True

    def any_progress() -> bool:
        moves = [advance(rank) for rank, left in enumerate(to_do) if left]
        heads = {waiting[0] for waiting in queues.values() if waiting}
        return any(moves + [meet(message) for message in sorted(heads)])

    while any_progress():
        pass
    return any(to_do) or any(queues.values())


def run_messages(rows: Rows, backend: str, seconds: float) -> str:
    """The messages of this rank's row on a group of `backend`; how that failed, "" if all came to its end.

    Args:
        rows: as many as there are ranks.
        backend: of benchmarks/fifo.py.
        seconds: the longest wait.
    """
    group: Any = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
    works: dict[Message, Any] = {}
    buffers: dict[Message, torch.Tensor] = {}
    own = [(action, message) for rank, action, message in messages_of(rows) if rank == dist.get_rank()]
    try:
        for action, message in own:
            if message is None:
                continue
            if not posts(action):
                works[message].wait()
            elif action.kind.startswith("SEND"):
                works[message] = dist.isend(content(message), message.receiver, group)
            else:
                buffers[message] = torch.empty(2)
                works[message] = dist.irecv(buffers[message], message.sender, group)
        for work in works.values():
            work.wait()
    except RuntimeError as error:
        return str(error)
    wrong = [message for message, buffer in buffers.items() if not torch.equal(buffer, content(message))]
    return f"wrong contents of {wrong}" if wrong else ""


def content(message: Message) -> torch.Tensor:
    return torch.tensor([message.send.stage + 0.5 * (message.send.kind == "SEND_B"), message.send.microbatch])


@st.composite
def tables(draw: st.DrawFn, ranks: int | None = None, max_microbatches: int = 4) -> Rows:
    """Sound tables with communication: as zbpipe makes them, or with the messages in any order."""
    placement = draw(testing.placements(ranks=ranks or draw(st.integers(2, 4))))
    schedule = draw(testing.runnable_schedules(placement, max_microbatches=max_microbatches))
    timeline = simulate(schedule, default_costs(placement))
    rows = place_receives(with_messages(schedule), draw(st.sampled_from(Receives)), timeline)
    if draw(st.booleans()):
        rows = free_sends_early(rows, placement)
    eagerness = draw(st.sampled_from([None, 0.0, 0.5, 0.9]))
    # A seed, because what hypothesis draws one by one is too often the first choice, and then no queue blocks.
    return rows if eagerness is None else in_any_order(rows, Random(draw(st.integers(0, 2**32))), eagerness)


Way = tuple[int, int]
"""From one rank to another."""


def in_any_order(rows: Rows, random: Random, eagerness: float) -> Rows:
    """The same computations, their messages in an order that `random` chooses, one after the other.

    `eagerness` is how often a message that was sent is received at once. If all are, no queue is blocked.
    """
    moves = _Moves(rows, lambda: random.random() < eagerness)
    while choices := moves.choices():
        random.choice(choices)()
    return tuple(map(tuple, moves.done))


class _Moves:
    """What the ranks may do next, until all computations of `rows` are done."""

    def __init__(self, rows: Rows, receives_at_once: Callable[[], bool]) -> None:
        self.done: list[list[Action]] = [[] for _ in rows]
        self._receives_at_once = receives_at_once
        self._users: dict[Message, Action] = {}
        self._left: list[deque[tuple[Action, Message | None]]] = [deque() for _ in rows]
        for rank, action, message in messages_of(rows):
            if action.kind in COMPUTE:
                self._left[rank].append((action, message))
                if message is not None:
                    self._users[message] = action
        self._made_by = {
            (each.sender, each.send.stage, each.send.kind[-1], each.send.microbatch): each for each in self._users
        }
        self._to_send: dict[Way, deque[Message]] = defaultdict(deque)
        self._to_receive: dict[Way, deque[Message]] = defaultdict(deque)
        self._received: set[Message] = set()
        self._to_wait: list[Message] = []

    def choices(self) -> list[Callable[[], None]]:
        ready = [
            rank for rank, row in enumerate(self._left) if row and (row[0][1] is None or row[0][1] in self._received)
        ]
        return [
            *(partial(self._compute, rank) for rank in ready),
            *(partial(self._send, way) for way, messages in self._to_send.items() if messages),
            *(partial(self._receive, way) for way, messages in self._to_receive.items() if messages),
            *(partial(self._wait, message) for message in self._to_wait),
        ]

    def _compute(self, rank: int) -> None:
        action, _ = self._left[rank].popleft()
        self.done[rank].append(action)
        kind = {"F": "F", "I": "B", "B": "B"}.get(action.kind, "")
        if message := self._made_by.get((rank, action.stage, kind, action.microbatch)):
            self._to_send[message[:2]].append(message)

    def _send(self, way: Way) -> None:
        message = self._to_send[way].popleft()
        self.done[message.sender].append(message.send)
        self._to_receive[way].append(message)
        if self._receives_at_once():
            while self._to_receive[way]:
                self._receive(way)

    def _receive(self, way: Way) -> None:
        message = self._to_receive[way].popleft()
        kind = message.send.kind.replace("SEND", "RECV")
        self.done[message.receiver].append(self._users[message]._replace(kind=kind))
        self._received.add(message)
        self._to_wait.append(message)

    def _wait(self, message: Message) -> None:
        self._to_wait.remove(message)
        self.done[message.sender].append(message.send._replace(kind=f"WAIT_{message.send.kind}"))
