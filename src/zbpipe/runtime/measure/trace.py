"""A file for ui.perfetto.dev with one step of all ranks, planned and measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from zbpipe.costs.model import CostModel
from zbpipe.runtime import checks
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.lowering import find_messages
from zbpipe.runtime.measure.profiler import Links, RankTable, average_by_kind, combine, find_placement, measure_links
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
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
        planned, measured = make_timelines(schedule, records[0])
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
    schedule: pipelining.PipelineSchedule, record: StepRecord, links: Links | None = None
) -> tuple[Timeline, Timeline]:
    """A step of this rank, simulated and measured. All ranks of the pipeline have to call this."""
    stages = hooks.stages_of(schedule)
    if links is None:
        links = measure_links(stages, record.message_bytes)
    table = RankTable(average_by_kind([record]), {}, {}, links, record.message_bytes)
    everything: list[tuple[RankTable, StepRecord]] = [(table, record)] * dist.get_world_size(stages[0].group)
    dist.all_gather_object(everything, (table, record), group=stages[0].group)
    costs = combine([each for each, _ in everything], find_placement(stages[0])).costs
    assert isinstance(costs, CostModel), "stages were measured"
    spans = tuple(each.spans for _, each in everything)
    ran = Schedule.from_rows([[span.op for span in row] for row in spans], record.schedule)
    transport, receives = find_messages(schedule)
    return simulate(ran, costs, transport=transport, receives=receives), Timeline(ran, costs, spans)
