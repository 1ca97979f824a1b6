"""Ranks that run their lists in order, sleep while an input is missing, and wake when it is there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Runs through all lists: each item comes after those before it in its list, and after its inputs.

    Each turn gives a rank, its item, and the inputs that the item had, one of each group. When there are no more turns,
    the ranks in `waiting` are stuck.

        >>> turns = Turns([["a", "c"], ["b"]], lambda item: {"b": [["a"]], "c": [["b"]]}.get(item, []))
        >>> list(turns)
        [(0, 'a', []), (1, 'b', ['a']), (0, 'c', ['b'])]
        >>> turns.waiting
        {}

    Args:
        rows: the list of each rank.
        inputs: of an item: groups of items, of which one each has to be over before it.
        priority: by rank and position; of the ranks that can go on, the one with the lowest is next. It is asked when
            a rank can go on, after the caller has dealt with the turn that made this so. Default: the lowest rank.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[T]],
        inputs: Callable[[T], Iterable[Sequence[T]]],
        priority: Callable[[int, int], Any] | None = None,
    ) -> None:
        self._rows = rows
        self._inputs = inputs
        self._priority = priority
        self._done: set[T] = set()
        self._sleepers: dict[T, list[int]] = defaultdict(list)
        """By item the ranks that wait for it."""
        self.position = [0] * len(rows)
        """By rank how many items it has run."""
        self.waiting: dict[int, Sequence[T]] = {}
        """By sleeping rank the group of which its next item still needs one."""

    def __iter__(self) -> Iterator[tuple[int, T, list[T]]]:
        awake = [self._entry(rank) for rank, row in enumerate(self._rows) if row]
        heapify(awake)
        while awake:
            _, rank = heappop(awake)
            row = self._rows[rank]
            for item in islice(row, self.position[rank], None):
                found = self._inputs_of(rank, item)
                if found is None:
                    break
                yield rank, item, found
                self._done.add(item)
                self.position[rank] += 1
                for sleeper in self._sleepers.pop(item, ()):
                    if self.waiting.pop(sleeper, None) is not None:
                        heappush(awake, self._entry(sleeper))
                if self._priority and self.position[rank] < len(row):
                    heappush(awake, self._entry(rank))
                    break

    def _entry(self, rank: int) -> tuple[Any, int]:
        return self._priority(rank, self.position[rank]) if self._priority else rank, rank

    def _inputs_of(self, rank: int, item: T) -> list[T] | None:
        """The inputs of the rank's next item; None if one is missing, and then the rank sleeps until it is there."""
        found = []
        for choices in self._inputs(item):
            for choice in choices:
                if choice in self._done:
                    found.append(choice)
                    break
            else:
                self.waiting[rank] = choices
                for choice in choices:
                    self._sleepers[choice].append(rank)
                return None
        return found
