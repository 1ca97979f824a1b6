"""Waits for collectives in eager code, routed through a function that may compute first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.distributed import _functional_collectives
from torch.distributed.tensor.debug import CommDebugMode

from zbpipe.runtime._torch.attributes import replaced

Around = Callable[[Callable[[], Any]], Any]
"""Takes a wait, whose collective is already launched. Runs it and returns its result."""

_SYNCHRONOUS = frozenset(
    f"{name}{form}"
    for name in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    for form in ("", "_into_tensor", "_single", "_tensor")
)


@contextmanager
def route_waits(around: Around) -> Iterator[None]:
    """Context in which waits for functional collectives, and for those of spmd_types, run through `around`."""
    # DTensor, autograd's collectives and AsyncCollectiveTensor look this name up in the module for each wait.
    wait = _functional_collectives.wait_tensor
    with ExitStack() as routed:
        routed.enter_context(
            replaced(_functional_collectives, wait_tensor=lambda tensor: around(partial(wait, tensor)))
        )
        if (spmd := sys.modules.get("spmd_types._dist")) is not None:
            routed.enter_context(replaced(spmd, dist=_Asynchronous(spmd.dist, around)))
        yield


@contextmanager
def marking_waits(mark: Callable[[], Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Context that yields the marks before and after each of these waits."""
    spans: list[tuple[Any, Any]] = []

    def around(wait: Callable[[], Any]) -> Any:
        start = mark()
        result = wait()
        spans.append((start, mark()))
        return result

    with route_waits(around):
        yield spans


class _Asynchronous:
    """torch.distributed for spmd_types, whose synchronous collectives are launched, and then waited for."""

    def __init__(self, distributed: Any, around: Around) -> None:
        self._distributed, self._around = distributed, around

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._distributed, name)
        return partial(self._run, found) if name in _SYNCHRONOUS else found

    def _run(self, collective: Callable[..., Any], *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = collective(*args, async_op=True, **kwargs)
        if async_op or work is None:  # this rank is not in the group
            return work
        self._around(work.wait)
        return None


@contextmanager
def finding_collectives() -> Iterator[Callable[[], bool]]:
    """Context that yields a function: whether a collective was called in it."""
    with CommDebugMode() as seen:  # type: ignore[no-untyped-call]
        yield lambda: bool(seen.get_total_counts())
