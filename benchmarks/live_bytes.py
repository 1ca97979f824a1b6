"""Bytes of tensors that a piece of code leaves alive, and their peak, on the CPU and on CUDA devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.nn.functional as F

from zbpipe.runtime._torch import StorageMeter


class Meter(Protocol):
    """Counts from 0 at its entry; tensors that were there before count for nothing."""

    @property
    def live(self) -> int:
        """Bytes alive now."""

    @property
    def peak(self) -> int:
        """The most bytes alive at any time since entry."""


def meter(device: torch.device) -> AbstractContextManager[Meter]:
    """The meter for tensors on `device`."""
    return _CudaMeter(device) if device.type == "cuda" else StorageMeter()


class _CudaMeter:
    """Asks the allocator, so it also sees workspaces inside of kernels, and rounds every tensor up to 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _CudaMeter:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


def self_check(device: torch.device) -> None:
    """Compare with what one linear layer must keep. Sizes are multiples of 512 bytes, which allocators round to."""
    rows, width, wide = 256, 128, 384
    x = torch.randn(rows, width, device=device, requires_grad=True)
    weight = torch.randn(wide, width, device=device, requires_grad=True)
    F.linear(x, weight).sum().backward()
    with meter(device) as bytes_:
        y = F.linear(x, weight)
        _expect(bytes_.live, 4 * rows * wide, "the output")
        view, dy = y.t()[1:], torch.ones_like(y)
        _expect(bytes_.live, 2 * 4 * rows * wide, "the output, seen twice, and its gradient")
        y.backward(dy)
        _expect(bytes_.live, 2 * 4 * rows * wide, "both after a backward into gradients that were there")
        # dW last, with dX added and gone, or the other way round: which is the engine's choice.
        product = bytes_.peak - 2 * 4 * rows * wide
        assert product in (4 * width * wide, 4 * rows * width, 4 * width * (wide + rows)), product
        del y, view
        _expect(bytes_.live, 4 * rows * wide, "the gradient alone")
        del dy
        _expect(bytes_.live, 0, "nothing")


def _expect(found: int, expected: int, what: str) -> None:
    assert found == expected, f"{what}: {found} bytes instead of {expected}"


if __name__ == "__main__":
    for name in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        self_check(torch.device(name))
        print(f"{name}: right")
