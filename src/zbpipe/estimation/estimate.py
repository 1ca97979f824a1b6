"""Estimated steps before launch: each schedule on each placement, plans, 1F1B, and FSDP on the same GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf
from typing import Any

from zbpipe.costs.job import JobCosts
from zbpipe.costs.layers import Split, join_stages, merge_stages
from zbpipe.costs.memory_limit import MemoryLimit, memory_of_1f1b, resolve_limits
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import has_torchs_split, runs_torchs_split
from zbpipe.estimation.choice import choose
from zbpipe.estimation.devices import DEVICES, Device, find
from zbpipe.estimation.fsdp import step_without_pipeline
from zbpipe.estimation.rates import Rates, rates
from zbpipe.estimation.rows import NO_PIPELINE, PLAN, Estimate, Memory, Step
from zbpipe.estimation.workload import Workload
from zbpipe.planner.plan import plan
from zbpipe.planner.request import PLACEMENTS
from zbpipe.schedule.garbage import without_collections
from zbpipe.schedule.ir import OpKind, Placement, Schedule, count_noun, require_whole
from zbpipe.schedule.registry import Algorithm, resolve, schedules
from zbpipe.simulator.memory import peak_parts
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline

_STAGES_PER_RANK = (1, 2, 4)
_PLANNED = ("single", "v", "wave")
"""Placements to plan for: the best for each number of stages per rank."""
_BUDGET = 2e7
"""Budget of one plan's search in timed ops: a fraction of a second."""
_SEARCHED = 1024
"""Limit of ranks times microbatches for including searched schedules, such as ZB, by default."""
_MESSAGES = 6
"""Number of messages per stage of a rank for which a plan leaves room. The table counts the actual ones."""
_LIMITS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0)
"""Memory limits to try, to 1F1B's memory."""
_ROUGHLY = 1.1
"""Share of the room up to which a limit is tried: a job's schedule is made for usual costs, and may take less."""
_FORMS = 2
"""Number of schedules to try them with: those with the shortest steps in their default memory."""
_AS_SHORT = 1.005
"""Length of a step relative to the shortest, from which on more memory is not worth it."""
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_AT_LEAST_STAGES = ("1F1B", "DualPipeV")


@without_collections()
def estimate(
    workload: Workload,
    device: str | Device | None = None,
    *,
    tflops: float | None = None,
    link: float | Sequence[float] | None = None,
    costs: JobCosts | None = None,
    only: Sequence[str] | None = None,
    stages_per_rank: Sequence[int] = _STAGES_PER_RANK,
    plans: bool = True,
    budget: float = _BUDGET,
) -> Estimate:
    """Estimates for each schedule in a job: step time, bubble, tokens/s, MFU, and memory of the worst rank.

    Args:
        workload: workload of the job, on its degrees: by `zbpipe.frameworks.titan.command_line.read_workload` from a
            TorchTitan config, by `zbpipe.estimation.load_layers` from a file.
        device: its name in `zbpipe.estimation.devices`, or a Device. None only with `costs`.
        tflops: sustained 1e12 operations per second, in place of the table's share of the peak.
        link: 1e9 bytes per second between nodes, or (inside, between), in place of the table's values.
        costs: measured costs of stages or layers (`zbpipe measure`), in place of counted ones.
        only: names of schedules. Default: all registered ones.
        stages_per_rank: numbers of stages per rank to try, for schedules that take any number.
        plans: whether to search for plans, one for each number of stages per rank, and for ZB's best memory limit.
        budget: number of ops that the search of one plan may time.

    Raises ValueError for unknown devices and schedules, invalid rates, and costs for another number of ranks.
    """
    if not isinstance(workload, Workload):
        raise TypeError(
            "an estimate takes a zbpipe.estimation.Workload, for example from"
            f" zbpipe.frameworks.titan.command_line.read_workload, got {workload!r}"
        )
    if device is None and costs is None:
        raise ValueError("an estimate needs a device, for example 'H100', or measured costs")
    found = None if device is None else find(device)
    ranks = workload.degrees.pipeline
    if costs is not None:
        if not isinstance(costs, JobCosts):
            raise TypeError(
                f"an estimate cannot have costs = {costs!r}: give zbpipe.costs.JobCosts, as zbpipe.load_costs"
            )
        costs.require_ranks(ranks)
        if isinstance(costs.costs, CostModel) and costs.costs.num_stages % ranks:
            raise ValueError(
                f"the costs are of {costs.costs.num_stages} stages, which {ranks} ranks cannot share equally: measure"
                f" them on {ranks} ranks"
            )
    for name, given in (("only", () if only is None else only), ("stages_per_rank", stages_per_rank)):
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise TypeError(f"an estimate cannot have {name} = {given!r}: give a list")
    stages_per_rank = [require_whole(1, stages_per_rank=each)[0] for each in stages_per_rank]
    job = _Job(workload, None if found is None else rates(found, tflops, link), costs)
    own = resolve(workload.schedule)
    names = None if only is None else {resolve(name).name for name in only}
    wanted = [each for each in schedules().values() if names is None or each.name in names]
    left_out: list[tuple[str, str]] = []
    if names is None and ranks * workload.microbatches > _SEARCHED:
        slow = [each for each in wanted if "memory_limit" in each.keywords and each is not own]
        left_out += [(each.name, "its search takes long at this size: name it with --schedule") for each in slow]
        wanted = [each for each in wanted if each not in slow]

    def kept(name: str, make: Callable[..., Step], *args: Any) -> Iterator[Step]:
        try:
            yield make(*args)
        except ValueError as error:
            left_out.append((name, str(error)))

    steps: list[Step] = []
    for algorithm, stages in _variants(wanted, own, workload, stages_per_rank):
        steps += kept(f"{algorithm.name}, {stages} stages per rank", job.named, algorithm, stages)
    if plans and ranks > 1:
        steps += job.in_other_memory(steps)
        for name in _PLANNED:
            steps += kept(f"plan, {name}", job.planned, name, budget)
    if job.rates is not None:
        steps += kept(NO_PIPELINE, job.without_pipeline)
    steps.sort(key=lambda step: (not step.runs, not step.fits, step.seconds, step.has_torchs_split))
    device = None if job.rates is None else job.rates.device
    return Estimate(workload, device, tuple(steps), tuple(left_out), tuple(job.words(tflops, link)))


