"""Receives where a message blocks both of its ranks. No graph: the order of the messages follows from the times."""

from __future__ import annotations

from collections import deque
from math import frexp, ldexp

from zbpipe.costs.model import SENDS, CostModel
from zbpipe.schedule.ir import Placement
from zbpipe.simulator.actions import COMPUTE, RECEIVES, Action, Rows, other_end, sends_by_action


def receive_by_rendezvous(rows: Rows, placement: Placement, costs: CostModel) -> Rows:
    """`rows` with each receive moved to where its message starts.

    A rank runs one computation or message at a time. A message starts when both of its ranks are free, and not before
    an earlier one that waits for them. A free rank prefers a message. As the record of a run, nothing waits in a cycle.

        >>> from zbpipe.simulator.actions import parse
        >>> rows = parse("0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1\\n"
        ...              "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1")
        >>> print(*receive_by_rendezvous(rows, Placement.loop(2), CostModel((1, 1), (1, 1), (1, 1), (1, 1)))[0])
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    """
    run, now = _Run(rows, placement, costs), 0
    while True:
        run.go_on(now)
        busy = [until for until in run.until if until is not None]
        if not busy:
            return tuple(map(tuple, run.done))
        now = min(busy)


class _Run:
    """One run. Times are integers as fine as those of the planner, which then sees the same ops end together."""

    def __init__(self, rows: Rows, placement: Placement, costs: CostModel) -> None:
        self._rank_of, self._costs = placement.rank_of, costs
        self._makers = sends_by_action(placement.rank_of)
        longest = max(costs.of(stage, kind).seconds for stage in range(costs.num_stages) for kind in "FIW")
        self._exponent = 30 - frexp(longest)[1]
        self._to_come = [deque(each for each in row if each.kind not in RECEIVES) for row in rows]
        self._behind: list[deque[Action]] = [deque() for _ in rows]
        """Sends of each rank that have not begun, and actions that follow them, such as the reduction of gradients."""
        self.done: list[list[Action]] = [[] for _ in rows]
        self.until: list[int | None] = [0] * len(rows)
        """End of each rank's computation or message. None while it is free."""
        self._sent: list[Action] = []
        """Messages that have not begun, in the order in which they were made."""
        self._begun = set[Action]()

    def go_on(self, now: int) -> None:
        """End what is over, and begin messages, and computations of ranks that wait for no message."""
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
        """Begin messages, and return the ranks that wait for one."""
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
        """Ticks of a computation. Those of a B are rounded like the planner's, part by part."""
        stage, kind, microbatch = compute
        if kind != "B":
            return self._ticks(self._costs.of(stage, kind, microbatch).seconds)
        i, w, b = (self._costs.of(stage, each, microbatch).seconds for each in "IWB")
        return self._ticks(i) + self._ticks(w) - self._ticks(i + w - b)

    def _ticks(self, seconds: float) -> int:
        return round(ldexp(seconds, self._exponent))
