"""Copies of memory to the host and back, beside the computations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zbpipe.runtime.device import Accelerator, find_device

Storages = Sequence[torch.UntypedStorage]


@dataclass(slots=True)
class HostCopy:
    """Tensors copied to the host."""

    storages: Storages
    """Storages on the device, with zero bytes while only the host copy exists."""
    sizes: tuple[int, ...]
    host: list[Any]
    """Contents of the storages."""
    event: Any
    """End of the last copy, out or back."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


def make_copier(device: torch.device) -> Copier:
    """The copier for this device; ValueError if there is none."""
    if device.type == "meta":
        raise ValueError("offload copies from accelerators, and on the CPU for tests, not from meta: omit it")
    return Copier(find_device(device))


class Copier:
    """Copies through pinned memory, with a stream for each direction.

    For storages that are not used in between, call `copy_out`, `release`, `copy_back` and `wait`, in this order.

    Memory is freed and allocated in the order of the compute stream. The allocator then never reuses it for kernels
    that could run before the copy ends, so `record_stream` is not needed.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._out, self._back = device.new_stream(), device.new_stream()
        self.copied = 0
        """Bytes copied out so far."""

    @property
    def smallest(self) -> int:
        """Smallest storage worth a copy, in bytes."""
        return self._device.smallest_copy

    def copy_out(self, storages: Storages) -> HostCopy:
        """Begin to copy to the host, after all computations so far."""
        self._out.wait_stream(self._device.current_stream())
        with self._out:
            host = [self._device.copy_to_host(storage) for storage in storages]
        copy = HostCopy(storages, tuple(each.nbytes() for each in storages), host, self._out.record_event())
        self.copied += copy.num_bytes
        return copy

    def release(self, copy: HostCopy) -> None:
        """Free the memory on the device. Computations from now on wait until the copy ends."""
        self._device.current_stream().wait_event(copy.event)
        for storage in copy.storages:
            self._device.resize(storage, 0)

    def copy_back(self, copy: HostCopy) -> None:
        """Allocate memory on the device again and begin to copy back."""
        for storage, size in zip(copy.storages, copy.sizes, strict=True):
            self._device.resize(storage, size)
        # Earlier kernels may still use this memory for another tensor.
        self._back.wait_stream(self._device.current_stream())
        with self._back:
            for content, storage in zip(copy.host, copy.storages, strict=True):
                self._device.copy_from_host(content, storage)
        copy.event = self._back.record_event()

    def wait(self, copy: HostCopy) -> None:
        """Make computations from now on wait until the copy back ends, and free the host's memory."""
        self._device.current_stream().wait_event(copy.event)
        copy.host.clear()
