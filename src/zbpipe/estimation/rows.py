"""Result of an estimate: a row for each schedule, and the sources of its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from zbpipe.estimation.devices import Device
from zbpipe.estimation.workload import Workload
from zbpipe.simulator.timeline import Timeline

DECIDED = 0.1
"""Difference between a pipeline and FSDP from which on an estimate decides for a pipeline. Published steps of Llama 70B
on 64 H100 with FSDP differ by 35 % between frameworks."""
HARDLY = 0.05
"""Gain of a pipeline up to which the answer is FSDP, which is simpler: the estimate's mean error."""
NO_PIPELINE = "no pipeline (FSDP)"
PLAN = "plan"


class Answer(StrEnum):
    """Whether a pipeline pays."""

    YES = "a pipeline"
    NO = "no pipeline"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Memory:
    """Peak memory of each GPU of the worst rank, in bytes."""

    weights: float
    """Shards of parameters, and the copies that products use."""
    optimizer: float
    """Gradients and the optimizer's moments."""
    activations: float
    waiting: float
    """Deferred gradients."""
    buffers: float
    """Messages in transit."""
    working: float
    logits: float
    """Working memory of F of the stage with the head, or of any other op."""

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Step:
    """A row of the table. Times are in seconds."""

    schedule: str
    placement: str
    """"loop", "v", the name of a plan's, or "" without a pipeline."""
    stages_per_rank: int
    seconds: float
    """Seconds of a step, including gathering and reducing of FSDP that nothing hides."""
    bubble: float
    """Idle share of a step on the average rank, or without a pipeline the share of exposed communication."""
    tokens_per_second: float
    """Tokens per second of each GPU."""
    mfu: float | None
    """MFU from the operations of the model, without recomputation. None if the peak is unknown."""
    memory: Memory
    fits: bool
    source: str = ""
    """Owner of the class that runs it: "torch" or "zbpipe"."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    range: tuple[float, float] | None = None
    """Seconds with the largest and the least plausible rate of the device. None if the rate is given or measured."""
    has_torchs_split: bool = False
    memory_limit: str | None = None
    """The job's memory limit. None stands for the default."""
    runs: bool = True
    """Whether it can run with the job's checkpointing and torch.compile, as fast as simulated."""

    def relative_range(self, to: Step) -> tuple[float, float]:
        """Least and largest step time relative to another row, over the plausible rates."""
        ends = zip(self.range, to.range, strict=True) if self.range and to.range else ()
        found = [one / other for one, other in ((self.seconds, to.seconds), *ends)]
        return min(found), max(found)


def answer(pipeline: Step, fsdp: Step) -> Answer:
    """Whether a pipeline pays, from its step and the one without: surely at all plausible speeds."""
    _, most = pipeline.relative_range(fsdp)
    if most <= 1 - DECIDED:
        return Answer.YES
    return Answer.NO if pipeline.seconds > (1 - HARDLY) * fsdp.seconds else Answer.UNDECIDED


@dataclass(frozen=True)
class Estimate:
    """Result of `zbpipe.estimate`."""

    workload: Workload
    device: Device | None
    """The device, with the given rates in place of the table's."""
    steps: tuple[Step, ...]
    """Rows, fastest first, then those that do not fit, then those that cannot run."""
    left_out: tuple[tuple[str, str], ...]
    """Schedules that cannot run here, each with the reason."""
    words: tuple[str, ...]
    """Sources of times and memory, and assumptions."""

    @property
    def usual(self) -> Step | None:
        return self._named("1F1B")

    @property
    def without_pipeline(self) -> Step | None:
        return self._named(NO_PIPELINE)

    @property
    def on_these_degrees(self) -> Step | None:
        """The fastest schedule that fits and uses the pipeline ranks, if there are several. None if nothing does."""
        has_none = self.workload.degrees.pipeline == 1
        wanted = (step for step in self.steps if has_none == (step.timeline is None))
        return next((step for step in wanted if step.fits and step.runs), None)

    def _named(self, name: str) -> Step | None:
        return next((step for step in self.steps if step.schedule == name), None)

    def relative(self, step: Step, to: Step | None) -> float | None:
        """Step time relative to another row: 0.95 is a 5 % shorter step. None if there is no other row."""
        return None if to is None else step.seconds / to.seconds
