"""Passes over lists of actions (torch's, or those of `add_messages`) that move receives and waits."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from math import frexp, ldexp

from zbpipe.costs.model import SENDS, CostModel, Receives
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.tables import Cell
from zbpipe.simulator.actions import COMPUTE, RECEIVES, WAITS, Action, Rows, message_of, other_end, sends_by_action
from zbpipe.simulator.timeline import Span, Timeline


@lru_cache(maxsize=16)  # an estimate times each schedule at several speeds
def add_messages(schedule: Schedule) -> Rows:
    """The lists that torch makes of `schedule`, with sends and early receives, without torch and without copies.

    The ranks take turns. A rank whose next op has its input computes it, and posts its send and the other rank's
    receive. (In torch, gathers also take turns, which moves some receives by an op.)

        >>> for row in add_messages(Schedule.from_csv("0F0,0B0\\n1F0,1B0")):
        ...     print(*row)
        0F0 0SEND_F0 0RECV_B0 0B0
        1RECV_F0 1F0 1B0 1SEND_B0
    """
    schedule = schedule.computations
    graph, rank_of = schedule.graph, schedule.placement.rank_of
    turns = [-1] * len(graph.nodes)
    """Turn of each node. In turn n, rank n modulo their number may compute and send the result."""
    rows: list[list[Action]] = [[] for _ in schedule]
    for node in graph.order:
        turns[node] = max((turns[each] for each in graph.before[node]), default=-1)
        if graph.nodes[node][1] in COMPUTE:
            turns[node] += 1 + (rank_of[graph.nodes[node][0]] - turns[node] - 1) % len(rows)
    for node in sorted(graph.order, key=turns.__getitem__):
        action = Action(*graph.nodes[node])
        rows[rank_of[action.stage]].append(action)
        if action.kind in SENDS:
            receive = other_end(action)
            rows[rank_of[receive.stage]].append(receive)
    return tuple(map(tuple, rows))


def place_receives(rows: Rows, receives: Receives, timeline: Timeline) -> Rows:
    """`rows`, with torch's early receives moved by the timeline of the same schedule.

    >>> schedule = zbpipe.generate("1F1B", 2, 2)
    >>> timeline = zbpipe.simulate(schedule, (1, 1, 1))
    >>> print(*place_receives(add_messages(schedule), Receives.LATE, timeline)[1])
    1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1
    """
    match receives:
        case Receives.EARLY:
            return rows
        case Receives.LATE:
            return tuple(map(_receive_late, rows))
        case Receives.TIMED:
            return _receive_on_time(rows, timeline, share=1.0)
        case Receives.NEAREST:
            return _receive_on_time(rows, timeline, share=0.5)
        case Receives.RENDEZVOUS:
            return receive_by_rendezvous(rows, timeline.schedule.placement, timeline.costs)


def default_costs(placement: Placement) -> CostModel:
    """Costs for placing receives before any measurement: equal times, and a hundredth for messages. Without that, the
    order of messages is open, and V-Half loses 13 % in a queue."""
    return CostModel.uniform(placement, comm=0.01)


def _receive_late(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """Move each receive after computations, to the op that needs it or the next message of its rank. torch's own
    `defer_pp_recv` also moves receives past messages, which mixes up messages on a V and can hang."""
    held: list[Action] = []
    reordered: list[Action] = []
    for each in row:
        if each.kind in RECEIVES:
            held.append(each)
            continue
        release = 0
        if each.kind in SENDS:
            release = len(held)
        elif each.kind in COMPUTE:
            needed = message_of(each)
            release = max((n for n, receive in enumerate(held, start=1) if message_of(receive) == needed), default=0)
        reordered += [*held[:release], each]
        held = held[release:]
    return tuple(reordered)


def _receive_on_time(rows: Rows, timeline: Timeline, share: float) -> Rows:
    """Move each receive to its rank's position when the message starts.

    All ops have an order by their ends, in which no op precedes its dependencies. On every rank the messages follow
    this order of their ops, so nothing waits in a cycle under any times. If more than `share` of the running
    computation is over when the message starts, the receive goes after it.
    """
    spans: dict[Cell, Span] = {span.op: span for row in timeline.spans for span in row}
    place: dict[Cell, int] = {op: n for n, op in enumerate(sort_by_end(timeline))}
    maker = {
        other_end((span.op.stage, SENDS[span.op.kind is not OpKind.F], span.op.microbatch)): span
        for span in spans.values()
        if span.op.kind is not OpKind.W
    }
    """Span of the computation that makes each receive's message."""

    def move_receives(row: tuple[Action, ...]) -> Iterator[Action]:
        made = ((place[maker[each].op], each) for each in row if each.kind in RECEIVES)
        waiting = deque(sorted(made))

        def due(compute: Action) -> int:
            span, number, now = spans[compute], 0, place[compute]
            most = share * (span.end - span.start)
            for n, (made, receive) in enumerate(waiting, start=1):
                if made > now:
                    break
                if maker[receive].end - span.start <= most or message_of(receive) == message_of(compute):
                    number = n
            return number

        last = -1
        for each in row:
            if each.kind in RECEIVES:
                continue
            if each.kind in COMPUTE:
                for _ in range(due(each)):
                    yield waiting.popleft()[1]
                last = place[each]
            elif each.kind in SENDS:
                while waiting and waiting[0][0] < last:
                    yield waiting.popleft()[1]
            yield each

    return tuple(tuple(move_receives(row)) for row in rows)


