"""A file for ui.perfetto.dev with one step of all ranks, planned and measured."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch.distributed as dist

from zbpipe.costs.model import CostModel
from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.measure.communication import Communication, find_placement, measure_communication
from zbpipe.runtime.measure.profiler import RankTable, average_by_kind, combine
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.runtime.transport import find_messages
from zbpipe.schedule.ir import OpKind, Schedule
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Span, Timeline
from zbpipe.views.perfetto import write_perfetto

logger = logging.getLogger(__name__)


def write_trace(
    schedule: pipelining.PipelineSchedule,
    file: str | Path,
    step: int = 3,
    *,
    done: Callable[[str], None] = lambda words: None,
) -> None:
    """Write a trace of one of the next training steps. All ranks of the pipeline have to call this.

    The planned timeline is simulated with the medians of the measured times. So the two differ in waits and in the
    scatter of times, not in typical op times.

    Args:
        schedule: a schedule of zbpipe or torch.
        file: written by the job's first rank after the step, gzipped if the name ends in `.gz`. A failure logs a
            warning.
        step: number of the step, counted from the next one as 1.
        done: called with a line for the log, on the rank that wrote the file.

    Raises:
        ValueError: on the first rank, if it cannot write the file.
    """
    if dist.get_rank() == 0:
        checks.require_writable(file)

    def write(records: list[StepRecord]) -> None:
        planned, measured, _ = make_timelines(schedule, records[0])
        if dist.get_rank() != 0:
            return
        try:
            write_perfetto(file, planned, measured=measured)
        except OSError as error:
            logger.warning("the trace of this step cannot be written: %s", error)
            return
        done(
            f"{file} shows {planned.schedule.name}: {measured.makespan:.4g} s measured, {planned.makespan:.4g} s"
            " simulated; open it in ui.perfetto.dev"
        )

    collect(schedule, [*[Wanted.NOTHING] * (step - 1), Wanted.TIMES], write)


def make_timelines(
    schedule: pipelining.PipelineSchedule,
    record: StepRecord,
    communication: Communication | None = None,
) -> Recorded:
    """A step of this rank, simulated and measured. All ranks of the job have to call this."""
    stages = pipelining.stages_of(schedule)
    links, collectives = communication or measure_communication(stages, record.message_bytes)
    table = RankTable({**average_by_kind([record]), **collectives}, {}, {}, links, record.message_bytes)
    everything: list[tuple[RankTable, StepRecord]] = [(table, record)] * dist.get_world_size(stages[0].group)
    dist.all_gather_object(everything, (table, record), group=stages[0].group)
    costs = combine([each for each, _ in everything], find_placement(stages[0])).costs
    assert isinstance(costs, CostModel), "stages were measured"
    spans = tuple(each.spans for _, each in everything)
    ran = Schedule.from_rows([[span.op for span in row] for row in spans], record.schedule)
    transport, receives = find_messages(schedule)
    overlaps = pipelining.overlaps_fsdp(schedule)
    planned = simulate(ran, costs, transport=transport, receives=receives, overlaps_fsdp=overlaps)
    # The measured spans include the delays by collectives, whose own times are not recorded.
    measured = Timeline(ran, replace(costs, gather=0.0, reduce=0.0), spans)
    return Recorded(planned, measured, max(find_exposed(each) for _, each in everything) if costs.gather else 0.0)


class Recorded(NamedTuple):
    """One step of all ranks."""

    planned: Timeline
    measured: Timeline
    exposed_fsdp: float
    """Seconds for which a rank waited for FSDP2's collectives, on the rank with the most. 0 without FSDP2."""


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
