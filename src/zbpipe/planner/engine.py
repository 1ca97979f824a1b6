"""The inner loops in Python or, with numba, as machine code, with bit-identical results.

numba compiles once per installation, for some 10 seconds. Schedules by name run without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any, get_type_hints

from zbpipe.planner import kernel
from zbpipe.planner.kernel import Job, Node

_ENTRIES = kernel.list_schedule, kernel.justify, kernel.anneal
"""The functions that a search calls. They call all others of the module."""
_OPTIONS = {"error_model": "numpy"}
"""No checks for divisions by zero, which cost time: the loops only divide by positive numbers."""


@dataclass(frozen=True)
class Engine:
    """The functions of `kernel` that a search calls, and their conversion of lists."""

    list_schedule: Callable[..., tuple[float, list[int]]]
    justify: Callable[..., tuple[float, list[int]]]
    anneal: Callable[..., tuple[float, list[int], int]]
    nodes: Callable[[Sequence[Node]], Any]
    integers: Callable[[Sequence[int]], Any]
    floats: Callable[[Sequence[float]], Any]
    compiled: bool

    def prepare(self, job: Job) -> Job:
        return job._replace(nodes=self.nodes(job.nodes), limit=self.floats(job.limit), origin=self.floats(job.origin))


PLAIN = Engine(*_ENTRIES, list, list, list, compiled=False)


def at_hand() -> Engine:
    """`fastest()` if it was called before, else `PLAIN`, so that nothing waits for numba."""
    return fastest() if fastest.cache_info().currsize else PLAIN


@cache
def fastest() -> Engine:
    """Machine code if numba is installed, else `PLAIN`, which is some 30 times as slow."""
    try:
        import numba
    except ImportError:
        return PLAIN
    import numpy as np

    def dtype(record: type) -> Any:
        """The record's array type."""
        return np.dtype([(name, np.dtype(kind)) for name, kind in get_type_hints(record).items()], align=True)

    def full(count: int, value: float) -> Any:
        return np.full(count, value)

    node, op = dtype(Node), dtype(kernel.Linked)
    values = attrgetter(*node.names)
    numba.extending.overload(kernel.fill, strict=False)(lambda count, value: full)
    numba.extending.overload(kernel.blank_ops)(lambda count: lambda count: np.zeros(count, op))
    others = (*_ENTRIES, kernel.fill, kernel.blank_ops)
    for each in vars(kernel).values():
        if isinstance(each, FunctionType) and each.__module__ == kernel.__name__ and each not in others:
            numba.extending.register_jitable(**_OPTIONS)(each)

    def compiled(entry: Callable[..., Any]) -> Callable[..., Any]:
        loops = numba.njit(cache=True, **_OPTIONS)(entry)

        def call(*args: Any) -> tuple[Any, ...]:
            length, order, *work = loops(*args)
            return length, order.tolist(), *work

        return call

    return Engine(
        *(compiled(kernel.list_schedule), compiled(kernel.justify), compiled(kernel.anneal)),
        lambda nodes: np.array([*map(values, nodes)], node),
        lambda numbers: np.array(numbers, dtype=np.int64),
        lambda numbers: np.array(numbers, dtype=np.float64),
        compiled=True,
    )
