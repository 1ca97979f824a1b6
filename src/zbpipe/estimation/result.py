"""What an estimate says: a row for each schedule, and where the figures come from."""

from __future__ import annotations

from dataclasses import dataclass, field

from zbpipe.estimation.devices import Device
from zbpipe.estimation.workload import Workload
from zbpipe.simulator.timeline import Timeline

NO_PIPELINE = "no pipeline (FSDP)"
PLAN = "plan"


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU of the worst rank, at its worst moment."""

    weights: float
    """Shards, and the copies that products use."""
    optimizer: float
    """Gradients and the optimizer's moments."""
    activations: float
    """What F has left for I."""
    waiting: float
    """Deferred gradients (x and dY of each linear layer)."""
    buffers: float
    """Messages that are under way."""
    working: float
    """What the op that runs needs only while it runs."""
    logits: float
    """The same, where it is F of the stage with the head."""

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
    """Of a step, with the gathering and reducing of FSDP that nothing hides."""
    bubble: float
    """The share of a step that the average rank idles, or that communication takes without a pipeline."""
    tokens_per_second: float
    """For each GPU."""
    mfu: float | None
    """By the operations of the model, without recomputation; None where the peak is not known."""
    memory: Memory
    fits: bool
    source: str = ""
    """Whose class runs it: "torch" or "zbpipe"."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    has_torchs_split: bool = False
    runs: bool = True
    """Whether it can run with the job's checkpointing and torch.compile, as fast as is simulated."""


@dataclass(frozen=True)
class Estimate:
    """What `zbpipe.estimate` found."""

    workload: Workload
    device: Device | None
    steps: tuple[Step, ...]
    """The fastest first; then what does not fit, and last what cannot run."""
    left_out: tuple[tuple[str, str], ...]
    """Schedules that cannot run here, each with the reason."""
    words: tuple[str, ...]
    """Where times and memory come from, and what is assumed."""

    @property
    def usual(self) -> Step | None:
        """1F1B."""
        return self._named("1F1B")

    @property
    def without_pipeline(self) -> Step | None:
        return self._named(NO_PIPELINE)

    @property
    def best(self) -> Step | None:
        """The fastest that fits and can run."""
        return next((step for step in self.steps if step.fits and step.runs), None)

    @property
    def on_these_degrees(self) -> Step | None:
        """The fastest that fits and uses the pipeline ranks, if there are several; None if nothing does."""
        alone = self.workload.degrees.pipeline == 1
        wanted = (step for step in self.steps if alone == (step.timeline is None))
        return next((step for step in wanted if step.fits and step.runs), None)

    def _named(self, name: str) -> Step | None:
        return next((step for step in self.steps if step.schedule == name), None)

    def gain(self, step: Step, over: Step | None) -> float | None:
        """How many more tokens per second than another row: 0.05 is 5 %. None where there is none."""
        return None if over is None else over.seconds / step.seconds - 1
