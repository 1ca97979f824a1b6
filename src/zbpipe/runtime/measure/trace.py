"""One step of all ranks as a file for ui.perfetto.dev: as it was planned, and as it ran."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from zbpipe.costs import CostModel
from zbpipe.ir import Schedule
from zbpipe.runtime import _torch, checks
from zbpipe.runtime.measure.profiler import (
    Links,
    RankTable,
    combined,
    measure_links,
    rank_of,
    seconds_by_kind,
)
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.runtime.messages import Messages, messages_of
from zbpipe.simulation import simulate
from zbpipe.timeline import Timeline
from zbpipe.views.perfetto import perfetto

logger = logging.getLogger(__name__)


def write_trace(
    schedule: _torch.PipelineSchedule,
    file: str | Path,
    step: int = 3,
    *,
    done: Callable[[str], None] = lambda words: None,
) -> None:
    """Write a trace of one coming training step; all ranks of the pipeline have to ask for it.

    The planned timeline is the simulator's, with the medians of the very times that were measured, so what differs
    is waiting and scatter, not the length of the ops.

    Args:
        schedule: any of zbpipe's or torch's.
        file: written by the first rank of the job, when the step is over. If that fails then, it is a warning in the
            log, and the job goes on.
        step: which one, counted from the next as 1.
        done: called on the rank that wrote the file, with a line that tells of it.

    Raises:
        ValueError: on the first rank, for a file that it cannot write.
    """
    if dist.get_rank() == 0:
        checks.require_writable(file)

    def write(records: list[StepRecord]) -> None:
        planned, measured = timelines(schedule, records[0])
        if dist.get_rank() != 0:
            return
        try:
            Path(file).write_text(perfetto(planned, measured=measured))
        except OSError as error:
            logger.warning("the trace of this step cannot be written: %s", error)
            return
        done(
            f"{file} shows {planned.schedule.name}: {measured.makespan:.4g} s measured, {planned.makespan:.4g} s"
            " simulated; open it in ui.perfetto.dev"
        )

    collect(schedule, [*[Wanted.NOTHING] * (step - 1), Wanted.TIMES], write)


def timelines(
    schedule: _torch.PipelineSchedule, record: StepRecord, links: Links | None = None
) -> tuple[Timeline, Timeline]:
    """A step as the simulator sees it and as it ran; all ranks of the pipeline have to ask for it.

    Args:
        schedule: any of zbpipe's or torch's.
        record: of this rank.
        links: its links, if they have been measured already.
    """
    stages = _torch.stages_of(schedule)
    if links is None:
        links = measure_links(stages, record.message_bytes)
    table = RankTable(seconds_by_kind([record]), {}, links, record.message_bytes)
    everything: list[tuple[RankTable, StepRecord]] = [(table, record)] * dist.get_world_size(stages[0].group)
    dist.all_gather_object(everything, (table, record), group=stages[0].group)
    costs = combined([each for each, _ in everything], rank_of(stages[0])).costs
    assert isinstance(costs, CostModel), "stages were measured"
    return planned_and_measured(costs, [each for _, each in everything], messages_of(schedule))


def planned_and_measured(
    costs: CostModel, records: Sequence[StepRecord], messages: Messages
) -> tuple[Timeline, Timeline]:
    """The timelines of what all ranks recorded, in the order of the ranks."""
    ran = Schedule.from_rows([[span.op for span in record.spans] for record in records], records[0].schedule)
    planned = simulate(ran, costs, transport=messages.transport, receives=messages.receives)
    return planned, Timeline(ran, costs, tuple(record.spans for record in records))
