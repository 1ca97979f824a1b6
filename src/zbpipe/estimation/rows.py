"""Result of an estimate: a row for each schedule, and the sources of its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation.devices import DEVICES, GIB, Device
from zbpipe.estimation.workload import Degrees, Workload
from zbpipe.schedule.registry import Algorithm
from zbpipe.simulator.simulation import gain_of_fills
from zbpipe.simulator.timeline import Timeline

DECIDED = 0.1
"""An estimate decides for a pipeline if it beats FSDP by this. Published steps of Llama 70B on 64 H100 with FSDP differ
by 35 % between frameworks."""
HARDLY = 0.05
"""Least gain of a pipeline over FSDP, which is simpler: the estimate's mean error."""
WORTH = 0.02
"""Least gain, as a share of a step, for a change, and for a plan instead of ZB, which runs in any job."""
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
class JobMemory:
    """Memory of a job's GPUs, by pipeline rank."""

    parameters: tuple[float, ...]
    """Number of parameters in each rank's stages, over all GPUs that share them."""
    memories: tuple[Memory, ...]
    unit: float
    """Bytes of one microbatch that F keeps in an average rank's layers: the unit of a limit in microbatches."""

    @property
    def worst(self) -> float:
        return max(memory.total for memory in self.memories)

    @property
    def fits(self) -> list[str]:
        return [name for name, device in DEVICES.items() if self.worst <= device.usable_bytes]


@dataclass(frozen=True)
class Step:
    """A row of the table. Times are in seconds."""

    schedule: str
    placement: str
    """"loop", "v", a plan's own name, or "" without a pipeline."""
    stages_per_rank: int
    seconds: float
    """Seconds of a step, with the exposed communication of FSDP."""
    bubble: float
    """Idle share of the average rank's step; without a pipeline, the share of exposed communication."""
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
    """Seconds at the largest and the least plausible speed of the device. None if the rate is given or measured."""
    has_torchs_split: bool = False
    memory_limit: str | None = None
    """The job's memory limit. None is the default."""
    algorithm: Algorithm | None = field(default=None, repr=False, compare=False)
    is_own: bool = False
    """Whether the job names this schedule."""
    is_typed: bool = False
    """Whether the answer compares it: a job can name it without a file."""
    batch: tuple[int, int, int] | None = None
    """Without a pipeline: sequences of a GPU at a time, of the whole job, and of a GPU in the step."""
    degrees: Degrees | None = None
    checkpointing: Checkpointing | None = None
    """Layout and checkpointing of the row, where these are not the workload's."""
    runs: bool = True
    """Whether it runs with the job's checkpointing and torch.compile, as fast as simulated."""

    @property
    def name(self) -> str:
        """The schedule, with its memory limit if it needs one."""
        return f"{self.schedule} in {self.memory_limit}" if self.memory_limit else self.schedule

    @property
    def is_written(self) -> bool:
        """Whether a job needs a file for it: it is a plan, or has another number of stages than the job would have."""
        return not self.algorithm or (self.algorithm.any_stages_per_rank and not self.is_typed)

    @property
    def order(self) -> tuple[bool, bool, float, bool]:
        """The fastest first, then those that do not fit, then those that cannot run."""
        return not self.runs, not self.fits, self.seconds, self.has_torchs_split

    def compare(self, other: Step) -> str:
        """Its step relative to another one, for example "2.0% shorter"."""
        change = self.seconds / other.seconds - 1
        return f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'}"

    def relative_range(self, to: Step) -> tuple[float, float]:
        """Least and largest step time relative to another row, over the plausible rates."""
        ends = zip(self.range, to.range, strict=True) if self.range and to.range else ()
        found = [one / other for one, other in ((self.seconds, to.seconds), *ends)]
        return min(found), max(found)


@dataclass(frozen=True)
class Advice:
    verb: str
    """"keep", "change to" or "drop the pipeline"."""
    step: Step
    sentence: str
    option: str
    """Options to add to the job's command. Empty if nothing changes."""
    waits: str
    """A sentence on what W's products in waits for collectives gain. Empty if little, or if they already run there."""
    checkpointing: str
    """A sentence on a lighter checkpointing that gains more than the schedule. Empty if none does."""


