"""What would change the verdict on a pipeline: more GPUs, another network, longer sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zbpipe.estimation.devices import Device
from zbpipe.estimation.estimate import estimate
from zbpipe.estimation.result import Answer, Estimate, answer
from zbpipe.estimation.workload import LayerWork, Workload

_TIMES = (2, 4, 8)


def flips(pipeline: Estimate, alone: Estimate) -> Iterator[tuple[str, Answer]]:
    """Changes after which the best layouts have another answer, each with that answer: the first of each kind."""
    best, other = pipeline.on_these_degrees, alone.on_these_degrees
    assert best is not None, "the verdict compares layouts that fit"
    assert other is not None, "the verdict compares layouts that fit"
    assert alone.device is not None, "without a pipeline there are no measured costs"
    now, likely, stages = answer(best, other), replace(alone.device, range=None), (best.stages_per_rank,)
    names = {"plan": ("ZBV", "Interleaved1F1B")}.get(best.schedule, (best.schedule,))
    for change in (_more_gpus, _slower_network, _faster_network, _longer_sequences):
        for times in _TIMES:
            try:
                changed = [change(each.workload, likely, times) for each in (pipeline, alone)]
                found = [
                    estimate(work, there, only=names, stages_per_rank=stages, plans=False) for work, there, _ in changed
                ]
            except ValueError:  # too few sequences to share
                break
            with_pipeline, without = (each.on_these_degrees for each in found)
            if with_pipeline is None or without is None:
                break
            if (then := answer(with_pipeline, without)) not in (now, Answer.UNDECIDED):
                yield changed[0][-1], then
                break


_Changed = tuple[Workload, Device, str]
"""A changed job on a device, and the change in words."""


def _more_gpus(workload: Workload, device: Device, times: int) -> _Changed:
    changed = workload.on(replace(workload.degrees, fsdp=times * workload.degrees.fsdp))
    return changed, device, f"{changed.degrees.gpus} GPUs and the same batch"


def _faster_network(workload: Workload, device: Device, times: float) -> _Changed:
    changed = replace(device, between=device.between * times)
    return workload, changed, f"a network of {changed.between / 1e9:.3g} GB/s per GPU"


def _slower_network(workload: Workload, device: Device, times: int) -> _Changed:
    return _faster_network(workload, device, 1 / times)


def _longer_sequences(workload: Workload, device: Device, times: int) -> _Changed:
    """The tokens of a step stay the same."""
    microbatches, rest = divmod(workload.microbatches, times)
    if rest or not microbatches:
        raise ValueError(f"{workload.microbatches} microbatches are not a multiple of {times}")
    changed = replace(
        workload,
        layers=tuple(_longer(layer, times) for layer in workload.layers),
        tokens=times * workload.tokens,
        microbatches=microbatches,
        message_bytes=times * workload.message_bytes,
        remade=None,
    )
    return changed, device, f"sequences of {changed.tokens // changed.microbatch_size} tokens"


def _longer(layer: LayerWork, times: int) -> LayerWork:
    """A layer with sequences `times` as long, whose attention has the square of that."""
    (in_f, in_i), (moved_f, moved_i) = layer.attention, layer.traffic
    return replace(
        layer,
        f=times * (layer.f + (times - 1) * in_f),
        i=times * (layer.i + (times - 1) * in_i),
        w=times * layer.w,
        attention=(times**2 * in_f, times**2 * in_i),
        activations=times * layer.activations,
        waits=times * layer.waits,
        working=tuple((kind, times * size) for kind, size in layer.working),
        traffic=(times * moved_f, times * moved_i),
        keys=times * layer.keys,
    )
