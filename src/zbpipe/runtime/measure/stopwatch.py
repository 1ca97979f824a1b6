"""Time work of a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zbpipe.runtime.device import find_device


def time_fastest(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest of a few runs, from an idle device to an idle device."""
    fastest = float("inf")
    for _ in range(rounds):
        find_device(device).synchronize()
        start = time.perf_counter()
        run()
        find_device(device).synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
