"""Measure how fast a rank copies to its host's memory and back."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from zbpipe.costs.model import Link
from zbpipe.runtime.offload.copiers import Copier, copier_for

_ROUNDS = 3
_SMALL, _LARGE = 1 << 16, 1 << 25
"""Bytes of the two copies that are timed."""


def measure_host(device: torch.device) -> Link | None:
    """The way between `device` and its host's memory, in the slower of both directions; None where nothing offloads.

    GPUs that share a way have their parts of it only if all of them measure at the same time. On the CPU it is the
    stand-in's speed.
    """
    with suppress(ValueError):
        copier = copier_for(device)
        small, large = (_one_way(copier, size, device) for size in (_SMALL, _LARGE))
        return Link(small, (_LARGE - _SMALL) / max(large - small, 1e-9))
    return None


def _one_way(copier: Copier, size: int, device: torch.device) -> float:
    """Seconds of one copy of `size` bytes in the slower direction: the fastest of a few rounds."""
    storage = torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
    out, back = zip(*[_there_and_back(copier, storage, device) for _ in range(_ROUNDS)], strict=True)
    return max(float(min(out)), float(min(back)))


def _there_and_back(copier: Copier, storage: torch.UntypedStorage, device: torch.device) -> tuple[float, float]:
    """Seconds in each direction."""
    finish(device)
    start = time.perf_counter()
    copy = copier.out([storage])
    copier.release(copy)
    finish(device)
    between = time.perf_counter()
    copier.back(copy)
    copier.wait(copy)
    finish(device)
    return between - start, time.perf_counter() - between


def finish(device: torch.device) -> None:
    """Wait for all that the device has to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
