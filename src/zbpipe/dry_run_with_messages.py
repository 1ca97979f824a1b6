"""Whether lists with messages run to their end, found in one pass over them."""

from __future__ import annotations

from collections import deque

from zbpipe.actions import COMPUTE, SENDS, WAITS, Action, Rows, message_of
from zbpipe.dry_run import DryRun, WrongError
from zbpipe.ir import Placement

_MADE = {"SEND_F": 1, "SEND_B": 2}
"""How far a microbatch has to have come before the send, as in `DryRun.states`."""


class DryRunWithMessages(DryRun[Action]):
    """All ranks run lists with messages, without a clock; each rank sends and receives one at a time, in order.

    If that ends well, `validate_lowered` and `blocked_queues` find nothing.

        >>> from zbpipe.passes import with_messages
        >>> schedule = zbpipe.generate("ZBV", 2, 4)
        >>> DryRunWithMessages(with_messages(schedule), schedule.placement, 4).ends_well()
        True

    Args:
        rows: the list of each rank.
        placement: of the stages.
        microbatches: their number.
    """

    def __init__(self, rows: Rows, placement: Placement, microbatches: int) -> None:
        super().__init__(rows, placement, microbatches)
        pairs = list(zip(placement.rank_of, placement.rank_of[1:], strict=False))
        self._ways = {(stage, "SEND_F"): pair for stage, pair in enumerate(pairs) if pair[0] != pair[1]}
        self._ways |= {(stage + 1, "SEND_B"): pair[::-1] for (stage, _), pair in self._ways.items()}
        """By stage and kind of a send: from which rank to which one."""
        self._queues: list[deque[Action]] = [deque() for _ in rows]
        """By rank the messages that have not come to the front at both ends."""
        self._arrived: set[Action] = set()
        self._waited_for: set[Action] = set()
        self._gathers = [any(each.kind == "UNSHARD" for each in row) for row in rows]
        self._gathered: set[tuple[int, int]] = set()
        """Rank and stage."""

    def ends_well(self) -> bool:
        """Whether all lists run to their end, and all messages between ranks were sent and received once."""
        return super().ends_well() and not any(self._queues)

    def runs(self, rank: int, item: Action) -> bool:
        """Run the next item of a rank, if what it needs is there."""
        message = message_of(item)
        way = None if message is None else self._ways.get((message.stage, message.kind))
        if item.kind in COMPUTE:
            if self._gathers[rank] and (rank, item.stage) not in self._gathered:
                raise WrongError
            return (way is None or message in self._arrived) and super().runs(rank, item)
        if message is None:
            self._gather(rank, item)
            return True
        if way is None:
            raise WrongError
        self.require_at_home(rank, item)
        if item.kind in WAITS:
            return self._is_over(message)
        if item.kind in SENDS and self.states[item.stage][item.microbatch] < _MADE[item.kind]:
            raise WrongError
        self._post(rank, message)
        return True

    def _gather(self, rank: int, item: Action) -> None:
        if item.kind == "UNSHARD":
            self._gathered.add((rank, item.stage))
        elif item.kind == "RESHARD":
            self._gathered.discard((rank, item.stage))

    def _is_over(self, message: Action) -> bool:
        if message in self._waited_for:
            raise WrongError
        if message in self._arrived:
            self._waited_for.add(message)
        return message in self._arrived

    def _post(self, rank: int, message: Action) -> None:
        """Put a message into a rank's queue, and deliver what then is first at both ends."""
        self._queues[rank].append(message)
        ranks = [rank]
        while ranks:
            mine = self._queues[rank := ranks.pop()]
            if not mine:
                continue
            first = mine[0]
            source, target = self._ways[first.stage, first.kind]
            theirs = self._queues[other := source + target - rank]
            if not theirs or theirs[0] != first:
                continue
            if first in self._arrived:
                raise WrongError
            self._arrived.add(mine.popleft())
            theirs.popleft()
            ranks += [rank, other]