def receive_by_rendezvous(rows: Rows, placement: Placement, costs: CostModel) -> Rows:
    """`rows` with each receive where its message starts, if a message blocks both of its ranks.

    A rank runs one computation or message at a time. A message starts when both ranks are free, after earlier ones that
    wait for them. A free rank prefers a message. The lists record a run, so nothing waits in a cycle.

        >>> from zbpipe.simulator.actions import parse
        >>> rows = parse("0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1\\n"
        ...              "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1")
        >>> print(*receive_by_rendezvous(rows, Placement.loop(2), CostModel((1, 1), (1, 1), (1, 1), (1, 1)))[0])
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    """
    run, now = _Rendezvous(rows, placement, costs), 0
    while True:
        run.go_on(now)
        busy = [until for until in run.until if until is not None]
        if not busy:
            return tuple(map(tuple, run.done))
        now = min(busy)


class _Rendezvous:
    """One run. Times are integers, as fine as the planner's, so that the same ops end together."""

    def __init__(self, rows: Rows, placement: Placement, costs: CostModel) -> None:
        self._rank_of, self._costs = placement.rank_of, costs
        self._makers = sends_by_action(placement.rank_of)
        longest = max(costs.of(stage, kind).seconds for stage in range(costs.num_stages) for kind in "FIW")
        self._exponent = 30 - frexp(longest)[1]
        self._to_come = [deque(each for each in row if each.kind not in RECEIVES) for row in rows]
        self._behind: list[deque[Action]] = [deque() for _ in rows]
        """Each rank's sends that have not begun, and the actions after them, such as reductions of gradients."""
        self.done: list[list[Action]] = [[] for _ in rows]
        self.until: list[int | None] = [0] * len(rows)
        """End of each rank's running computation or message."""
        self._sent: list[Action] = []
        """Messages that have not begun, in the order of their computations."""
        self._begun = set[Action]()

    def go_on(self, now: int) -> None:
        """End what is over. Begin messages, and computations of ranks that wait for no message."""
        for rank, to_come in enumerate(self._to_come):
            if self.until[rank] == now:
                self.until[rank] = None
                while to_come and to_come[0].kind not in COMPUTE:
                    self._behind[rank].append(to_come.popleft())
                    self._sent += [each for each in (self._behind[rank][-1],) if each.kind in SENDS]
                self._record(rank)
        held = self._begin_messages(now)
        for rank, to_come in enumerate(self._to_come):
            if self.until[rank] is None and rank not in held and to_come:
                maker = self._makers.get(to_come[0][:2])
                if maker is None or Action(*maker, to_come[0].microbatch) in self._begun:
                    self.done[rank].append(to_come.popleft())
                    self.until[rank] = now + self._seconds(self.done[rank][-1])

    def _record(self, rank: int) -> None:
        """Record the actions up to the next send that has not begun."""
        behind = self._behind[rank]
        while behind and (behind[0].kind not in SENDS or behind[0] in self._begun):
            self.done[rank].append(behind.popleft())

    def _begin_messages(self, now: int) -> set[int]:
        held = set[int]()
        sent, self._sent = self._sent, []
        for send in sent:
            receive = other_end(send)
            sender, receiver = self._rank_of[send.stage], self._rank_of[receive.stage]
            if any(self.until[rank] is not None or rank in held for rank in (sender, receiver)):
                held |= {sender, receiver}
                self._sent.append(send)
                continue
            self._begun.add(send)
            self._record(sender)
            self.done[receiver].append(receive)
            size = self._costs.of(*send).message
            self.until[sender] = self.until[receiver] = now + self._ticks(self._costs.transfer(sender, receiver, size))
        return held

    def _seconds(self, compute: Action) -> int:
        """Ticks of a computation. A B is rounded like the planner's, part by part."""
        stage, kind, microbatch = compute
        if kind != "B":
            return self._ticks(self._costs.of(stage, kind, microbatch).seconds)
        i, w, b = (self._costs.of(stage, each, microbatch).seconds for each in "IWB")
        return self._ticks(i) + self._ticks(w) - self._ticks(i + w - b)

    def _ticks(self, seconds: float) -> int:
        return round(ldexp(seconds, self._exponent))