def answer(pipeline: Step, fsdp: Step) -> Answer:
    """Whether a pipeline pays at all plausible speeds, from its step and the one without."""
    _, most = pipeline.relative_range(fsdp)
    if most <= 1 - DECIDED:
        return Answer.YES
    return Answer.NO if pipeline.seconds > (1 - HARDLY) * fsdp.seconds else Answer.UNDECIDED


@dataclass(frozen=True)
class Estimate:
    """Result of `zbpipe.estimate`."""

    workload: Workload
    device: Device | None
    """The device, with the user's rates and transport."""
    steps: tuple[Step, ...]
    """Rows: the fastest first, then those that do not fit, then those that cannot run."""
    left_out: tuple[tuple[str, str], ...]
    """Schedules that cannot run here, each with the reason."""
    words: tuple[str, ...]
    """Sources of times and memory, and assumptions."""
    lighter: tuple[Step, ...] = ()
    """Rows that fit with lighter checkpointing, the shortest first."""
    job: Workload | None = None
    """In a search: the user's job, of which the workload is a layout."""
    fsdp_found: Step | None = None
    """In a search: the best layout without a pipeline."""

    @property
    def own(self) -> Step | None:
        return next((step for step in self.steps if step.is_own), None)

    @property
    def _fitting(self) -> list[Step]:
        """The rows with a pipeline that the answer compares, shortest first."""
        rows = [step for step in self.steps if step.timeline]
        typed = [step for step in rows if step.is_typed]
        return [step for step in typed or rows if step.fits and step.runs]

    @property
    def best(self) -> Step | None:
        """The row to take: the job's own, unless a simple one saves `WORTH`; else ZB, unless another saves that."""
        fitting, own = self._fitting, self.own
        simplest = sorted(fitting, key=lambda each: (each.schedule != "ZB", each.schedule == PLAN, each.name))
        best = next((each for each in simplest if (1 - WORTH) * each.seconds <= fitting[0].seconds), None)
        return own if best and own in fitting and best.seconds > (1 - WORTH) * own.seconds else best

    @property
    def advice(self) -> Advice | None:
        """The answer: keep the schedule, change it, or drop the pipeline. None without a pipeline or a fitting row."""
        own, best, fsdp = self.own, self.best, self.without_pipeline
        fsdp = fsdp if fsdp and fsdp.fits and self.workload.degrees.pipeline > 1 else None
        if fsdp and (best is None or answer(best, fsdp) is Answer.NO):
            lighter = self.lighter[0] if self.lighter else fsdp
            rival = min((fsdp, *(each for each in self.lighter if not each.timeline)), key=lambda each: each.seconds)
            if lighter.timeline and answer(lighter, rival) is not Answer.NO:
                how = rival.checkpointing or self.workload.checkpointing or Checkpointing.FULL
                words = f"; FSDP without a pipeline: {rival.seconds:.4g} s at best, {how.words}"
                return self._advise("change to", lighter, words)
            words = f"; {best.name}, the best schedule that fits, is {best.compare(fsdp)}" if best else ""
            words += f", less than the estimates' error ({HARDLY:.0%})" if best and best.seconds < fsdp.seconds else ""
            return self._advise("drop the pipeline", fsdp, words)
        if best is None:
            return None
        shortest = self._fitting[0]
        words = f"; the shortest that fits, {shortest.name}, is {shortest.compare(best)}" if best is own else ""
        if best is shortest:
            words = "; nothing that fits is shorter" if best is own else ""
        if fsdp and answer(best, fsdp) is Answer.UNDECIDED:
            words = f"; try FSDP without a pipeline, too: this is {best.compare(fsdp)}, and frameworks differ by more"
        return self._advise("keep" if best is own else "change to", best, words)

    def _advise(self, verb: str, step: Step, more: str) -> Advice:
        own, work, how = self.own, self.workload, step.checkpointing
        words = f"{verb} {step.name}" if step.timeline else verb
        words += f" {how.words}" if how else ""
        words = f"{words[0].upper()}{words[1:]}: {step.seconds:.4g} s per step"
        if own and own is not step:
            words += f", {step.compare(own)} than {own.name}{self._alone(own, how)}"
            words += ", which cannot run" if not own.runs else "" if own.fits else ", which does not fit"
        room = f" of {self.device.usable_bytes / GIB:.1f}" if self.device else ""
        words += f", {step.memory.total / GIB:.1f}{room} GiB on the worst rank"
        tip, lighter = "", next((each for each in self.lighter if step.timeline or not each.timeline), step)
        if (how := lighter.checkpointing) and lighter.seconds < (1 - WORTH) * step.seconds:
            now, is_same = own or step, (lighter.name, lighter.batch) == (step.name, step.batch)
            line = work.options.checkpointing.format(how) if is_same else self.spell(lighter)
            line = f"{'Add at the end' if is_same else 'Type instead'}: {line}"
            tip = (
                f"{how.words.capitalize()} the job gains more: {lighter.seconds:.4g} s with {lighter.name},"
                f" {lighter.compare(now)} than {now.name} now{self._alone(now, how)},"
                f" {lighter.memory.total / GIB:.1f}{room} GiB. {line}"
            )
        option = "" if step is own and not self.job else self.spell(step)
        waits = self._fill_waits(step if step.timeline else self.best)
        return Advice(verb, step, f"{words}{more}.", option, waits, tip)

    def _fill_waits(self, step: Step | None) -> str:
        if step is None or step.timeline is None or step.source == "torch" or self.workload.compiled:
            return ""
        gain, option = gain_of_fills(step.timeline), self.workload.options.fill_waits.format("own")
        words = f"{step.name} with {option} is {gain:.1%} shorter in the simulator: it computes products of W while a"
        words += " rank waits for collectives. No GPU has tried that: expect half (docs/the-split.md)."
        return words if gain >= WORTH else ""

    def spell(self, step: Step) -> str:
        """Options to add to the job's command for this row. Those that it has are omitted."""
        work, has_pipeline = self.workload, step.timeline is not None
        job = self.job or work
        limit = step.memory_limit if work.memory_limit is None else None
        name = f"{step.schedule}.csv" if step.is_written else step.schedule
        degrees = step.degrees or (work.degrees if has_pipeline else work.degrees.without_pipeline)
        batch = step.batch or (None if degrees.data == job.degrees.data else work.batch)  # for as many tokens per step
        how, options = step.checkpointing or work.checkpointing, job.options
        words = [options.schedule.format(name)] if has_pipeline else []
        pairs = ((text, getattr(job.degrees, each), getattr(degrees, each)) for each, text in options.degrees)
        words += [text.format(then) for text, now, then in pairs if now != then]
        words += [options.batch.format(*batch)] if batch and options.batch else []
        words += [options.memory_limit.format(limit)] if limit else []
        words += [options.checkpointing.format(how)] if how not in (None, job.checkpointing) else []
        return " ".join(words)

    def _alone(self, own: Step, how: Checkpointing | None) -> str:
        """The share of the gain that needs no other schedule."""
        found = (each for each in self.lighter[1:] if (each.name, each.checkpointing) == (own.name, how))
        return next((f" ({each.compare(own)} by the checkpointing alone)" for each in found), "")

    @property
    def without_pipeline(self) -> Step | None:
        """FSDP, to which rows are compared: in a search, on its best layout."""
        return self.fsdp_found or self.named(NO_PIPELINE)

    @property
    def on_these_degrees(self) -> Step | None:
        """The row to take on the job's pipeline ranks. None if none fits."""
        if self.workload.degrees.pipeline == 1:
            fsdp = self.named(NO_PIPELINE)
            return fsdp if fsdp and fsdp.fits else None
        fitting, best = [step for step in self.steps if step.timeline and step.fits and step.runs], self.best
        if best and best.is_typed and (1 - WORTH) * best.seconds <= fitting[0].seconds:
            return best
        return next(iter(fitting), None)

    def named(self, name: str) -> Step | None:
        return next((step for step in self.steps if step.schedule == name), None)

    def relative(self, step: Step, to: Step | None) -> float | None:
        """Step time relative to another row: 0.95 is a 5 % shorter step. None without another row."""
        return None if to is None else step.seconds / to.seconds
