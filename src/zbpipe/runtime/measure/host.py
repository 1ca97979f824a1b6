"""Measure how fast a rank copies to its host's memory and back."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from zbpipe.costs.model import Link
from zbpipe.runtime.device import find_device
from zbpipe.runtime.offload.copiers import Copier, make_copier

_ROUNDS = 3
_SMALL, _LARGE = 1 << 16, 1 << 25
"""Bytes of the two copies that are timed."""


def measure_host(device: torch.device) -> Link | None:
    """The link between `device` and its host's memory, in the slower direction; None if nothing offloads."""
    # GPUs that share a link measure their share only if all measure at the same time. On the CPU this is the stand-in's
    # speed.
    with suppress(ValueError):
        copier = make_copier(device)
        small, large = (_time_one_way(copier, size, device) for size in (_SMALL, _LARGE))
        return Link(small, (_LARGE - _SMALL) / max(large - small, 1e-9))
    return None


def _time_one_way(copier: Copier, size: int, device: torch.device) -> float:
    """Seconds of one copy of `size` bytes in the slower direction, the fastest of a few rounds."""
    storage = torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
    out = back = float("inf")
    for _ in range(_ROUNDS):
        find_device(device).synchronize()
        start = time.perf_counter()
        copy = copier.copy_out([storage])
        copier.release(copy)
        find_device(device).synchronize()
        between = time.perf_counter()
        copier.copy_back(copy)
        copier.wait(copy)
        find_device(device).synchronize()
        out, back = min(out, between - start), min(back, time.perf_counter() - between)
    return max(out, back)
