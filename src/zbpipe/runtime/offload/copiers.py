"""Copies of memory to the host and back, on separate streams of a GPU; on the CPU a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove, string_at
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Storages = Sequence[torch.UntypedStorage]


@dataclass(slots=True)
class HostCopy:
    """Tensors copied to the host."""

    storages: Storages
    """Storages on the device, with zero bytes while only the host copy exists."""
    sizes: tuple[int, ...]
    host: list[Any]
    """Contents of the storages."""
    event: torch.cuda.Event | None = None
    """End of the last copy, out or back."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


def make_copier(device: torch.device) -> GpuCopier | StandIn:
    """The copier for this device; ValueError if there is none."""
    if device.type == "cuda":
        return GpuCopier(device)
    if device.type == "cpu":
        return StandIn()
    raise ValueError(
        f"offload copies from GPUs (device type cuda, also on ROCm), and on the CPU for tests, not from {device.type}:"
        " omit it"
    )


class GpuCopier:
    """Copies through pinned memory, with a stream for each direction.

    For storages that are not used in between, call `copy_out`, `release`, `copy_back` and `wait`, in this order.

    Memory is freed and allocated in the order of the compute stream. The allocator then never reuses it for kernels
    that could run before the copy ends, so `record_stream` is not needed.
    """

    smallest = 2**16
    """Smallest storage worth a copy, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def copy_out(self, storages: Storages) -> HostCopy:
        """Begin to copy to the host, after all computations so far."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        sizes = tuple(storage.nbytes() for storage in storages)
        with torch.cuda.stream(self._out):
            host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            for there, storage in zip(host, storages, strict=True):
                there.copy_(bytes_of(storage), non_blocking=True)
        return HostCopy(storages, sizes, host, self._out.record_event())

    def release(self, copy: HostCopy) -> None:
        """Free the memory on the device. Computations from now on wait until the copy ends."""
        self._wait_for(copy)
        for storage in copy.storages:
            storage.resize_(0)

    def copy_back(self, copy: HostCopy) -> None:
        """Allocate memory on the device again and begin to copy back."""
        for storage, size in zip(copy.storages, copy.sizes, strict=True):
            storage.resize_(size)
        # Earlier kernels may still use this memory for another tensor.
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._back):
            for there, storage in zip(copy.host, copy.storages, strict=True):
                bytes_of(storage).copy_(there, non_blocking=True)
        copy.event = self._back.record_event()

    def wait(self, copy: HostCopy) -> None:
        """Make computations from now on wait until the copy back ends, and free the host's memory."""
        self._wait_for(copy)
        copy.host.clear()

    def _wait_for(self, copy: HostCopy) -> None:
        assert copy.event is not None
        torch.cuda.current_stream(self._device).wait_event(copy.event)


class StandIn:
    """Synchronous copies within the CPU's memory. The memory that stands for the device's is freed and reallocated.

    The copies are not tensors, so that counts of tensor bytes include only the device's.
    """

    smallest = 0

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes on the host now."""
        self.copied = 0
        """Bytes copied out so far."""

    def copy_out(self, storages: Storages) -> HostCopy:
        sizes = tuple(storage.nbytes() for storage in storages)
        host = [string_at(storage.data_ptr(), size) for storage, size in zip(storages, sizes, strict=True)]
        for storage in storages:
            storage.resize_(0)
        self.num_bytes += sum(sizes)
        self.copied += sum(sizes)
        return HostCopy(storages, sizes, host)

    def release(self, copy: HostCopy) -> None:
        """Do nothing: `copy_out` has freed the memory."""

    def copy_back(self, copy: HostCopy) -> None:
        for storage, size, content in zip(copy.storages, copy.sizes, copy.host, strict=True):
            storage.resize_(size)
            memmove(storage.data_ptr(), content, size)
        self.num_bytes -= copy.num_bytes

    def wait(self, copy: HostCopy) -> None:
        copy.host.clear()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The content of a storage as a tensor of bytes in the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
