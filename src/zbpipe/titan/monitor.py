"""How busy the pipeline was, for TorchTitan's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

from zbpipe.runtime import _torch
from zbpipe.runtime.measure.profiler import Links, measure_links
from zbpipe.runtime.measure.recording import StepRecord, Wanted, watch
from zbpipe.runtime.measure.trace import timelines


class PipelineMetrics:
    """How busy the pipeline was in the steps that TorchTitan logs; all others run untouched."""

    def __init__(self, schedule: _torch.PipelineSchedule, armed: bool) -> None:
        self.armed = armed
        """Whether TorchTitan will log the step that comes now."""
        self._schedule = ref(schedule)
        self._record: StepRecord | None = None
        self._links: Links | None = None
        watch(schedule, self)

    def before(self) -> Wanted:
        """See `zbpipe.runtime.measure.recording.Watcher`."""
        return Wanted.TIMES if self.armed else Wanted.NOTHING

    def after(self, record: StepRecord) -> None:
        """See `zbpipe.runtime.measure.recording.Watcher`."""
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
