"""The inner loops in Python or, with numba, as machine code. Both give bit-identical results.

numba takes a third of a second to import and compiles once per installation, for some 15 seconds. So it is for searches
that take longer. Schedules by name do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from zbpipe.planner import kernel, rendezvous, samples
from zbpipe.planner.kernel import Job

_ENTRIES = (
    kernel.list_schedule,
    kernel.justify,
    kernel.anneal,
    samples.anneal_in_samples,
    rendezvous.anneal_by_rendezvous,
)
"""The functions that a search calls. These call all others of their modules."""
_FLOATS = ("lag", "seconds", "whole", "takes", "needs", "full", "reserve", "ahead", "limit", "origin")
"""Fields of a `Job` with floating-point numbers."""


@dataclass(frozen=True)
class Engine:
    """The functions that a search calls, from `kernel` and similar modules, and the conversion of lists for them."""

    list_schedule: Callable[..., tuple[float, list[int]]]
    justify: Callable[..., tuple[float, list[int]]]
    anneal: Callable[..., tuple[float, list[int], int]]
    anneal_in_samples: Callable[..., tuple[float, list[int]]]
    anneal_by_rendezvous: Callable[..., tuple[float, list[int], int]]
    integers: Callable[[Sequence[int]], Any]
    floats: Callable[[Sequence[float]], Any]
    rows: Callable[[Sequence[Sequence[float]]], Any]
    """Rows of equal length. The result is mutable."""
    compiled: bool

    def prepare(self, job: Job) -> Job:
        """The job with its sequences converted for the loops."""
        return job._replace(
            **{name: self.integers(getattr(job, name)) for name in ("rank", "feeder", "after", "fed")},
            **{name: self.floats(getattr(job, name)) for name in _FLOATS},
        )


def _lists(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(row) for row in rows]


PLAIN = Engine(*_ENTRIES, list, list, _lists, compiled=False)


def at_hand() -> Engine:
    """`fastest()` if it was called before, so that nothing waits for numba; else `PLAIN`."""
    return fastest() if fastest.cache_info().currsize else PLAIN


@cache
def fastest() -> Engine:
    """Machine code if numba is installed, else `PLAIN`, which is some 30 times as slow."""
    try:
        import numba
    except ImportError:
        return PLAIN
    import numpy as np

    for module in (kernel, samples, rendezvous):
        for each in vars(module).values():
            if isinstance(each, FunctionType) and each.__module__ == module.__name__ and each not in _ENTRIES:
                numba.extending.register_jitable(each)
    jit = numba.njit(cache=True)
    return Engine(
        *(jit(kernel.list_schedule), jit(kernel.justify), jit(kernel.anneal)),
        *(jit(samples.anneal_in_samples), jit(rendezvous.anneal_by_rendezvous)),
        lambda numbers: np.array(numbers, dtype=np.int64),
        lambda numbers: np.array(numbers, dtype=np.float64),
        lambda rows: np.array(rows, dtype=np.float64),
        compiled=True,
    )
