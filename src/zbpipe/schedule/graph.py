"""A graph of dependencies, and an order in which everything can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

N = TypeVar("N")


class CycleError(ValueError):
    """A cycle of nodes: each waits for the previous one, and the first for the last."""

    def __init__(self, message: str, cycle: Sequence[Any]) -> None:
        super().__init__(message)
        self.cycle = cycle


@dataclass(eq=False)
class Graph(Generic[N]):
    """Nodes, and the numbers of the nodes for which each one waits.

    >>> Graph(["a", "b", "c"], [[], [2], [0]]).order
    [0, 2, 1]
    >>> Graph(["a", "b", "c"], [[1], [2], [0]]).order
    Traceback (most recent call last):
    zbpipe.schedule.graph.CycleError: c before b before a before c
    """

    nodes: list[N]
    before: list[list[int]]

    @cached_property
    def order(self) -> list[int]:
        """All nodes, each after those for which it waits. CycleError if there is no such order."""
        before, order = self.before, list[int]()
        done, on_path = bytearray(len(before)), bytearray(len(before))
        for root in range(len(before)):
            path = [] if done[root] else [root]
            while path:
                node = path[-1]
                on_path[node] = 1
                for other in before[node]:
                    if not done[other]:
                        if on_path[other]:
                            cycle = [self.nodes[each] for each in reversed(path[path.index(other) :])]
                            raise CycleError(" before ".join(map(str, (*cycle, cycle[0]))), cycle)
                        path.append(other)
                        break
                else:
                    done[node] = 1
                    order.append(path.pop())
        return order
