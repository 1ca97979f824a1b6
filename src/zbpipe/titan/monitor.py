"""What a TorchTitan run learns about its pipeline while it trains: gradients, costs, a trace of one step, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import torch.distributed as dist
from torchtitan.tools.logging import logger

from zbpipe import costs_file
from zbpipe.costs_file import JobCosts
from zbpipe.runtime import _torch
from zbpipe.runtime.auto import AutoSchedule
from zbpipe.runtime.gradient_check import GradientCheck
from zbpipe.runtime.profiler import Links, Profiler, measure_links
from zbpipe.runtime.recording import StepRecord, Wanted, watch
from zbpipe.runtime.trace import timelines, trace
from zbpipe.titan.options import Options
from zbpipe.views import report


def attach(schedule: _torch.PipelineSchedule, options: Options) -> PipelineMetrics:
    """Measure and check what `options` ask for; `AutoSchedule` profiles by itself."""
    if options.check_gradients:
        GradientCheck(schedule, options.check_gradients)
    if options.profile_steps and not isinstance(schedule, AutoSchedule):
        Profiler(schedule, options.profile_steps, done=lambda costs: write_costs(costs, options.costs_out))
    if options.trace:
        trace(schedule, options.trace, options.trace_step, done=logger.info)
    return PipelineMetrics(schedule)


def write_costs(costs: JobCosts, file: str | None) -> None:
    """Show what was measured in the log of the first rank, and write it as a cost file if there is to be one.

    A file that cannot be written is a warning, for the job has nothing to do with it.
    """
    if dist.get_rank() != 0:
        return
    logger.info("measured costs:\n%s", report.costs(costs))
    if not file:
        return
    try:
        costs_file.dump(costs, file)
    except OSError as error:
        logger.warning("they cannot be written: %s", error)
    else:
        logger.info("wrote them to %s; `zbpipe plan --costs-file` takes it", file)


class PipelineMetrics:
    """How busy the pipeline was in the steps that TorchTitan logs; all others run untouched."""

    def __init__(self, schedule: _torch.PipelineSchedule) -> None:
        self.armed = False
        """Whether TorchTitan will log the step that comes now."""
        self._schedule = ref(schedule)
        self._record: StepRecord | None = None
        self._links: Links | None = None
        watch(schedule, self)

    def before(self) -> Wanted:
        """See `zbpipe.runtime.recording.Watcher`."""
        return Wanted.TIMES if self.armed else Wanted.NOTHING

    def after(self, record: StepRecord) -> None:
        """See `zbpipe.runtime.recording.Watcher`."""
        self._record = record

    def collect(self) -> dict[str, Any]:
        """The metrics of the last step that was looked at; all ranks of the pipeline have to ask for them."""
        schedule = self._schedule()
        if self._record is None or schedule is None:
            return {}
        if self._links is None:
            self._links = measure_links(_torch.stages_of(schedule), self._record.message_bytes)
        planned, measured = timelines(schedule, self._record, self._links)
        self._record = None
        return {
            "zbpipe/step(s)": measured.makespan,
            "zbpipe/simulated_step(s)": planned.makespan,
            "zbpipe/bubble(%)": 100 * measured.bubble,
            "zbpipe/peak_activations": max(planned.peak_activations),
            f"zbpipe/schedule/{Path(planned.schedule.name).name}": 1.0,
        }


def in_words(metrics: dict[str, Any]) -> str:
    """For the console."""
    (name,) = (key.removeprefix("zbpipe/schedule/") for key in metrics if key.startswith("zbpipe/schedule/"))
    return (
        f"pipeline: {name}  step: {metrics['zbpipe/step(s)']:.4g}s"
        f" (simulated {metrics['zbpipe/simulated_step(s)']:.4g}s)  bubble: {metrics['zbpipe/bubble(%)']:.1f}%"
        f"  peak activations: {metrics['zbpipe/peak_activations']:.3g} microbatches"
    )
