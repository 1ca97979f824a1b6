"""The pipeline's metrics (step time, bubble, peak activations) in TorchTitan's log, and the loss on all ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.measure.profiler import Communication, find_placement, make_timelines, measure_communication
from zbpipe.runtime.measure.recording import StepRecord, Wanted, Watcher, watch
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
        self.num_steps = 0
        watch(schedule, self)

    def before(self) -> Wanted:
        self.num_steps += 1
        return Wanted.TIMES if self.armed else Wanted.NOTHING

    def after(self, record: StepRecord) -> None:
        self._record = record

    def share(self, losses: list[float]) -> list[float]:
        """The losses of the rank with the last stage. All ranks of the pipeline have to call this."""
        if (schedule := self._schedule()) is None:
            return losses
        stage = pipelining.stages_of(schedule)[0]
        sent = torch.tensor(losses, dtype=torch.float32, device=pipelining.device_of(stage))
        dist.broadcast(sent, group=stage.group, group_src=find_placement(stage).rank_of[-1])
        shared: list[float] = sent.tolist()
        return shared

    def collect(self) -> dict[str, Any]:
        """Metrics of the last recorded step. All ranks of the pipeline have to call this."""
        schedule = self._schedule()
        if self._record is None or schedule is None:
            return {}
        if self._communication is None:
            self._communication = measure_communication(pipelining.stages_of(schedule), self._record.message_bytes)
        planned, measured, exposed = make_timelines(schedule, self._record, self._communication)
        self._record = None
        share = find_deferred_share(pipelining.stages_of(schedule))
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


_reported: dict[type, ref[PipelineMetrics]] = {}
"""The last pipeline per TorchTitan metrics class. Weak references: a schedule must not outlive the interpreter."""


def report(pipeline: PipelineMetrics, processor: type, to_come: int) -> None:
    """Record the steps that TorchTitan logs, and add the metrics of `pipeline` to its own, also on the console.

    All ranks of the pipeline also get the loss of the rank with the last stage. A later call for a job's next pipeline
    replaces the first. `to_come` is the number of steps from the one that TorchTitan asks about to the next that runs.
    """
    is_wrapped = processor in _reported
    _reported[processor] = ref(pipeline)
    if not is_wrapped:
        _wrap(processor, to_come)


def find_reported(processor: type) -> PipelineMetrics | None:
    return _reported[processor]() if processor in _reported else None


def _wrap(processor: Any, to_come: int) -> None:
    should_log, log = processor.should_log, _with_shared_losses(processor.log, processor)

    def arm_where_logged(self: Any, step: int) -> bool:
        if pipeline := find_reported(processor):
            pipeline.armed = should_log(self, step + to_come)
        is_logged: bool = should_log(self, step)
        return is_logged

    def log_with_pipeline(self: Any, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        pipeline = find_reported(processor)
        found = pipeline.collect() if pipeline else {}
        log(self, *args, extra_metrics={**(extra_metrics or {}), **found}, **kwargs)
        if pipeline and found and dist.get_rank() == 0:
            logger.info(describe(found, " (start-up)" if pipeline.num_steps == 1 else ""))

    processor.should_log = arm_where_logged
    processor.log = log_with_pipeline
    if hasattr(processor, "log_validation"):
        processor.log_validation = _with_shared_losses(processor.log_validation, processor)


def _with_shared_losses(log: Callable[..., None], processor: type) -> Callable[..., None]:
    """TorchTitan's log function, with the losses of the rank that has them."""
    signature = inspect.signature(log)

    def log_shared(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        losses = {name: value for name, value in given.arguments.items() if "loss" in name}
        if (pipeline := find_reported(processor)) and losses:
            given.arguments.update(zip(losses, pipeline.share(list(losses.values())), strict=True))
        log(*given.args, **given.kwargs)

    return log_shared


def describe(metrics: dict[str, Any], remark: str) -> str:
    """A line for the console, with a remark on the bubble."""
    (name,) = (key.removeprefix("zbpipe/schedule/") for key in metrics if key.startswith("zbpipe/schedule/"))
    exposed = metrics.get("zbpipe/exposed_fsdp(s)")
    return (
        f"pipeline: {name}  step: {metrics['zbpipe/step(s)']:.4g}s"
        f" (simulated {metrics['zbpipe/simulated_step(s)']:.4g}s)  bubble: {metrics['zbpipe/bubble(%)']:.1f}%{remark}"
        f"  peak activations: {metrics['zbpipe/peak_activations']:.3g} microbatches"
        + (f"  exposed FSDP: {exposed:.3g}s" if exposed is not None else "")
    )
