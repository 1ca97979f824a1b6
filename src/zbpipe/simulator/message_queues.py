"""Lists with messages as they run where messages go one after the other, and whether they run to their end."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from zbpipe.schedule import tables
from zbpipe.schedule.event_loop import EventLoop
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    WAITS,
    Action,
    Rows,
    action_of,
    find_ungathered,
    message_of,
    other_end,
)
from zbpipe.simulator.validation import Finding

QueueOf = Callable[[int], Hashable]
"""By the rank at the other end the queue in which a message is. Those of one queue go one after the other."""


_ENDS = frozenset((*SENDS, *RECEIVES))


class _End(NamedTuple):
    """One end of a message."""

    rank: int
    queue: deque[Action]
    before: list[Action]
    """What the message waits for at this end."""


def one_queue(peer: int) -> Hashable:
    """One for all messages of a rank: the strictest reading of NCCL and RCCL.

    >>> one_queue(3)
    0
    """
    return 0


class MessageLoop:
    """Runs lists with messages, and gives each computation and each message with all that it waits for.

    A message is one thing at both ends, called as its send. It waits for the computations before it and the message
    before it in its queue, at both ends; a computation for the one before it and for its message.

        >>> from zbpipe.simulator.actions import parse
        >>> loop = MessageLoop(parse("0F0,0SEND_F0\\n1RECV_F0,1F0"), (0, 1))
        >>> [(str(each), [str(other) for other in before]) for each, before in loop]
        [('0F0', []), ('0SEND_F0', ['0F0']), ('1F0', ['0SEND_F0'])]
        >>> loop.circle()
        []

    Args:
        rows: of all ranks.
        rank_of: by stage.
        queue_of: which messages of a rank go one after the other.
        holds_up_compute: whether computations wait for the messages before them as well.
    """

    def __init__(
        self, rows: Rows, rank_of: Sequence[int], queue_of: QueueOf = one_queue, holds_up_compute: bool = False
    ) -> None:
        self._rows = rows
        self._rank_of = rank_of
        self._queue_of = queue_of
        self._holds_up_compute = holds_up_compute
        self._sends = {action for row in rows for action in row if action.kind in SENDS}
        self._loop = EventLoop(rows, self._dependencies, ends_later=lambda action: action.kind in _ENDS)
        self._computed: list[list[Action]] = [[] for _ in rows]
        """By rank the last computation."""
        self._queues: dict[tuple[int, Hashable], deque[Action]] = defaultdict(deque)
        """By rank the messages that are not over."""
        self._last: dict[tuple[int, Hashable], list[Action]] = {}
        """By queue the last message."""
        self._ends: dict[Action, list[_End]] = defaultdict(list)
        """By message those that are posted."""

    def __iter__(self) -> Iterator[tuple[Action, list[Action]]]:
        for rank, action, messages in self._loop:
            if action.kind in _ENDS:
                yield from self._post(rank, action)
            elif action.kind not in tables.SHARDING:
                yield action, self._computed[rank] + messages
                self._computed[rank] = [action]

    def circle(self) -> list[Action]:
        """After a run that got stuck, what waits in a circle, each before the next.

        The first one, on the lowest rank, is also the last.
        """
        heads = [self._rows[rank][self._loop.position[rank]] for rank in self._loop.waiting]
        heads += [queue[0] for queue in self._queues.values() if queue]
        for head in heads:
            chain: list[Action] = []
            node: Action | None = head
            while node is not None and node not in chain:
                chain.append(node)
                node = self._waits_for(node)
            if node is not None:
                circle = chain[chain.index(node) :][::-1]
                first = circle.index(min(circle, key=lambda each: self._rank_of[each.stage]))
                return [*circle[first:], *circle[: first + 1]]
        return []

    def is_stuck(self) -> bool:
        """Whether some rank or message did not come to its end."""
        return bool(self._loop.waiting) or any(self._queues.values())

    def _dependencies(self, action: Action) -> list[tuple[Action, ...]]:
        """The messages for which a computation waits, or the wait for a send."""
        if action.kind in _ENDS:
            return []
        message = message_of(action)
        needed: list[tuple[Action, ...]] = [(message,)] if message is not None and message in self._sends else []
        if self._holds_up_compute:
            rank = self._rank_of[action.stage]
            needed += [tuple(last) for (own, _), last in self._last.items() if own == rank]
        return needed

    def _post(self, rank: int, action: Action) -> list[tuple[Action, list[Action]]]:
        """One end of a message comes to its queue: gives all messages that now are first at both ends."""
        end = other_end(action)
        message = action if action.kind in SENDS else end
        place = rank, self._queue_of(self._rank_of[end.stage])
        queue = self._queues[place]
        queue.append(message)
        ends = self._ends[message]
        ends.append(_End(rank, queue, self._computed[rank] + self._last.get(place, [])))
        self._last[place] = [message]
        started = []
        changed = [queue] if len(ends) == 2 else []
        while changed:
            queue = changed.pop()
            ends = self._ends[queue[0]] if queue else []
            if len(ends) < 2 or ends[0].queue[0] != ends[1].queue[0]:
                continue
            message = queue[0]
            one, other = sorted(ends)
            one.queue.popleft()
            other.queue.popleft()
            changed += (one.queue, other.queue)
            self._loop.finish(message)
            started.append((message, one.before + other.before))
        return started

    def _waits_for(self, node: Action) -> Action | None:
        """One thing that is not over for which `node` waits."""
        rank = self._rank_of[node.stage]
        if node.kind not in SENDS:
            return self._loop.waiting[rank][0] if rank in self._loop.waiting else None
        for end in self._ends[node]:
            if end.queue[0] != node:
                return end.queue[end.queue.index(node) - 1]
        absent = {rank, self._rank_of[other_end(node).stage]} - {end.rank for end in self._ends[node]}
        heads = (self._rows[each][self._loop.position[each] :][:1] for each in absent)
        return next((head[0] for head in heads if head), None)


def find_blocked_queues(rows: Rows) -> list[Finding]:
    """A circle of messages that wait for each other if each rank sends and receives one message at a time, in order.

    Each begins when the computations before it are over, and lasts until both ends have met. Of a table that
    `validate_lowered` finds sound.

        >>> from zbpipe.simulator.actions import parse
        >>> find_blocked_queues(parse("0F0,0SEND_F0\\n1RECV_F0,1F0"))
        []
    """
    loop = MessageLoop(rows, Schedule.from_actions(rows, "").placement.rank_of)
    deque(loop, maxlen=0)
    circle = loop.circle()
    if not circle:
        return []
    rank = next(rank for rank, row in enumerate(rows) if circle[0] in row)
    text = "messages wait for each other: " + " before ".join(map(str, circle))
    return [Finding("deadlock", rank, rows[rank].index(circle[0]), circle[0], text)]


def are_sound(rows: Rows, schedule: Schedule) -> bool:
    """Whether `rows` are the valid `schedule` with messages, one queue a rank, and run to their end.

    Then `validate_lowered` and `find_blocked_queues` find nothing, which takes them ten times as long.

        >>> from zbpipe.simulator.passes import add_messages
        >>> schedule = zbpipe.generate("ZBV", 2, 4)
        >>> are_sound(add_messages(schedule), schedule)
        True
    """
    rank_of = schedule.placement.rank_of
    ends: Counter[Action] = Counter()
    for rank, (row, ops) in enumerate(zip(rows, schedule, strict=True)):
        if [each for each in row if each.kind in COMPUTE] != list(map(action_of, ops)):
            return False
        others = [each for each in row if each.kind in _ENDS or each.kind in WAITS]
        if not {each.stage for each in others} <= set(schedule.placement.stages_on(rank)):
            return False
        ends.update(others)
    messages = {
        Action(stage, kind, microbatch)
        for down in range(len(rank_of) - 1)
        if rank_of[down] != rank_of[down + 1]
        for stage, kind in ((down, "SEND_F"), (down + 1, "SEND_B"))
        for microbatch in range(schedule.num_microbatches)
    }
    posted = {each for each in ends if each.kind not in WAITS}
    waited = {message_of(each) for each in ends if each.kind in WAITS}
    are_all_there = posted == messages | set(map(other_end, messages)) and waited <= messages
    if not are_all_there or len(posted) + len(waited) < ends.total():
        return False
    if any(_sent_early(row) for row in rows):
        return False
    loop = MessageLoop(rows, rank_of)
    deque(loop, maxlen=0)
    return not loop.is_stuck() and next(find_ungathered(rows), None) is None


def _sent_early(row: Sequence[Action]) -> bool:
    """Whether something is sent before it is made."""
    made: set[tuple[int, str, int]] = set()
    for stage, kind, microbatch in row:
        if kind in COMPUTE:
            if kind != "W":
                made.add((stage, "SEND_F" if kind == "F" else "SEND_B", microbatch))
        elif kind in SENDS and (stage, kind, microbatch) not in made:
            return True
    return False
