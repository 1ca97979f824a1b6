"""Receives where a message blocks both of its ranks: posted where both are free first, by a simulation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import frexp, ldexp

from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import KINDS, Placement
from zbpipe.simulator.actions import COMPUTE, RECEIVES, SENDS, Action, Rows, other_end, sends_by_action


def receive_by_rendezvous(rows: Rows, placement: Placement, costs: CostModel) -> Rows:
    """`rows` with each receive moved to where its message starts.

    A rank runs one computation or message at a time. A message starts when both of its ranks are free, and not before
    an earlier message that waits for one of them. A free rank prefers a message to its next computation. The result
    records one run, so nothing in it can wait in a cycle.

        >>> from zbpipe.simulator.actions import parse
        >>> rows = parse("0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1\\n"
        ...              "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1")
        >>> print(*receive_by_rendezvous(rows, Placement.loop(2), CostModel((1, 1), (1, 1), (1, 1), (1, 1)))[0])
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    """
    return _Run(rows, placement, costs).finish()


@dataclass(eq=False)
class _Rank:
    """A rank and its progress in its list."""

    to_come: deque[Action]
    """Remaining actions, without receives."""
    done: list[Action] = field(default_factory=list)
    behind: deque[Action] = field(default_factory=deque)
    """Sends that have not begun, and actions that follow them, such as the reduction of gradients."""
    until: int | None = None
    """End of its computation or message. None while it is free."""


class _Run:
    """One run. Times are integers as fine as those of the planner, which then sees the same ops end together."""

    def __init__(self, rows: Rows, placement: Placement, costs: CostModel) -> None:
        self._rank_of, self._costs = placement.rank_of, costs
        self._makers = sends_by_action(placement.rank_of)
        stages = range(costs.num_stages)
        longest = max(costs.of(stage, KINDS[kind]).seconds for stage in stages for kind in "FIW")
        self._exponent = 30 - frexp(longest)[1]
        self._ranks = [_Rank(deque(each for each in row if each.kind not in RECEIVES)) for row in rows]
        self._sent: list[Action] = []
        """Messages that have not begun, in the order in which they were made."""
        self._begun = set[Action]()

    def finish(self) -> Rows:
        now: int | None = 0
        while now is not None:
            for rank in self._ranks:
                if rank.until == now or (rank.until is None and not rank.done):
                    self._end(rank)
            held = self._begin_messages(now)
            for rank in self._ranks:
                if rank.until is None and rank not in held and rank.to_come and self._has_input(rank.to_come[0]):
                    stage, kind, _ = rank.to_come[0]
                    rank.done.append(rank.to_come.popleft())
                    parts = "IW" if kind == "B" else kind  # rounded one by one, like the planner's times
                    rank.until = now + sum(self._ticks(self._costs.of(stage, KINDS[part]).seconds) for part in parts)
                    rank.until -= self._ticks(self._costs.overhead) * (len(parts) - 1)
            now = min((rank.until for rank in self._ranks if rank.until is not None), default=None)
        assert not any(rank.to_come for rank in self._ranks), "a valid schedule runs to its end"
        return tuple(tuple(rank.done) for rank in self._ranks)

    def _end(self, rank: _Rank) -> None:
        """Free the rank, and continue with its next computation."""
        rank.until = None
        while rank.to_come and rank.to_come[0].kind not in COMPUTE:
            each = rank.to_come.popleft()
            rank.behind.append(each)
            if each.kind in SENDS:
                self._sent.append(each)
        self._go_on(rank)

    def _go_on(self, rank: _Rank) -> None:
        """Run the actions up to the next send that has not begun."""
        while rank.behind and (rank.behind[0].kind not in SENDS or rank.behind[0] in self._begun):
            rank.done.append(rank.behind.popleft())

    def _begin_messages(self, now: int) -> list[_Rank]:
        """Begin messages, and return the ranks that wait for one."""
        held: list[_Rank] = []
        sent, self._sent = self._sent, []
        for send in sent:
            receive = other_end(send)
            numbers = self._rank_of[send.stage], self._rank_of[receive.stage]
            ends = [self._ranks[number] for number in numbers]
            if any(rank.until is not None or rank in held for rank in ends):
                held += ends
                self._sent.append(send)
                continue
            self._begun.add(send)
            sender, receiver = ends
            self._go_on(sender)
            receiver.done.append(receive)
            sender.until = receiver.until = now + self._ticks(self._costs.transfer(*numbers))
        return held

    def _has_input(self, compute: Action) -> bool:
        stage, kind, microbatch = compute
        maker = self._makers.get((stage, kind))
        return maker is None or Action(*maker, microbatch) in self._begun

    def _ticks(self, seconds: float) -> int:
        return round(ldexp(seconds, self._exponent))
