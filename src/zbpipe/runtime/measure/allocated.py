"""Bytes that ops of a step allocate: kept at the end, and at the peak."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zbpipe.runtime._torch import autograd
from zbpipe.runtime.device import find_device
from zbpipe.schedule.ir import Op

_SILENT = "99"
"""Log level of torch's profiler, which otherwise prints lines for each step on a CPU."""
_MARK = "zbpipe's op "


class Bytes(NamedTuple):
    """Bytes that a piece of code has allocated and not freed."""

    kept: int = 0
    """Bytes at its end; negative if it freed more."""
    most: int = 0
    """Peak bytes."""

    def then(self, more: Bytes) -> Bytes:
        """Bytes of this piece followed by another one."""
        return Bytes(self.kept + more.kept, max(self.most, self.kept + more.most))


def make_counter(device: torch.device) -> DeviceCounter | HostCounter | None:
    """A counter for the bytes of ops in one step, used `within_step` and there `within_op`. `found` has them after the
    step."""
    # None on the CPU while another profiler runs: only one can run at a time.
    if device.type != "cpu":
        return DeviceCounter(device)
    return None if autograd.profiler_is_on() else HostCounter()


class DeviceCounter:
    def __init__(self, device: torch.device) -> None:
        self._device = find_device(device)
        self._found: dict[Op, Bytes] = {}

    def within_step(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def within_op(self, op: Op) -> Iterator[None]:
        """An op can have several pieces: the loss is part of the last stage's F."""
        self._device.reset_peak()
        before, _ = self._device.count_bytes()
        yield
        kept, most = self._device.count_bytes()
        self._found[op] = self._found.get(op, Bytes()).then(Bytes(kept - before, most - before))

    def found(self) -> Mapping[Op, Bytes]:
        return self._found


class HostCounter:
    """Counts with torch's profiler, over the whole step: freed bytes count only if their allocation was seen."""

    def __init__(self) -> None:
        self._ops: dict[str, Op] = {}
        self._seen: profile | None = None

    @contextmanager
    def within_step(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as self._seen:
            yield

    def within_op(self, op: Op) -> AbstractContextManager[object]:
        name = f"{_MARK}{op}"
        self._ops[name] = op
        return record_function(name)

    def found(self) -> Mapping[Op, Bytes]:
        assert self._seen is not None, "there was a step"
        result: dict[Op, Bytes] = {}
        for name, changes in list_allocations(self._seen, _MARK):
            op, held = self._ops[name], list(accumulate(changes, initial=0))
            result[op] = result.get(op, Bytes()).then(Bytes(held[-1], max(held)))
        return result


def list_allocations(seen: profile, mark: str) -> list[tuple[str, list[int]]]:
    """Names of `record_function` that begin with `mark`, in order, each with the bytes that it allocated."""
    # Freed bytes are negative.
    found = seen.profiler.kineto_results.events() if seen.profiler and seen.profiler.kineto_results else []
    events: list[Any] = sorted(found, key=lambda event: event.start_ns())
    memory = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    times = [time for time, _ in memory]
    result = []
    for event in events:
        if event.name().startswith(mark):
            within = slice(bisect_left(times, event.start_ns()), bisect_right(times, event.end_ns()))
            result.append((event.name(), [size for _, size in memory[within]]))
    return result
