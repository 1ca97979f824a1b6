"""Tables of actions that were moved about, and what runs their messages: a machine made of tokens, and real ranks.

Neither looks for cycles: they go on until all is over, or nothing more can be done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from datetime import timedelta
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fifo import BACKENDS
from hypothesis import strategies as st

from zbpipe import simulate, testing
from zbpipe.costs.transport import Receives
from zbpipe.simulator.actions import COMPUTE, Action, Rows
from zbpipe.simulator.passes import add_messages, default_costs, free_sends_early, place_receives
from zbpipe.simulator.timeline import Timeline


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
    rows = place_receives(add_messages(schedule), draw(st.sampled_from(Receives)), timeline)
    if draw(st.booleans()):
        rows = free_sends_early(rows, placement)
    eagerness = draw(st.sampled_from([None, 0.0, 0.5, 0.9]))
    # A seed, because what hypothesis draws one by one is too often the first choice, and then no queue blocks.
    return rows if eagerness is None else in_any_order(rows, timeline, Random(draw(st.integers(0, 2**32))), eagerness)


def in_any_order(rows: Rows, timeline: Timeline, random: Random, eagerness: float) -> Rows:
    """The computations of `rows` as in `timeline`, and their messages at times that `random` chooses.

    A message is sent after it was made, received after that, and then used, so the table is sound. `eagerness` is how
    often a message is received as soon as it was sent. If all are, no queue is blocked.
    """
    starts = {Action(*span.op): span.start for row in timeline.spans for span in row}
    placed: list[list[tuple[float, Action]]] = [[] for _ in rows]
    ways: dict[tuple[int, int], list[tuple[float, float, Message, Action]]] = defaultdict(list)
    for rank, action, message in messages_of(rows):
        if action.kind in COMPUTE:
            placed[rank].append((starts[action], action))
            if message is not None:
                made = min(starts[each] for each in makers(message.send) if each in starts)
                ways[message.sender, message.receiver].append((made, starts[action], message, action))
    for (sender, receiver), messages in ways.items():
        sent = received = 0.0
        messages.sort()
        for number, (made, _, message, user) in enumerate(messages):
            latest = min(used for _, used, *_ in messages[number:])
            sent = random.uniform(max(made, sent), latest)
            at_once = random.random() < eagerness
            received = max(sent, received) if at_once else random.uniform(max(sent, received), latest)
            kind = message.send.kind
            placed[sender].append((sent, message.send))
            placed[receiver].append((received, user._replace(kind=kind.replace("SEND", "RECV"))))
            waited = random.uniform(received, timeline.makespan)
            placed[sender].append((waited, message.send._replace(kind=f"WAIT_{kind}")))
    return tuple(tuple(action for _, action in sorted(row, key=lambda each: each[0])) for row in placed)


def makers(send: Action) -> list[Action]:
    """The computations that may make the message."""
    return [send._replace(kind=kind) for kind in (["F"] if send.kind == "SEND_F" else ["I", "B"])]
