"""Tables of actions that were moved about, and a machine made of tokens that runs their messages.

It looks for no cycles: it goes on until all is over, or nothing more can be done.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from random import Random
from typing import NamedTuple

from fifo import BACKENDS
from hypothesis import strategies as st

from zbpipe import simulate, testing
from zbpipe.costs.model import Receives
from zbpipe.simulator.actions import COMPUTE, Action, Rows
from zbpipe.simulator.passes import add_messages, default_costs, free_sends_early, place_receives
from zbpipe.simulator.timeline import Timeline


class Message(NamedTuple):
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


class Lists:
    """Actions of all ranks, whose messages are in queues as those of `backend`; computations take no time."""

    def __init__(self, rows: Rows, backend: str) -> None:
        numbers: dict[Message, int] = {}
        queues: dict[tuple[int, Hashable], int] = {}
        self._to_do: list[list[tuple[int, int]]] = [[] for _ in rows]
        """By rank and action the message that it waits for, or -1, and the queue that it puts a message into, or -1."""
        self._ends: list[list[int]] = []
        """By message, the queues of its two ends."""
        for rank, action, message in messages_of(rows):
            awaited = queue = -1
            if message is not None:
                number = numbers.setdefault(message, len(numbers))
                if number == len(self._ends):
                    self._ends.append([])
                awaited = number
                if posts(action):
                    sends = message.sender == rank
                    key = rank, BACKENDS[backend](message.receiver if sends else message.sender, sends)
                    queue = queues.setdefault(key, len(queues))
                    self._ends[number].append(queue)
            self._to_do[rank].append((awaited, queue))
        self._num_queues = len(queues)

    def gets_stuck(self, random: Random) -> bool:
        """Whether they do not come to their end, if `random` chooses which rank or message goes on next."""
        to_do, ends, draw = self._to_do, self._ends, random.random
        position = [0] * len(to_do)
        queues: list[deque[int]] = [deque() for _ in range(self._num_queues)]
        is_over = bytearray(len(ends))
        waiting: dict[int, list[int]] = {}
        """Ranks by the message that they wait for."""
        # Ranks that can go on, and messages that can end, as negative numbers.
        moves = [rank for rank, row in enumerate(to_do) if row]

        def begin(queue: deque[int]) -> None:
            """Let the first message of this queue end, if it is the first at its other end, too."""
            message = queue[0]
            if len(ends[message]) == 2 and all(
                (found := queues[each]) and found[0] == message for each in ends[message]
            ):
                moves.append(-1 - message)

        while moves:
            place = int(draw() * len(moves))
            move = moves[place]
            moves[place] = moves[-1]
            moves.pop()
            if move < 0:
                message = -1 - move
                is_over[message] = 1
                both = [queues[each] for each in ends[message]]
                for queue in both:
                    queue.popleft()
                for queue in both:
                    if queue and -1 - queue[0] not in moves:
                        begin(queue)
                moves += waiting.pop(message, ())
                continue
            row, at = to_do[move], position[move]
            message, number = row[at]
            if number < 0 <= message and not is_over[message]:
                waiting.setdefault(message, []).append(move)
                continue
            if number >= 0:
                queue = queues[number]
                queue.append(message)
                if len(queue) == 1:
                    begin(queue)
            position[move] = at + 1
            if at + 1 < len(row):
                moves.append(move)
        return any(queues) or any(at < len(row) for at, row in zip(position, to_do, strict=True))


def gets_stuck(rows: Rows, backend: str) -> bool:
    return Lists(rows, backend).gets_stuck(Random(0))


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
                kinds = "F" if message.send.kind == "SEND_F" else "IB"
                made = min(starts[each] for kind in kinds if (each := message.send._replace(kind=kind)) in starts)
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