def free_sends_early(rows: Rows, placement: Placement) -> Rows:
    """`rows` with waits for sends moved forward, to where a later message from the receiver proves the receipt. torch
    waits for most sends at the end of the step. If the peer posts the receive before a send of its own, the receive is
    posted when that send arrives here. So no wait blocks. For lists without waits see `add_waits`."""
    places = {each: n for row in rows for n, each in enumerate(row) if each.kind in RECEIVES or each.kind in SENDS}

    def free_early(row: tuple[Action, ...]) -> Iterator[Action]:
        waits = {each for each in row if each.kind in WAITS}
        owed: dict[int, list[tuple[int, Action]]] = defaultdict(list)
        """The positions of each receiver's receives in its row, with the waits for their sends."""
        for each in row:
            received = [each] if each.kind in WAITS else []
            if not received:
                yield each
            if each.kind in SENDS:
                receive = other_end(each)
                owed[placement.rank_of[receive.stage]].append((places[receive], wait_of(each)))
            elif each.kind in COMPUTE and (needed := message_of(each)) and needed in places:
                others = owed[placement.rank_of[needed.stage]]
                received = [wait for posted, wait in others if posted < places[needed]]
                others[:] = [other for other in others if other[0] >= places[needed]]
            for wait in received:
                if wait in waits:  # else it was moved forward
                    waits.remove(wait)
                    yield wait

    return tuple(tuple(free_early(row)) for row in rows)


def add_waits(rows: Rows) -> Rows:
    """`rows` with a wait for each send at the end of its rank's list, unless there is one (torch before 2.15)."""
    there = {each for row in rows for each in row}
    waits = ([wait_of(each) for each in row if each.kind in SENDS] for row in rows)
    return tuple((*row, *(wait for wait in mine if wait not in there)) for row, mine in zip(rows, waits, strict=True))


def wait_of(send: Action) -> Action:
    return Action(send.stage, f"WAIT_{send.kind}", send.microbatch)


def messages_held(rows: Rows) -> tuple[tuple[int, ...], ...]:
    """Number of messages that each rank holds during each action, besides its stages' activations. An op's input counts
    from its receive to the op's start. Its result counts from its end to the wait for its send, or until the next stage
    on the same rank takes it. A send without a wait is held to the end."""
    last = max((each.stage for row in rows for each in row), default=0)

    def count(row: tuple[Action, ...]) -> Iterator[int]:
        held = 0
        for each in row:
            is_forward, is_backward = each.kind == "F", each.kind in ("I", "B")
            comes = (is_forward and each.stage > 0) or (is_backward and each.stage < last)
            goes = (is_forward and each.stage < last) or (is_backward and each.stage > 0)
            held += each.kind.startswith("RECV") - comes
            yield held
            held += goes - each.kind.startswith("WAIT_SEND")

    return tuple(tuple(count(row)) for row in rows)


def sort_by_end(timeline: Timeline) -> list[Op]:
    """All ops of one step by their ends. Of equal ends, no op precedes its dependency."""
    ends = {span.op: span.end for span in chain.from_iterable(timeline.spans)}
    graph = timeline.schedule.computations.graph
    return sorted((node for each in graph.order if (node := graph.nodes[each]) in ends), key=ends.__getitem__)
