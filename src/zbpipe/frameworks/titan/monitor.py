"""The pipeline's metrics (step time, bubble, peak activations) among TorchTitan's metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.measure.communication import Communication, measure_communication
from zbpipe.runtime.measure.recording import StepRecord, Wanted, Watcher, watch
from zbpipe.runtime.measure.trace import make_timelines
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split.stage import find_deferred_share

logger = logging.getLogger(__name__)


class PipelineMetrics(Watcher):
    """Metrics of the steps that TorchTitan logs. Other steps are not recorded."""

    def __init__(self, schedule: pipelining.PipelineSchedule, armed: bool) -> None:
        self.armed = armed
        """Whether TorchTitan will log the next step."""
        self._schedule = ref(schedule)
        self._record: StepRecord | None = None
        self._communication: Communication | None = None
        watch(schedule, self)

    def before(self) -> Wanted:
        """See `zbpipe.runtime.measure.recording.Watcher`."""
        return Wanted.TIMES if self.armed else Wanted.NOTHING

    def after(self, record: StepRecord) -> None:
        """See `zbpipe.runtime.measure.recording.Watcher`."""
        self._record = record

    def collect(self) -> dict[str, Any]:
        """Metrics of the last recorded step. All ranks of the pipeline have to call this."""
        schedule = self._schedule()
        if self._record is None or schedule is None:
            return {}
        if self._communication is None:
            self._communication = measure_communication(hooks.stages_of(schedule), self._record.message_bytes)
        planned, measured, exposed = make_timelines(schedule, self._record, self._communication)
        self._record = None
        share = find_deferred_share(hooks.stages_of(schedule))
        steps = schedule.optimizer_steps if isinstance(schedule, RegisteredSchedule) else {}
        return {
            "zbpipe/step(s)": measured.makespan,
            "zbpipe/simulated_step(s)": planned.makespan,
            "zbpipe/bubble(%)": 100 * measured.bubble,
            "zbpipe/peak_activations": max(planned.peak_activations),
            **({} if share is None else {"zbpipe/weight_gradients_in_w(%)": 100 * share}),
            **({"zbpipe/exposed_fsdp(s)": exposed} if self._communication.collectives else {}),
            f"zbpipe/schedule/{Path(planned.schedule.name).name}": 1.0,
            **{f"zbpipe/optimizer_steps/{way}": float(number) for way, number in steps.items()},
        }


class _Reported(NamedTuple):
    """The pipeline whose metrics TorchTitan logs."""

    pipeline: ref[PipelineMetrics]
    """Metrics of the schedule, referred to weakly: the schedule has to be freed before the interpreter ends."""
    rank_with_loss: Callable[[Any], int]
    """Maps TorchTitan's `ParallelDims` to the rank that logs."""


_reported: dict[type, _Reported] = {}
"""The pipeline built last, per TorchTitan metrics class. Each class is wrapped once."""


def report(pipeline: PipelineMetrics, processor: type, rank_with_loss: Callable[[Any], int], to_come: int) -> None:
    """Record the steps that TorchTitan logs, and put the metrics of `pipeline` among its own and on the console.

    If a job builds another pipeline and calls this again, the metrics are those of the new one. `to_come` is the number
    of steps from the one that TorchTitan asks about to the next one that runs.
    """
    is_wrapped = processor in _reported
    _reported[processor] = _Reported(ref(pipeline), rank_with_loss)
    if not is_wrapped:
        _wrap(processor, to_come)


def _wrap(processor: Any, to_come: int) -> None:
    should_log, log = processor.should_log, processor.log

    def arm_where_logged(self: Any, step: int) -> bool:
        if pipeline := _reported[processor].pipeline():
            pipeline.armed = should_log(self, step + to_come)
        is_logged: bool = should_log(self, step)
        return is_logged

    def log_with_pipeline(self: Any, step: int, *args: Any, extra_metrics: dict[str, Any] | None = None) -> None:
        pipeline = _reported[processor].pipeline()
        found = pipeline.collect() if pipeline else {}
        log(self, step, *args, extra_metrics={**(extra_metrics or {}), **found})
        if found and dist.get_rank() == _reported[processor].rank_with_loss(self.parallel_dims):
            logger.info(describe(found))

    processor.should_log = arm_where_logged
    processor.log = log_with_pipeline


def describe(metrics: dict[str, Any]) -> str:
    """A line for the console."""
    (name,) = (key.removeprefix("zbpipe/schedule/") for key in metrics if key.startswith("zbpipe/schedule/"))
    exposed = metrics.get("zbpipe/exposed_fsdp(s)")
    return (
        f"pipeline: {name}  step: {metrics['zbpipe/step(s)']:.4g}s"
        f" (simulated {metrics['zbpipe/simulated_step(s)']:.4g}s)  bubble: {metrics['zbpipe/bubble(%)']:.1f}%"
        f"  peak activations: {metrics['zbpipe/peak_activations']:.3g} microbatches"
        + (f"  exposed FSDP: {exposed:.3g}s" if exposed is not None else "")
    )
