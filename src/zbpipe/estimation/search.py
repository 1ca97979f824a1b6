"""Estimates on other degrees: every way to share the GPUs among pipeline, tensor parallelism and FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zbpipe.estimation.devices import Device, find
from zbpipe.estimation.estimate import estimate
from zbpipe.estimation.result import Estimate
from zbpipe.estimation.workload import Degrees, Workload

FEW = ("1F1B", "Interleaved1F1B", "ZBH1", "ZBV", "VHalf", "DualPipeVSplit")
"""Schedules for comparing degrees, cheap to generate. Plans and other schedules follow for the best degrees."""
_MOST_RANKS = 64


def degrees_to_try(workload: Workload, gpus_per_node: int) -> Iterator[Degrees]:
    """Degrees with tensor parallelism within a node, at least one layer per rank and one microbatch per group."""
    gpus, sequences = workload.degrees.gpus, workload.microbatches * workload.degrees.data
    for pipeline in _divisors(gpus):
        for tensor in _divisors(gpus // pipeline):
            fsdp = gpus // (pipeline * tensor)
            fits = tensor <= gpus_per_node and pipeline <= min(len(workload.layers), _MOST_RANKS)
            # Fewer microbatches than ranks never fill a pipeline.
            if fits and sequences % fsdp == 0 and sequences // fsdp >= pipeline:
                yield Degrees(pipeline, tensor, fsdp)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def search(workload: Workload, device: str | Device, *, names: Sequence[str] = FEW, **how: Any) -> list[Estimate]:
    """Estimates for all degrees, best first. Those of the best degrees include all schedules and plans.

    The tokens of a step stay the same. `names` are the schedules for comparing degrees; `how` has the rates, as for
    `zbpipe.estimate`.
    """
    device = find(device) if isinstance(device, str) else device
    found = []
    for degrees in degrees_to_try(workload, device.gpus_per_node):
        try:
            there = workload.on(degrees)
        except ValueError:  # for example heads that TP cannot share
            continue
        found.append(estimate(there, device, only=names, plans=False, **how))
    found.sort(key=_order)
    if not found:
        raise ValueError(f"no degrees fit {workload.degrees.gpus} GPUs: give the job more microbatches")
    return [estimate(found[0].workload, device, **how), *found[1:]]


def _order(each: Estimate) -> tuple[bool, float]:
    best = each.on_these_degrees
    return best is None, best.seconds if best else 0.0