def _variants(
    wanted: Sequence[Algorithm], own: Algorithm, workload: Workload, numbers: Sequence[int]
) -> Iterator[tuple[Algorithm, int]]:
    """Each schedule with its numbers of stages per rank, also the job's own if it is a file."""
    if workload.degrees.pipeline < 2:
        return
    for algorithm in wanted:
        usual = algorithm.stages_per_rank
        for stages in sorted(set(numbers)) if algorithm.any_stages_per_rank else (usual,):
            if stages >= usual or usual > max(numbers):
                yield algorithm, stages
    if own.table is not None:
        yield own, own.stages_per_rank


def require_torch_runs(algorithm: Algorithm, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Refuse what the class of torch refuses that runs this schedule, with a ValueError."""
    if algorithm.source != "torch":
        return
    rounds, stages = max(1, microbatches // ranks), ranks * stages_per_rank
    words = f"torch refuses {count_noun(microbatches, 'microbatch')}"
    if algorithm.name in _IN_ROUNDS and microbatches % rounds:
        raise ValueError(f"{words} on {ranks} ranks, no multiple of {rounds} rounds: use a schedule of zbpipe")
    if algorithm.name in _AT_LEAST_STAGES and microbatches < stages:
        raise ValueError(f"{words} for {stages} stages: use a schedule of zbpipe")


@dataclass(frozen=True)
class _Job:
    workload: Workload
    rates: Rates | None
    measured: JobCosts | None

    def named(self, algorithm: Algorithm, stages: int, limit: MemoryLimit | None = None) -> Step:
        degrees, microbatches = self.workload.degrees, self.workload.microbatches
        placement = algorithm.place(degrees.pipeline, stages)
        split = self.workload.split(placement, algorithm)
        costs = self.costs(placement, split)
        made_for: CostModel | None = costs
        if self.measured is None and not (algorithm.by_checkpointing and self.workload.checkpointing is None):
            made_for = self.workload.usual_costs(algorithm, placement)
        require_torch_runs(algorithm, degrees.pipeline, stages, microbatches)
        size = degrees.pipeline, microbatches
        schedule = algorithm.make(*size, stages_per_rank=stages, costs=made_for, memory_limit=limit)
        wave = "v" if stages == 2 else "wave"
        known = {"loop": Placement.loop(degrees.pipeline, stages), wave: Placement.wave(degrees.pipeline, stages)}
        kind = next((name for name, each in known.items() if each == placement), "table")
        found = self.step(schedule, costs, split, algorithm.name, "single" if stages == 1 else kind, algorithm.source)
        return found if limit is None else replace(found, memory_limit=limit.written)

    def in_other_memory(self, steps: Sequence[Step]) -> Iterator[Step]:
        """ZB or ZBLoop with the least memory limit whose step is as short as with all of the device's memory.

        None if that gains nothing.
        """
        usual = sorted((step for step in steps if resolve(step.schedule).chooses_stages), key=lambda each: each.seconds)
        found: list[Step] = []
        for form in usual[:_FORMS] if self.rates else ():
            found += islice((each for each in self._within(form, reversed(_LIMITS)) if each.fits), 1)
        if found:
            best = min(found, key=lambda each: each.seconds)
            least = next(
                each for each in self._within(best, _LIMITS) if each.fits and each.seconds <= best.seconds * _AS_SHORT
            )
            if all(least.seconds * _AS_SHORT < each.seconds for each in usual if each.fits):
                yield least

    def _within(self, form: Step, multiples: Iterable[float]) -> Iterator[Step]:
        """A row's schedule in these multiples of 1F1B's memory, if the device may have as much."""
        algorithm, workload = resolve(form.schedule), self.workload
        placement = algorithm.place(workload.degrees.pipeline, form.stages_per_rank)
        split = workload.split(placement, algorithm)
        with suppress(ValueError):  # the weights alone are too large
            room = min(self._room(placement, split) or (inf,))
            once = memory_of_1f1b(self.costs(placement, split), placement.num_ranks, workload.microbatches)
            for multiple in multiples:
                if multiple * once <= room * _ROUGHLY:
                    with suppress(ValueError):  # too low a limit
                        yield self.named(algorithm, form.stages_per_rank, MemoryLimit(multiple, "x", f"{multiple:g}x"))

    def planned(self, name: str, budget: float) -> Step:
        """The best plan found that leaves room for the weights."""
        placement = PLACEMENTS[name](self.workload.degrees.pipeline)
        split = self.workload.split(placement)
        costs = self.costs(placement, split)
        room = self._room(placement, split)
        planned = self._with_fsdp(costs, split)
        size = (placement.num_ranks, self.workload.microbatches)
        found = plan(*size, planned, room, placements=[placement], budget=budget)
        return self.step(found.schedule, costs, split, PLAN, name, "zbpipe")

    def step(self, schedule: Schedule, costs: CostModel, split: Split, name: str, placement: str, source: str) -> Step:
        overlaps = self.workload.overlaps_fsdp or source != "torch"
        timeline = simulate(schedule, self._with_fsdp(costs, split), overlaps_fsdp=overlaps)
        seconds = self._seconds(timeline, split)
        worst = max(memories_by_rank(self.workload, timeline, split), key=lambda memory: memory.total)
        stages = len(schedule.placement.stages_on(0))
        torchs = has_torchs_split(schedule, source)
        runs = not torchs or runs_torchs_split(self.workload.checkpointing, self.workload.compiled)
        about = {"source": source, "timeline": timeline, "has_torchs_split": torchs, "runs": runs}
        others = (self._with_fsdp(job.costs(schedule.placement, split), split) for job in self._extremes)
        ends = tuple(self._seconds(simulate(schedule, each, overlaps_fsdp=overlaps), split) for each in others)
        return self._row(name, placement, stages, seconds, timeline.bubble, worst, ends, **about)

    # A row has as many figures.
    def _row(
        self,
        name: str,
        placement: str,
        stages: int,
        seconds: float,
        bubble: float,
        memory: Memory,
        ends: tuple[float, ...],
        **about: Any,
    ) -> Step:
        if not seconds:
            raise ValueError("its step takes 0 seconds: give times above 0")
        speed = self.workload.global_tokens / seconds / self.workload.degrees.gpus
        device = None if self.rates is None else self.rates.device
        mfu = speed * self.workload.operations / device.peak if device else None
        fits = device is None or memory.total <= device.usable_bytes
        about["range"] = (ends[0], ends[1]) if len(ends) == 2 else None
        return Step(name, placement, stages, seconds, max(bubble, 0.0), speed, mfu, memory, fits, **about)

    @cached_property
    def _layers(self) -> CostModel:
        assert self.rates is not None
        return self.rates.layer_costs(self.workload)

    def costs(self, placement: Placement, split: Split) -> CostModel:
        """Costs of the stages, measured or counted."""
        if self.measured is None:
            assert self.rates is not None, "checked when the estimate began"
            return self.rates.costs(self.workload, self._layers, placement, split)
        known = self.measured.costs
        if isinstance(known, CostModel) and known.num_stages % placement.num_stages == 0:
            return merge_stages(known, placement.num_stages)
        return self.measured.on(placement)

    def _room(self, placement: Placement, split: Split) -> tuple[float, ...] | None:
        """Memory of each rank after weights and some messages. None if no device sets a limit."""
        if self.rates is None:
            return None
        workload = self.workload
        usable = self.rates.device.usable_bytes
        messages = _MESSAGES * workload.message_bytes * len(placement.stages_on(0))
        each = workload.parameter_bytes.total(workload.degrees.shards) / workload.degrees.tensor
        room = tuple(usable - count * each - messages for count in workload.parameters_by_rank(placement, split))
        if min(room) <= 0:
            raise ValueError(f"weights and optimizer of a rank take more than the usable {usable / 2**30:.0f} GiB")
        return room

    def _with_fsdp(self, costs: CostModel, split: Split) -> CostModel:
        """The costs with the seconds in which FSDP gathers each stage's parameters, and reduces its gradients."""
        workload, degrees = self.workload, self.workload.degrees
        if self.rates is None or degrees.shards * degrees.replicas == 1 or costs.gather or costs.reduce:
            return costs
        each, device = workload.parameter_bytes, self.rates.device
        group, apart = degrees.shards, degrees.tensor
        own = [count / degrees.tensor for count in workload.parameters_by_stage(split)]
        return replace(
            costs,
            gather=tuple(device.collective(each.gathered * count, group, apart) for count in own),
            reduce=tuple(
                device.collective(each.summed * count, group, apart)
                + 2 * device.collective(each.summed * count / group, degrees.replicas, apart * group)
                for count in own
            ),
        )

    def _seconds(self, timeline: Timeline, split: Split) -> float:
        """A step with all that is not in its schedule."""
        workload = self.workload
        if self.rates is None:
            return timeline.makespan
        most = max(workload.parameters_by_rank(timeline.schedule.placement, split))
        own = most / workload.degrees.tensor / workload.degrees.shards
        return self.rates.with_overheads(timeline.makespan, workload, own)

    def without_pipeline(self) -> Step:
        """A step with the same tokens and GPUs, with FSDP over all of them and no pipeline."""
        assert self.rates is not None
        seconds, exposed, memory = step_without_pipeline(self.workload, self.rates)
        others = (job.rates for job in self._extremes)
        ends = tuple(step_without_pipeline(self.workload, each).seconds for each in others if each is not None)
        return self._row(NO_PIPELINE, "", 1, seconds, exposed / (seconds or 1.0), memory, ends)

    @cached_property
    def _extremes(self) -> tuple[_Job, ...]:
        """The job with the largest and the least plausible speed. None of them with a given rate or measured times."""
        if self.measured is not None or self.rates is None or self.rates.extremes is None:
            return ()
        speeds = reversed(self.rates.extremes)
        return tuple(replace(self, rates=replace(self.rates, speed=speed, extremes=None)) for speed in speeds)

    def words(self, tflops: float | None, link: Any) -> Iterator[str]:
        if self.measured is not None:
            yield "times and activations: measured, from the cost file"
        else:
            yield f"operations and bytes: {self.workload.words}"
        if self.rates is not None:
            device = self.rates.device
            where = "given" if tflops is not None else device.share_from
            if self.measured is None:
                each = ((device.products, "products"), (device.attention, "attention"))
                reached = ", ".join(f"{name} {share * device.peak / 1e12:.0f} TFLOP/s" for share, name in each)
                ends = self.rates.extremes
                how = f"; {ends[0]:.0%} to {ends[1]:.0%} of these are plausible" if ends else ""
                yield (
                    f"speed: {device.name} sustains in {reached}, of a peak of {device.peak / 1e12:.0f}, and"
                    f" {device.memory / 1e12:.1f} TB/s in its memory ({where}{how})"
                )
            yield (
                f"links: {device.inside / 1e9:.0f} GB/s within a node, {device.between / 1e9:.0f} between"
                f" ({'given' if link is not None else device.source})"
            )
        yield (
            "messages: an ideal transport, in which none waits in a queue or delays computations; for others see zbpipe"
            " compare --transport shared-with-compute"
        )
        yield (
            "FSDP: a pipeline gathers a stage beside its first F and reduces it beside its last W or B, with torch's"
            " schedules before and after these; without a pipeline, a layer's communication overlaps another's"
            " computation, and the longer of both counts"
        )


def memories_by_rank(workload: Workload, timeline: Timeline, split: Split) -> Iterator[Memory]:
    """Peak memory of each GPU, by rank."""
    placement = timeline.schedule.placement
    shards, each = workload.degrees.shards, workload.parameter_bytes
    counts = workload.parameters_by_rank(placement, split)
    for count, held in zip(counts, peak_parts(timeline), strict=True):
        own = count / workload.degrees.tensor
        is_head = held.op is not None and held.op[:2] == (placement.num_stages - 1, OpKind.F)
        yield Memory(
            own * each.weights(shards),
            own * each.optimizer(shards),
            held.activations,
            held.waiting,
            held.messages,
            working=0.0 if is_head else held.working,
            logits=held.working if is_head else 0.0,
        )


@dataclass(frozen=True)
class JobMemory:
    """Memory of a job's GPUs, by pipeline rank."""

    parameters: tuple[float, ...]
    """Number of parameters in each rank's stages, over all GPUs that share them."""
    memories: tuple[Memory, ...]
    unit: float
    """Bytes that F keeps of one microbatch in an average rank's layers: a memory limit of 1 microbatch."""

    @property
    def worst(self) -> float:
        return max(memory.total for memory in self.memories)

    @property
    def fits(self) -> list[str]:
        """Devices of the table that are large enough."""
        return [name for name, device in DEVICES.items() if self.worst <= device.usable_bytes]


def choose_own(workload: Workload, limit: MemoryLimit | None, *, on_cpu: bool = False) -> tuple[Algorithm, Placement]:
    """The job's own schedule, and the placement that it chooses. Overhead of ops does not count `on_cpu`."""
    degrees, how = workload.degrees, workload.checkpointing
    algorithm = resolve(workload.schedule)
    if how is None:
        return algorithm, algorithm.place(degrees.pipeline)
    stages, rest = divmod(workload.num_stages or 0, degrees.pipeline)
    if rest:
        raise ValueError(
            f"{degrees.pipeline} ranks cannot share the job's {workload.num_stages} stages equally: change the number"
            " of layers per stage"
        )
    chosen = choose(
        algorithm,
        degrees.pipeline,
        workload.microbatches,
        workload,
        how,
        tensor=degrees.tensor,
        tokens=0.0 if on_cpu else workload.tokens / degrees.sharing,
        stages_per_rank=(stages if algorithm.any_stages_per_rank else 0) or None,
        memory_limit=limit,
    )
    return chosen.algorithm, chosen.placement


def memory_by_rank(workload: Workload, limit: MemoryLimit | None = None) -> JobMemory:
    """Memory of each rank with the job's own schedule. With `Auto` a plan may use all of the limit.

    `USABLE` leaves room for buffers of the communication library, copies of FSDP, and fragmentation.
    """
    algorithm, placement = choose_own(workload, limit)
    split = workload.split(placement, algorithm)
    costs = join_stages(workload.layer_costs(lambda layer: (1.0, 1.0, 1.0)), split)  # times make no difference
    made_for = workload.usual_costs(algorithm, placement)
    microbatches = workload.microbatches
    schedule = algorithm.make_on(placement, microbatches, costs=made_for, memory_limit=limit)
    assert schedule is not None, "the placement is one of the schedule"
    timeline = simulate(schedule, costs)
    memories = tuple(memories_by_rank(workload, timeline, split))
    if algorithm.name == "Auto":
        needed = resolve_limits(limit, placement, costs, microbatches)
        if limit is None:  # a plan may take what ZB takes
            zb = resolve("ZB")
            made = zb.make_on(placement, microbatches, costs=workload.usual_costs(zb, placement))
            assert made is not None, "Auto has ZB's placements"
            needed = tuple(map(max, needed, simulate(made, costs).peak_memory))
        # The excess of a plan counts as activations.
        empty = (replace(each, waiting=0.0, buffers=0.0, working=0.0, logits=0.0) for each in memories)
        planned = [replace(each, activations=room) for each, room in zip(empty, needed, strict=True)]
        memories = tuple(max(both, key=lambda each: each.total) for both in zip(memories, planned, strict=True))
    parameters = workload.parameters_by_rank(placement, split)
    return JobMemory(parameters, memories, sum(costs.activations) / placement.num_ranks)
