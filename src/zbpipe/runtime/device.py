"""Streams, events, copies to the host, memory and random states of a job's device.

CUDA, ROCm and XPU share one implementation, by torch's interface for all accelerators. On the CPU, work ends with its
call.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import nullcontext
from ctypes import memmove, string_at
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


class Accelerator:
    smallest_copy = 2**16
    """Smallest storage worth a copy to the host, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self._device)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def new_event(self, *, timed: bool = False) -> torch.Event:
        return torch.Event(self._device, enable_timing=timed)

    def mark(self) -> torch.Event:
        """A timed event now, in the compute stream, without a wait of the host."""
        event = self.new_event(timed=True)
        event.record()
        return event

    def copy_to_host(self, storage: torch.UntypedStorage) -> Any:
        """Begin to copy to new memory of the host. Returns that memory."""
        content = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return content.copy_(_bytes_of(storage), non_blocking=True)

    def copy_from_host(self, content: Any, storage: torch.UntypedStorage) -> None:
        _bytes_of(storage).copy_(content, non_blocking=True)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Allocate or free the memory of `storage`, in the order of the computations."""
        storage.resize_(size)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)

    def is_capturing(self) -> bool:
        """Whether computations are captured into a graph, to run later."""
        # Meta tensors have no module, and asking for it is an error.
        ask = getattr(getattr(torch, self._device.type, None), "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def reset_peak(self) -> None:
        """Count the peak from now on. The job's log then sees the same peak."""
        self._module.reset_peak_memory_stats(self._device)

    def count_bytes(self) -> tuple[int, int]:
        return self._module.memory_allocated(self._device), self._module.max_memory_allocated(self._device)

    def random_state(self) -> Tensor | None:
        return cast(Tensor, self._module.get_rng_state(self._device))

    def set_random_state(self, state: Tensor | None) -> None:
        self._module.set_rng_state(state, self._device)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._device)


class _AtOnce(nullcontext[None]):
    """A stream whose work ends with its call."""

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self) -> None:
        pass


class _Moment:
    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Moment) -> float:
        return (end.time - self.time) * 1000


class Cpu(Accelerator):
    """The CPU as an accelerator: copies go from one place in its memory to another. They are not tensors, so that
    counts of tensor bytes include only the device's."""

    smallest_copy = 0

    def new_stream(self) -> torch.Stream:
        return cast(torch.Stream, _AtOnce())

    current_stream = new_stream

    def new_event(self, *, timed: bool = False) -> torch.Event:
        return cast(torch.Event, _Moment())

    def copy_to_host(self, storage: torch.UntypedStorage) -> bytes:
        return string_at(storage.data_ptr(), storage.nbytes())

    def copy_from_host(self, content: bytes, storage: torch.UntypedStorage) -> None:
        memmove(storage.data_ptr(), content, len(content))

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def random_state(self) -> None:
        """None, because callers keep the CPU's own state anyway."""

    def set_random_state(self, state: Tensor | None) -> None:
        pass


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A storage's content as bytes, in the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@cache
def find_device(device: torch.device) -> Accelerator:
    return Cpu(device) if device.type == "cpu" else Accelerator(device)


def seconds_between(start: torch.Event, end: torch.Event) -> float:
    """Waits for both."""
    end.synchronize()
    return start.elapsed_time(end) / 1000


class RandomState:
    """The present random states: torch's on the CPU and on the job's device, Python's and numpy's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._numpy = find_device(device), getattr(sys.modules.get("numpy"), "random", None)
        self._states = torch.get_rng_state(), self._device.random_state(), random.getstate()
        self._of_numpy = self._numpy and self._numpy.get_state()

    def restore(self) -> None:
        cpu, device, python = self._states
        torch.set_rng_state(cpu)
        self._device.set_random_state(device)
        random.setstate(python)
        if self._numpy is not None:
            self._numpy.set_state(self._of_numpy)
