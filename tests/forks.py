"""Calls in processes that are forked from one that has imported what takes long to import."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from typing import Any

TIMEOUT = 200
"""Seconds for all calls of a list."""


def on_forks(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """`function` of each argument, each in a process forked from this one, two at a time."""
    gc.collect()
    gc.disable()  # the forks make many objects and end soon
    signal.alarm(TIMEOUT)  # ends the process, as it does the forks
    with multiprocessing.get_context("fork").Pool(2, signal.alarm, (TIMEOUT,), maxtasksperchild=1) as pool:
        results = pool.map(function, arguments, chunksize=1)
    signal.alarm(0)
    return results
