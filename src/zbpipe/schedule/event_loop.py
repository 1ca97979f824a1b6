"""The one event loop: ranks run their lists in order, sleep while an input is missing, and wake when it arrives.

`EventLoop` decides which items can run, and so also which never can. A `Clock` computes when it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class EventLoop(Generic[T]):
    """Runs all lists: each item comes after those before it in its list, and after its dependencies.

    Each turn has a rank, its item, and the dependencies of that item, one from each group. After the last turn, the
    ranks in `waiting` are stuck.

        >>> loop = EventLoop([["a", "c"], ["b"]], lambda item: {"b": [["a"]], "c": [["b"]]}.get(item, []))
        >>> list(loop)
        [(0, 'a', []), (1, 'b', ['a']), (0, 'c', ['b'])]
        >>> loop.waiting
        {}

    Args:
        rows: the list of each rank.
        dependencies: groups of dependencies of an item. One of each group has to be over before the item.
        priority: key by rank and position. Of the ranks that can continue, the one with the lowest key is next. It is
            called when a rank can continue, after the caller has processed the previous turn. Default: the lowest rank.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[T]],
        dependencies: Callable[[T], Iterable[Sequence[T]]],
        priority: Callable[[int, int], Any] | None = None,
    ) -> None:
        self._rows = rows
        self._dependencies = dependencies
        self._priority = priority
        self._awake: list[tuple[Any, int]] = []
        self._done: dict[T, T] = {}
        """Each item by itself: turns return the objects from the lists, not the copies that `dependencies` creates."""
        self._sleepers: dict[T, list[int]] = defaultdict(list)
        """Ranks that wait for each item."""
        self.position = [0] * len(rows)
        """Number of items that each rank has run."""
        self.waiting: dict[int, Sequence[T]] = {}
        """Group of which the next item of each sleeping rank still needs one."""

    def __iter__(self) -> Iterator[tuple[int, T, list[T]]]:
        done, sleepers, position, dependencies = self._done, self._sleepers, self.position, self._dependencies
        self._awake = [self._entry(rank) for rank, row in enumerate(self._rows) if row]
        heapify(self._awake)
        while self._awake:
            _, rank = heappop(self._awake)
            row = self._rows[rank]
            while position[rank] < len(row):
                item = row[position[rank]]
                found = []
                for choices in dependencies(item):
                    for choice in choices:
                        if choice in done:
                            found.append(done[choice])
                            break
                    else:
                        self._sleep(rank, choices)
                        break
                else:
                    yield rank, item, found
                    position[rank] += 1
                    done[item] = item
                    if item in sleepers:
                        self.finish(item)
                    if not self._priority:
                        continue
                    if position[rank] < len(row):
                        heappush(self._awake, self._entry(rank))
                break

    def finish(self, item: T) -> None:
        """Wake the ranks that wait for `item`, which is over. It need not be in a list."""
        self._done[item] = item
        for sleeper in self._sleepers.pop(item, ()):
            if self.waiting.pop(sleeper, None) is not None:
                heappush(self._awake, self._entry(sleeper))

    def _sleep(self, rank: int, choices: Sequence[T]) -> None:
        """Put the rank to sleep until one of the choices is over."""
        self.waiting[rank] = choices
        for choice in choices:
            self._sleepers[choice].append(rank)

    def _entry(self, rank: int) -> tuple[Any, int]:
        return self._priority(rank, self.position[rank]) if self._priority else rank, rank


@dataclass
class Clock(Generic[T]):
    """Times of items. These are numbers, or any values that can be added and compared."""

    free: list[Any]
    """Time from which each rank is free."""
    seconds: Callable[[int, T], Any]
    """Duration of an item, by rank and item."""
    transfer: Callable[[T, T], Any]
    """Delay from the end of a dependency until an item may start, by dependency and item."""
    latest: Callable[[Any, Any], Any] = max
    """The later of two times."""
    earliest: Mapping[T, Any] = field(default_factory=dict)
    """Times before which items do not start."""
    lane_of: Callable[[T], Hashable] | None = None
    """The lane of an item that runs parallel to the other items of its rank. None for all others."""
    ends: dict[T, Any] = field(default_factory=dict)
    """End of each item."""

    def run(
        self, turns: Iterable[tuple[int, T, Sequence[T]]], gate: tuple[Sequence[int], Any] | None = None
    ) -> Iterator[tuple[int, T, Any, Any]]:
        """Rank, item, start and end of all turns. `gate`: number of early items of each rank, and when others start."""
        free, ends, seconds, transfer, latest = self.free, self.ends, self.seconds, self.transfer, self.latest
        lane_of, earliest = self.lane_of, self.earliest
        lanes: dict[Hashable, Any] = {}
        done = [0] * len(free)
        for rank, item, dependencies in turns:
            start = free[rank]
            lane = lane_of(item) if lane_of else None
            if lane is not None and (rank, lane) in lanes:
                start = latest(start, lanes[rank, lane])
            if gate:
                if done[rank] >= gate[0][rank]:
                    start = latest(start, gate[1])
                done[rank] += 1
            for each in dependencies:
                start = latest(start, ends[each] + transfer(each, item))
            if item in earliest:
                start = latest(start, earliest[item])
            ends[item] = end = start + seconds(rank, item)
            if lane is None:
                free[rank] = end
            else:
                lanes[rank, lane] = end
            yield rank, item, start, end
