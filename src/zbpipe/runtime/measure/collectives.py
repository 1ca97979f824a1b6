"""Measure FSDP2's collectives: the time of each, and the part of a step that waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from zbpipe.runtime._torch import fsdp, fsdp_overlap, pipelining
from zbpipe.runtime._torch.stage_work import OwnWork, find_work
from zbpipe.runtime.measure.recording import StepRecord
from zbpipe.runtime.measure.stopwatch import time_fastest
from zbpipe.schedule.ir import OpKind
from zbpipe.simulator.timeline import Span

_ROUNDS = 3

Collectives = Mapping[int, tuple[float, float]]
"""Seconds of the gather and of the reduction of each stage in `fully_shard` or FSDP2's `replicate`, by stage."""


def measure_collectives(stages: Sequence[pipelining.Stage]) -> Collectives:
    """The collectives of this rank's stages. All data-parallel ranks have to call this between two steps."""
    shared = [stage for stage in stages if fsdp_overlap.is_shared(stage.submod)] if fsdp_overlap.IS_KNOWN else []
    return {stage.stage_index: _measure(stage) for stage in shared}


def _measure(stage: pipelining.Stage) -> tuple[float, float]:
    device = pipelining.device_of(stage)
    gather, work = 0.0, find_work(stage)
    if not (isinstance(work, OwnWork) and work.reshards):  # else it is part of each F and backward
        gather = time_fastest(lambda: fsdp_overlap.gather_all(stage.submod), device, _ROUNDS)
        fsdp.free_all(stage.submod)
    return gather, time_fastest(lambda: fsdp_overlap.reduce_zeros(stage.submod, device), device, _ROUNDS)


def find_exposed(record: StepRecord) -> float:
    """Seconds for which this rank waited for FSDP2's collectives in a step.

    A gather delays the first F of its stage, and a reduction the last W or B, whose buffer it needs, and the end of the
    step. The delays are relative to the median op of the same stage and kind.
    """
    if not record.spans:
        return 0.0
    delays = (_seconds(span) - usual for span, usual in _at_ends(record.spans))
    return sum(max(each, 0.0) for each in delays) + max(record.seconds - record.spans[-1].end, 0.0)


def _at_ends(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Each stage's first F and last W or B, with the median seconds of ops of its kind."""
    by_stage: dict[int, dict[OpKind, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        by_stage[span.op.stage][span.op.kind].append(span)
    for by_kind in by_stage.values():
        usual = {kind: median(map(_seconds, each)) for kind, each in by_kind.items()}
        last = max((by_kind[kind][-1] for kind in (OpKind.W, OpKind.B) if kind in by_kind), key=lambda span: span.end)
        yield by_kind[OpKind.F][0], usual[OpKind.F]
        yield last, usual[last.op.kind]


def _seconds(span: Span) -> float:
    return span.end - span.start
