"""Runs lists with messages where messages go one after the other, and checks that they reach their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zbpipe.schedule import tables
from zbpipe.schedule.event_loop import EventLoop
from zbpipe.schedule.ir import Schedule, new_tuple
from zbpipe.simulator.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Rows,
    action_of,
    find_ungathered,
    other_end,
    sends_by_action,
)
from zbpipe.simulator.validation import Finding

_ENDS = frozenset((*SENDS, *RECEIVES))
_MESSAGES = frozenset(tables.MESSAGES)


@dataclass(eq=False)
class _Queue:
    """A queue of messages of one rank."""

    rank: int
    waiting: deque[Action] = field(default_factory=deque)
    """Messages that are not over."""
    before: deque[list[Action]] = field(default_factory=deque)
    """Actions that each message waits for at this end."""
    last: list[Action] = field(default_factory=list)
    """The last message, if there was one."""

    def pop(self) -> list[Action]:
        """End the first message, and return the item that it waited for at this end."""
        self.waiting.popleft()
        return self.before.popleft()


class MessageLoop:
    """Runs lists with messages, and returns each computation and message with all that it waits for.

    A message is one node for both ends, named like its send. It waits for the computations before it and the previous
    message in its queue, at both ends. A computation waits for the previous one and for its message. With
    `holds_up_compute`, computations also wait for the messages before them.

    All messages of a rank are in one queue, the strictest reading of NCCL and RCCL, or in a `queue_per_peer`.

    >>> from zbpipe.simulator.actions import parse
    >>> loop = MessageLoop(parse("0F0,0SEND_F0\\n1RECV_F0,1F0"), (0, 1))
    >>> [(str(each), [str(other) for other in before]) for each, before in loop]
    [('0F0', []), ('0SEND_F0', ['0F0']), ('1F0', ['0SEND_F0'])]
    """

    def __init__(
        self, rows: Rows, rank_of: Sequence[int], queue_per_peer: bool = False, holds_up_compute: bool = False
    ) -> None:
        self._rank_of = rank_of
        self._holds_up_compute = holds_up_compute
        self._sends = sends_by_action(rank_of)
        queues: dict[tuple[int, int | None], _Queue] = {}
        self._queue: dict[tuple[int, str], _Queue] = {}
        """Queue of each end of a message, by stage and kind."""
        for stage, kind in self._sends:
            if kind in _ENDS:
                rank, peer = rank_of[stage], rank_of[other_end(Action(stage, kind, 0)).stage]
                self._queue[stage, kind] = queues.setdefault((rank, peer if queue_per_peer else None), _Queue(rank))
        self._queues = list(queues.values())
        self._first: dict[Action, _Queue] = {}
        """The queue of each message that is first in only one of its queues."""
        self._computed: list[list[Action]] = [[] for _ in rows]
        """Last computation of each rank."""
        self._rows, self._posts = zip(*map(_split, rows), strict=True)
        self._loop = EventLoop(self._rows, self._dependencies)

    def __iter__(self) -> Iterator[tuple[Action, list[Action]]]:
        for rank in range(len(self._rows)):
            yield from self._post(rank, 0)
        for rank, action, messages in self._loop:
            yield action, self._computed[rank] + messages
            self._computed[rank] = [action]
            position = self._loop.position[rank] + 1
            if self._posts[rank][position]:
                yield from self._post(rank, position)

    def find_cycle(self) -> list[Action]:
        """The cycle of actions, each waiting for the one before, after a run that got stuck.

        It begins and ends with the same action, on its lowest rank.
        """
        heads = [self._rows[rank][self._loop.position[rank]] for rank in self._loop.waiting]
        heads += [queue.waiting[0] for queue in self._queues if queue.waiting]
        for head in heads:
            chain: list[Action] = []
            node: Action | None = head
            while node is not None and node not in chain:
                chain.append(node)
                node = self._waits_for(node)
            if node is not None:
                cycle = chain[chain.index(node) :][::-1]
                first = cycle.index(min(cycle, key=lambda each: self._rank_of[each.stage]))
                return [*cycle[first:], *cycle[: first + 1]]
        return []

    def is_stuck(self) -> bool:
        """Whether some rank or message did not reach its end."""
        return bool(self._loop.waiting) or any(queue.waiting for queue in self._queues)

    def _dependencies(self, action: Action) -> list[tuple[Action, ...]]:
        """The messages for which a computation waits, or the wait for a send."""
        stage, kind, microbatch = action
        needed: list[tuple[Action, ...]] = []
        if send := self._sends.get((stage, kind)):
            needed = [(new_tuple(Action, (*send, microbatch)),)]
        if self._holds_up_compute:
            rank = self._rank_of[stage]
            needed += [tuple(queue.last) for queue in self._queues if queue.rank == rank and queue.last]
        return needed

    def _post(self, rank: int, position: int) -> Iterator[tuple[Action, list[Action]]]:
        """Add ends of messages to their queues. Returns all messages that are now first at both ends."""
        computed, first = self._computed[rank], self._first
        for action in self._posts[rank][position]:
            queue = self._queue[action[:2]]
            message = action if action.kind in SENDS else other_end(action)
            queue.waiting.append(message)
            queue.before.append(computed + queue.last)
            queue.last = [message]
            changed = [queue] if len(queue.waiting) == 1 else []
            while changed:
                queue = changed.pop()
                message = queue.waiting[0]
                other = first.pop(message, None)
                if other is None:
                    first[message] = queue
                    continue
                one, two = (queue, other) if queue.rank < other.rank else (other, queue)
                before = one.pop() + two.pop()
                changed = [each for each in (*changed, one, two) if each.waiting]
                self._loop.finish(message)
                yield message, before

    def _waits_for(self, node: Action) -> Action | None:
        """One unfinished node for which `node` waits."""
        loop = self._loop
        if node.kind not in SENDS:
            rank = self._rank_of[node.stage]
            return loop.waiting[rank][0] if rank in loop.waiting else None
        queues = [self._queue[each[:2]] for each in (node, other_end(node))]
        for queue in queues:
            if node in queue.waiting and node != queue.waiting[0]:
                return queue.waiting[queue.waiting.index(node) - 1]
        absent = (queue.rank for queue in queues if node not in queue.waiting)
        heads = (self._rows[rank][loop.position[rank] :][:1] for rank in absent)
        return next((head[0] for head in heads if head), None)


def _split(row: Sequence[Action]) -> tuple[list[Action], list[list[Action]]]:
    """The computations and waits, and the ends of messages before the first of them and after each."""
    blocking: list[Action] = []
    posts: list[list[Action]] = [[]]
    for action in row:
        if action.kind in _ENDS:
            posts[-1].append(action)
        elif action.kind not in tables.SHARDING:
            blocking.append(action)
            posts.append([])
    return blocking, posts


def find_blocked_queues(rows: Rows) -> list[Finding]:
    """A cycle of messages that wait for each other if each rank sends and receives one at a time, in order.

    Each message begins when the computations before it are over, and lasts until both ends have met. The table must
    have no findings of `validate_lowered`.
    """
    loop = MessageLoop(rows, Schedule.from_actions(rows, "").placement.rank_of)
    deque(loop, maxlen=0)
    cycle = loop.find_cycle()
    if not cycle:
        return []
    rank = next(rank for rank, row in enumerate(rows) if cycle[0] in row)
    text = "messages wait for each other: " + " before ".join(map(str, cycle))
    return [Finding("deadlock", rank, rows[rank].index(cycle[0]), cycle[0], text)]


def are_sound(rows: Rows, schedule: Schedule) -> bool:
    """Whether `rows` are the valid `schedule` with messages, one queue per rank, and run to their end.

    Then `validate_lowered` and `find_blocked_queues` find nothing. They take ten times as long.
    """
    rank_of, microbatches = schedule.placement.rank_of, range(schedule.num_microbatches)
    sends = sends_by_action(rank_of)
    for rank, (row, ops) in enumerate(zip(rows, schedule, strict=True)):
        if [each for each in row if each.kind in COMPUTE] != list(map(action_of, ops)):
            return False
        mine = [(stage, kind) for stage, kind in sends if rank_of[stage] == rank and kind not in COMPUTE]
        expected = {(stage, kind, each) for stage, kind in mine for each in microbatches}
        found = [each for each in row if each.kind in _MESSAGES]
        there = set(found)
        if len(found) > len(there) or not there <= expected or any(each[1] in _ENDS for each in expected - there):
            return False
    if any(_sent_early(row) for row in rows):
        return False
    loop = MessageLoop(rows, rank_of)
    deque(loop, maxlen=0)
    return not loop.is_stuck() and next(find_ungathered(rows), None) is None


def _sent_early(row: Sequence[Action]) -> bool:
    """Whether a result is sent before it is computed."""
    made: set[tuple[int, str, int]] = set()
    for stage, kind, microbatch in row:
        if kind in COMPUTE:
            if kind != "W":
                made.add((stage, "SEND_F" if kind == "F" else "SEND_B", microbatch))
        elif kind in SENDS and (stage, kind, microbatch) not in made:
            return True
    return False
