"""Estimates on other layouts: degrees of pipeline, tensor, context and expert parallelism, FSDP, and checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, inf
from operator import attrgetter
from typing import Any

from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation.devices import Device, find
from zbpipe.estimation.estimate import estimate
from zbpipe.estimation.rates import rates
from zbpipe.estimation.rows import Estimate
from zbpipe.estimation.workload import Degrees, Workload

FEW = ("1F1B", "Interleaved1F1B", "ZBV", "VHalf")
"""Schedules that compare layouts: cheap to generate. The best layouts then get all schedules and plans."""
_MOST_RANKS, _CONTEXT = 16, (1, 2, 4, 8)
_MOST_SHARING, _MOST_MICROBATCHES = 16, 2048
"""Limits of the GPUs that share a microbatch, and of ranks times microbatches. Bubbles are small at the latter."""
_STAGES_PER_RANK = range(12, 1, -1)
"""Numbers of stages per rank to try, from the largest one that cuts the blocks evenly."""


def degrees_to_try(workload: Workload, gpus_per_node: int) -> Iterator[Degrees]:
    """Degrees with tensor parallelism within a node, at least one layer per rank and one microbatch per group."""
    gpus, sequences = workload.degrees.gpus, workload.microbatches * workload.degrees.data
    for pipeline in _divisors(gpus):
        for tensor in _divisors(gpus // pipeline):
            for context in _CONTEXT:
                fsdp, rest = divmod(gpus, pipeline * tensor * context)
                fits = tensor <= gpus_per_node and pipeline <= min(len(workload.layers), _MOST_RANKS) and not rest
                if not fits or tensor * context > _MOST_SHARING or sequences % fsdp:
                    continue
                # Fewer microbatches than ranks never fill a pipeline.
                if pipeline == 1 or pipeline <= sequences // fsdp <= _MOST_MICROBATCHES // pipeline:
                    for experts in _expert_degrees(workload, tensor * context * fsdp, gpus_per_node):
                        yield Degrees(pipeline, tensor, fsdp, 1, context, experts)


def _expert_degrees(workload: Workload, gpus: int, gpus_per_node: int) -> list[int]:
    """Degrees of expert parallelism to try: 1, the largest within a node, and the number of experts."""
    most = gcd(max(layer.num_experts for layer in workload.layers) or 1, gpus)
    return sorted({1, gcd(most, gpus_per_node), most})


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _layouts(workload: Workload, gpus_per_node: int) -> Iterator[Workload]:
    kinds = (None,) if workload.checkpointing is None else Checkpointing
    for degrees in degrees_to_try(workload, gpus_per_node):
        for how in kinds:
            try:
                yield workload.on(degrees, how)
            except ValueError:  # for example, TP cannot share the heads
                continue


def search(workload: Workload, device: str | Device, **how: Any) -> list[Estimate]:
    """Estimates of the best layout for each choice of degrees, best first. Arguments as for `zbpipe.estimate`. The
    tokens of a step stay the same. The best layout with a pipeline and the best without one have all schedules, plans
    and ranges. Layouts are omitted if their computation alone exceeds the best step."""
    device = find(device)
    known = rates(device, how.get("tflops"), how.get("link"))
    likely = replace(known.device, range=None)

    def computing(layout: Workload) -> float:
        """Least seconds of a step: an average rank's computation."""
        costs = known.layer_costs(layout)
        return layout.microbatches * sum(map(sum, (costs.f, costs.i, costs.w))) / layout.degrees.pipeline

    layouts = [(computing(each), each) for each in _layouts(workload, device.gpus_per_node)]
    if not layouts:
        raise ValueError(f"no degrees fit {workload.degrees.gpus} GPUs: give the job more microbatches")
    found: dict[Degrees, Estimate] = {}
    shortest = {False: inf, True: inf}
    for least, each in sorted(layouts, key=lambda layout: layout[0]):
        has_pipeline = each.degrees.pipeline > 1
        if least >= shortest[has_pipeline] or _least_bytes(each) > device.usable_bytes:
            continue
        there = estimate(each, likely, only=FEW, stages_per_rank=_stages(each), plans=False)
        if each.degrees not in found or _order(there) < _order(found[each.degrees]):
            found[each.degrees] = there
        if (step := there.on_these_degrees) is not None:
            shortest[has_pipeline] = min(step.seconds, shortest[has_pipeline])
    ordered = sorted(found.values(), key=_order)
    if not ordered:
        raise ValueError(f"the job does not fit {workload.degrees.gpus} GPUs on any degrees")
    usable = [each.workload for each in ordered if each.on_these_degrees is not None]
    sides = ([each for each in usable if (each.degrees.pipeline > 1) is side] for side in (False, True))
    best = [side[0] for side in sides if side] or [ordered[0].workload]
    full = [estimate(each, device, stages_per_rank=(*_stages(each), 2, 4), **how) for each in best]
    every = [*sorted(full, key=_order), *(each for each in ordered if each.workload not in best)]
    return list(_compared_with_fsdp(workload, every))


def _compared_with_fsdp(job: Workload, every: Sequence[Estimate]) -> Iterator[Estimate]:
    """The layouts, with the best FSDP of all in place of that on the degrees of each."""
    best = next((each for each in every if each.workload.degrees.pipeline == 1 and each.on_these_degrees), None)
    fsdp = best.on_these_degrees if best else None
    if best and fsdp:
        fsdp = replace(fsdp, degrees=best.workload.degrees, checkpointing=best.workload.checkpointing)
    for each in every:
        steps = each.steps
        if fsdp and each.workload.degrees.pipeline > 1:
            steps = tuple(sorted((*(step for step in steps if step.timeline), fsdp), key=attrgetter("order")))
        yield replace(each, steps=steps, fsdp_found=fsdp, job=job)


def _least_bytes(workload: Workload) -> float:
    """Least memory of an average rank: weights, optimizer, and activations (half of 1F1B's, as in VHalf, or all
    without a pipeline)."""
    degrees, each = workload.degrees, workload.parameter_bytes
    has_pipeline = degrees.pipeline > 1
    held = workload.held(range(len(workload.layers)))
    weights = sum(
        part.number * each.total(part.shards) if has_pipeline else 4 * each.stored * part.own for part in held
    )
    activations = sum(layer.activations for layer in workload.layers) * (0.5 if has_pipeline else 1.0)
    return weights / degrees.pipeline + activations


def _stages(workload: Workload) -> tuple[int, ...]:
    """Numbers of stages per rank for comparing layouts: one, and the largest that cuts the blocks evenly."""
    blocks, ranks = sum(layer.is_block for layer in workload.layers), workload.degrees.pipeline
    return (1, next((each for each in _STAGES_PER_RANK if blocks % (each * ranks) == 0), 2))


def _order(each: Estimate) -> tuple[bool, float]:
    best = each.on_these_degrees
    return best is None, best.seconds if best else 0.0
