"""Whether lists run to their end, found in one pass over them.

`zbpipe.validate` and `zbpipe.actions.validate_lowered` say what is wrong with a table, which takes ten times as long.
Nearly all tables are right, and a step of another size waits until that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from zbpipe.ir import Placement

T = TypeVar("T", bound=tuple[int, str, int])
"""`Op` or `Action`: stage, kind, microbatch."""

_COMES = {"F": (0, 1, -1, 1), "I": (1, 2, 1, 2), "B": (1, 3, 1, 2), "W": (2, 3, 0, 2)}
"""By kind of an op: how far its microbatch has come on its stage before it, and after it; on which stage, counted from
its own, it needs the microbatch, and how far that has to have come there. 0: nothing, 1: F, 2: I, 3: all is done."""
_DONE = 3


class WrongError(Exception):
    """An item that can never run, or must not."""


class DryRun(Generic[T]):
    """All ranks run lists of ops, without a clock.

        >>> schedule = zbpipe.generate("ZBV", 2, 4)
        >>> DryRun(schedule.ops, schedule.placement, schedule.num_microbatches).ends_well()
        True

    Args:
        rows: the list of each rank, without copies to the host.
        placement: of the stages.
        microbatches: their number.
    """

    def __init__(self, rows: Sequence[Sequence[T]], placement: Placement, microbatches: int) -> None:
        self._rows = rows
        self._rank_of = placement.rank_of
        self._microbatches = microbatches
        self.states: list[list[int]] = []
        """By stage how far its microbatches have come. The last line is before stage 0 (-1) and after all others."""

    def ends_well(self) -> bool:
        """Whether all lists run to their end, each op once and on its own rank, and then everything is done."""
        if sum(map(len, self._rows)) < 2 * len(self._rank_of) * self._microbatches:
            return False  # also because a wrong number may be too large for what follows
        self.states = [*([0] * self._microbatches for _ in self._rank_of), [_DONE] * self._microbatches]
        rows = [iter(row) for row in self._rows]
        heads = [next(row, None) for row in rows]
        moves = True
        try:
            while moves:
                moves = False
                for rank, row in enumerate(rows):
                    head = heads[rank]
                    while head is not None and self.runs(rank, head):
                        head, moves = next(row, None), True
                    heads[rank] = head
        except WrongError:
            return False
        return all(state == _DONE for line in self.states for state in line)

    def runs(self, rank: int, item: T) -> bool:
        """Run the next item of a rank, if what it needs is there."""
        stage, kind, microbatch = item
        before, after, step, least = _COMES[kind]
        self.require_at_home(rank, item)
        if self.states[stage + step][microbatch] < least:
            return False
        line = self.states[stage]
        if line[microbatch] != before:
            raise WrongError
        line[microbatch] = after
        return True

    def require_at_home(self, rank: int, item: T) -> None:
        """Refuse what is not for this rank."""
        stage, _, microbatch = item
        if not 0 <= stage < len(self._rank_of) or self._rank_of[stage] != rank:
            raise WrongError
        if not 0 <= microbatch < self._microbatches:
            raise WrongError
