"""Estimated steps before launch: each schedule on each placement, plans, 1F1B, and FSDP on the same GPUs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf
from operator import attrgetter
from statistics import fmean
from typing import Any

from zbpipe.costs.job import JobCosts, MemoryLimit, memory_of_1f1b
from zbpipe.costs.layers import Split, join_stages, merge_stages
from zbpipe.costs.model import CommonCosts, CostModel, Transport
from zbpipe.costs.numbers import Size
from zbpipe.costs.transformer import Checkpointing, has_torchs_split, runs_torchs_split
from zbpipe.estimation.cut import WorkloadCut, choose
from zbpipe.estimation.devices import Device, find
from zbpipe.estimation.fsdp import memory_without_pipeline, step_without_pipeline
from zbpipe.estimation.rates import HOST, Rates, rates
from zbpipe.estimation.rows import NO_PIPELINE, PLAN, WORTH, Estimate, JobMemory, Memory, Step
from zbpipe.estimation.workload import Held, Workload
from zbpipe.planner.engine import fastest
from zbpipe.planner.plan import plan
from zbpipe.planner.request import PLACEMENTS
from zbpipe.schedule.garbage import without_collections
from zbpipe.schedule.ir import OpKind, Placement, Schedule, count_noun, require_whole
from zbpipe.schedule.registry import Algorithm, resolve, schedules, stages_for
from zbpipe.simulator.memory import peak_parts
from zbpipe.simulator.simulation import how_runs, simulate
from zbpipe.simulator.timeline import Timeline

_STAGES_PER_RANK = (1, 2, 4)
_PLANNED = ("single", "v", "wave")
"""Placements of plans: the best for each number of stages per rank."""
_BUDGET = 5e6
"""Budget of one plan's search in timed ops: a fraction of a second."""
_SEARCHED = 1024
"""Limit of ranks times microbatches for searched schedules, such as ZB, in the default rows."""
_MESSAGES = 6
"""Number of messages per stage for which a plan leaves room. The table counts the actual ones."""
_LIMITS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0)
"""Memory limits to try, relative to 1F1B's memory."""
_ROUGHLY = 1.1
"""Largest limit to try, as a share of the room. A job's schedule uses default costs, and may take less."""
_AS_SHORT = 1.005
"""A step within this factor of the shortest is not worth more memory."""
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
    transport: Transport | str | None = None,
    only: Sequence[str] | None = None,
    stages_per_rank: Sequence[int] = _STAGES_PER_RANK,
    plans: bool = True,
    budget: float = _BUDGET,
    sizes: Sequence[Any] = (),
) -> Estimate:
    """Estimates for each schedule in a job: step time, bubble, tokens/s, MFU, and memory of the worst rank.

    The result's `advice` is the answer in one sentence.

    Args:
        workload: workload of the job, on its degrees: by `zbpipe.frameworks.titan.command_line.read_workload` from a
            TorchTitan config, by `zbpipe.estimation.load_layers` from a file.
        device: its name in `zbpipe.estimation.devices`, or a Device. None requires `costs`.
        tflops: sustained 1e12 operations per second, in place of the table's share of the peak.
        link: 1e9 bytes per second between nodes, or (inside, between), in place of the table's values.
        costs: measured costs of stages or layers (`zbpipe measure`), in place of counted ones.
        transport: which messages wait for each other, as in `zbpipe.simulate`. Default: that of the costs or device.
        only: names of schedules. Default: all registered ones.
        stages_per_rank: numbers of stages per rank to try, for schedules that take any number.
        plans: whether to add the rows of the answer: the job's schedule, ZB, 1F1B and Interleaved1F1B, ZB with its best
            memory limit, and a plan. With schedules to compare, there is a plan for each number of stages per rank.
        budget: number of ops that the search of one plan may time.
        sizes: size of each microbatch, see `CostModel.sizes`. Memory is that of the largest. Default: all are alike.

    Raises ValueError for unknown devices, schedules and transports, invalid rates, and costs for another number of
    ranks.
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
        _require_costs(costs, ranks)
    for name, given in (("only", () if only is None else only), ("stages_per_rank", stages_per_rank)):
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise TypeError(f"an estimate cannot have {name} = {given!r}: give a list")
    stages_per_rank = [require_whole(1, stages_per_rank=each)[0] for each in stages_per_rank]
    known = transport or (costs and costs.transport) or (found and found.transport) or Transport.IDEAL
    speeds = None if found is None else rates(found, tflops, link)
    length = workload.tokens / workload.microbatch_size
    read = tuple(Size.parse("an estimate", each, length) for each in sizes)
    CommonCosts(sizes=read).require_microbatches(workload.microbatches)
    job = _Job(workload, speeds, costs, Transport.parse(known), WorkloadCut(workload), read)
    own = resolve(workload.schedule)
    names = None if only is None else {resolve(name).name for name in only}
    wanted = [each for each in schedules().values() if names is None or each.name in names]
    rows = _Rows(job)
    if names is None and ranks * workload.microbatches > _SEARCHED:
        slow = [each for each in wanted if "memory_limit" in each.keywords and each is not own]
        rows.left_out += [(each.name, "its search takes long at this size: name it with --schedule") for each in slow]
        wanted = [each for each in wanted if each not in slow]
    if ranks > 1:
        if plans:
            rows.add_answer(budget)
        elif own in wanted or own.table is not None:
            rows.add(own.name, job.typed, own.name, is_own=True)
        rows.add_all(wanted, stages_per_rank)
        for name in _PLANNED if plans and wanted else ():
            if not rows.has(PLAN, placement := PLACEMENTS[name](ranks)):
                rows.add(f"plan, {name}", job.planned, name, placement, budget)
    if job.rates is not None:
        rows.add(NO_PIPELINE, job.without_pipeline, is_typed=True)
    steps = sorted(rows.steps, key=attrgetter("order"))
    device = None if job.rates is None else replace(job.rates.device, transport=job.transport)
    told = replace(workload, tokens=round(fmean(each.tokens for each in read))) if read else workload
    words = tuple(job.words(tflops, link))
    return Estimate(told, device, tuple(steps), tuple(rows.left_out), words, tuple(rows.lighter))


def job_costs(
    workload: Workload, device: str | Device, **given: Any
) -> tuple[Callable[[Placement], CostModel], Algorithm, Placement, tuple[float, ...] | None]:
    """Counted costs of a job's stages with FSDP, on any placement, in seconds and bytes; what ZB runs there; and the
    memory of each rank that weights, optimizer and messages leave. `given`: see `rates`."""
    job = _Job(workload, rates(find(device), **given), None, find(device).transport, WorkloadCut(workload))

    def costs(placement: Placement) -> CostModel:
        split = job.cut.split(placement)
        return job.with_fsdp(job.costs(placement, split), split)

    zb, placement = choose_own(replace(workload, schedule="ZB"), job.cut)
    return costs, zb, placement, job._room(placement, job.cut.split(placement))


def _require_costs(costs: JobCosts, ranks: int) -> None:
    if not isinstance(costs, JobCosts):
        raise TypeError(f"an estimate cannot have costs = {costs!r}: give zbpipe.costs.JobCosts, as zbpipe.load_costs")
    costs.require_ranks(ranks)
    if isinstance(costs.costs, CostModel) and costs.costs.num_stages % ranks:
        raise ValueError(
            f"the costs are of {costs.costs.num_stages} stages, which {ranks} ranks cannot share equally: measure"
            f" them on {ranks} ranks"
        )


@dataclass
class _Rows:
    job: _Job
    steps: list[Step] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    lighter: list[Step] = field(default_factory=list)

    def add(self, name: str, make: Callable[..., Step], *args: Any, **about: Any) -> Step | None:
        try:
            self.steps.append(replace(make(*args), **about))
        except ValueError as error:
            self.left_out.append((name, str(error)))
            return None
        return self.steps[-1]

    def has(self, name: str, placement: Placement) -> bool:
        return any(
            step.schedule == name and step.timeline is not None and step.timeline.schedule.placement == placement
            for step in self.steps
        )

    def add_answer(self, budget: float) -> None:
        """The rows that a job can type and that are compared first."""
        job, workload = self.job, self.job.workload
        fastest()  # the plan needs machine code, which also speeds up the searches before it
        own = self.add(workload.schedule, job.typed, workload.schedule, is_own=True, is_typed=True)
        zb = own if own and own.schedule == "ZB" else self.add("ZB", job.typed, "ZB", is_typed=True)
        stages = max([each.stages_per_rank for each in (own, zb) if each and each.stages_per_rank > 1][:1] or [2])
        for name, number in (("1F1B", 1), ("Interleaved1F1B", stages)):
            if own is None or (own.schedule, own.stages_per_rank) != (name, number):
                self.add(f"{name}, {number} stages per rank", job.named, resolve(name), number, is_typed=True)
        if zb is None or zb.timeline is None:
            return
        placement = zb.timeline.schedule.placement
        best = self.add(f"plan, {zb.placement}", job.planned, zb.placement, placement, budget, is_typed=True)
        if best is None or not zb.fits or best.seconds < (1 - WORTH) * zb.seconds:  # else no other memory is worth it
            self.steps += job.in_other_memory(zb)
        names = ["ZB"] if own is None else [workload.schedule] if own is zb else [workload.schedule, "ZB"]
        self.lighter = sorted(job.in_lighter_checkpointing(names), key=lambda each: each.seconds)

    def add_all(self, wanted: Sequence[Algorithm], numbers: Sequence[int]) -> None:
        for algorithm in wanted:
            usual = algorithm.stages_per_rank
            for stages in sorted(set(numbers)) if algorithm.any_stages_per_rank else (usual,):
                is_asked = stages >= usual or usual > max(numbers)
                if is_asked and not self.has(algorithm.name, algorithm.place(self.job.ranks, stages)):
                    self.add(f"{algorithm.name}, {stages} stages per rank", self.job.named, algorithm, stages)


def require_torch_runs(algorithm: Algorithm, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Raise ValueError if torch's class for this schedule would refuse these sizes."""
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
    transport: Transport
    cut: WorkloadCut
    sizes: tuple[Size, ...] = ()

    @property
    def ranks(self) -> int:
        return self.workload.degrees.pipeline

    def typed(self, name: str) -> Step:
        """The row of a schedule that the job names, with the number of stages that it then has."""
        workload, known = replace(self.workload, schedule=name), self.measured and self.measured.costs
        if isinstance(known, CostModel) and resolve(name).any_stages_per_rank:
            workload = replace(workload, num_stages=known.num_stages)
        algorithm, placement = choose_own(workload, self.cut)
        return self.named(algorithm, len(placement.stages_on(0)), resolve(name).name)

    def named(self, algorithm: Algorithm, stages: int, name: str = "") -> Step:
        microbatches, limit = self.workload.microbatches, self.workload.memory_limit
        if "memory_limit" not in algorithm.keywords:
            limit = None
        placement = algorithm.place(self.ranks, stages)
        split = self.cut.split(placement, algorithm)
        costs = self.costs(placement, split)
        made_for: CostModel | None = costs
        if self.measured is None and not (algorithm.by_checkpointing and self.workload.checkpointing is None):
            made_for = self.cut.usual_costs(algorithm, placement)
        require_torch_runs(algorithm, self.ranks, stages, microbatches)
        how: dict[str, Any] = {"costs": made_for, "memory_limit": limit, "transport": self.transport}
        schedule = algorithm.make(self.ranks, microbatches, stages_per_rank=stages, **how)
        wave = "v" if stages == 2 else "wave"
        known = {"loop": Placement.loop(self.ranks, stages), wave: Placement.wave(self.ranks, stages)}
        kind = "single" if stages == 1 else next((kind for kind, each in known.items() if each == placement), "table")
        found = self.step(schedule, costs, split, name or algorithm.name, kind, algorithm.source)
        return replace(found, memory_limit=str(limit.written) if limit else None, algorithm=algorithm)

    def in_other_memory(self, usual: Step) -> Iterator[Step]:
        """ZB's row with the least memory limit whose step is as short as with all of the device's memory. Nothing if
        that gains nothing, or if the job has a limit."""
        algorithm, workload, stages = usual.algorithm, self.workload, usual.stages_per_rank
        if self.rates is None or workload.memory_limit or algorithm is None:
            return
        placement = algorithm.place(self.ranks, stages)
        split = self.cut.split(placement, algorithm)
        room = 0.0
        with suppress(ValueError):  # the weights alone exceed the memory
            room = min(self._room(placement, split) or (inf,))
        once = memory_of_1f1b(self.costs(placement, split), self.ranks, workload.microbatches)

        @cache
        def within(multiple: float) -> Step | None:
            limited = replace(workload, memory_limit=MemoryLimit(multiple, "x", f"{multiple:g}x"))
            try:
                found = replace(self, workload=limited).named(algorithm, stages, usual.schedule)
            except ValueError:  # the limit is too low
                return None
            return replace(found, is_typed=True) if found.fits else None

        tried = [each for each in _LIMITS if each * once <= room * _ROUGHLY]
        while tried and within(tried[-1]) is None:
            tried.pop()
        best = within(tried[-1]) if tried else None
        if best is None or (usual.fits and usual.seconds <= best.seconds * _AS_SHORT):
            return
        enough = best.seconds * _AS_SHORT
        place = bisect_left(tried, True, key=lambda each: bool((step := within(each)) and step.seconds <= enough))
        yield within(tried[place]) or best

    def in_lighter_checkpointing(self, names: Iterable[str]) -> list[Step]:
        """The rows of these schedules, FSDP's and VHalf's that fit with lighter checkpointing: from the lightest on,
        schedules until one of these fits. VHalf keeps half of 1F1B's activations."""
        workload, now, found = self.workload, self.workload.checkpointing, list[Step]()
        if self.measured or self.rates is None or now is None:
            return []
        kinds = list(Checkpointing)
        for how in kinds[: kinds.index(now)]:
            with suppress(ValueError):  # counted for the job's checkpointing only, or too few layers for VHalf
                lighter = workload.on(workload.degrees, how)
                other = replace(self, workload=lighter, cut=WorkloadCut(lighter))
                rows = list[Step]()
                with suppress(ValueError):  # without a pipeline GPUs cannot share the batch
                    rows.append(other.without_pipeline())
                for name in names:
                    # Not the stages that the job has now: what the user types chooses them for this checkpointing.
                    algorithm, placement = choose_own(replace(lighter, schedule=name), other.cut)
                    if other._may_fit(algorithm, placement):
                        rows.append(other.named(algorithm, len(placement.stages_on(0)), resolve(name).name))
                found += [replace(each, checkpointing=how, is_typed=True) for each in rows]
                names = () if any(each.timeline and each.fits and each.runs for each in rows) else names
                if names:  # else only FSDP goes on
                    found.append(replace(other.typed("VHalf"), checkpointing=how, is_typed=True))
        return [each for each in found if each.fits and each.runs]

    def _may_fit(self, algorithm: Algorithm, placement: Placement) -> bool:
        """Whether the leanest order that ZB knows fits; True for others, which search for none."""
        if not algorithm.chooses_stages or self.rates is None:
            return True
        split = self.cut.split(placement, algorithm)
        leanest = self.cut.list_leanest(placement, self.costs(placement, split))
        memories = (max(each.total for each in memories_by_rank(self.workload, one, split)) for one in leanest)
        return any(memory <= self.rates.device.usable_bytes for memory in memories)

    def planned(self, name: str, placement: Placement, budget: float) -> Step:
        """The best plan on this placement within the memory that the weights leave, and within the job's limit."""
        split = self.cut.split(placement)
        costs = self.costs(placement, split)
        room, limit = self._room(placement, split), self.workload.memory_limit
        size = (placement.num_ranks, self.workload.microbatches)
        if limit is not None:
            room = tuple(map(min, limit.resolve(costs, *size), room or (inf,) * self.ranks))
        planned = self.with_fsdp(costs, split)
        found = plan(*size, planned, room, placements=[placement], budget=budget, transport=self.transport)
        return self.step(found.schedule, costs, split, PLAN, name, "zbpipe")

    def step(self, schedule: Schedule, costs: CostModel, split: Split, name: str, placement: str, source: str) -> Step:
        stages = len(schedule.placement.stages_on(0))
        how = {"transport": self.transport} | how_runs(source, stages)
        how["overlaps_fsdp"] = self.workload.overlaps_fsdp or how["overlaps_fsdp"]
        timeline = simulate(schedule, self.with_fsdp(costs, split), **how)
        seconds = self._seconds(timeline, split)
        largest = replace(timeline, costs=timeline.costs.alike)
        worst = max(memories_by_rank(self.workload, largest, split), key=lambda memory: memory.total)
        torchs = has_torchs_split(schedule, source)
        runs = not torchs or runs_torchs_split(self.workload.checkpointing, self.workload.compiled)
        others = (self.with_fsdp(job.costs(schedule.placement, split), split) for job in self._extremes)
        how["receives"] = timeline.receives
        ends = tuple(self._seconds(simulate(schedule, each, **how), split) for each in others)
        row = self._row((name, placement, stages), seconds, timeline.bubble, worst, ends)
        return replace(row, source=source, timeline=timeline, has_torchs_split=torchs, runs=runs)

    def _row(
        self, what: tuple[str, str, int], seconds: float, bubble: float, memory: Memory, ends: tuple[float, ...]
    ) -> Step:
        if not seconds:
            raise ValueError("its step takes 0 seconds: give times above 0")
        share = fmean(each.tokens for each in self.sizes) / self.workload.tokens if self.sizes else 1.0
        speed = share * self.workload.global_tokens / seconds / self.workload.degrees.gpus
        device = None if self.rates is None else self.rates.device
        mfu = speed * self.workload.operations / device.peak if device else None
        fits = device is None or memory.total <= device.usable_bytes
        known = (ends[0], ends[1]) if ends else None
        return Step(*what, seconds, max(bubble, 0.0), speed, mfu, memory, fits, range=known)

    @cached_property
    def _layers(self) -> CostModel:
        assert self.rates is not None
        return self.rates.layer_costs(self.workload)

    def costs(self, placement: Placement, split: Split) -> CostModel:
        costs, work = self._alike(placement, split), self.workload
        fills = "off" if work.compiled else work.fill_waits if work.fill_waits != "off" else costs.fill_waits
        return replace(costs, sizes=self.sizes or costs.sizes, fill_waits=fills)

    def _alike(self, placement: Placement, split: Split) -> CostModel:
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
        total = workload.parameter_bytes.total
        held = workload.held_by_rank(placement, split)
        room = tuple(usable - sum(each.number * total(each.shards) for each in parts) - messages for parts in held)
        if min(room) <= 0:
            raise ValueError(f"weights and optimizer of a rank take more than the usable {usable / 2**30:.0f} GiB")
        return room

    def with_fsdp(self, costs: CostModel, split: Split) -> CostModel:
        """The costs with FSDP: the seconds in which each stage's parameters are gathered, and its gradients reduced."""
        workload, degrees = self.workload, self.workload.degrees
        if self.rates is None or degrees.shards * degrees.replicas == 1 or costs.gather or costs.reduce:
            return costs
        sizes, collective = workload.parameter_bytes, self.rates.device.collective

        def gather(held: Held) -> float:
            return collective(sizes.gathered * held.number, held.shards, held.apart)

        def reduce(held: Held) -> float:
            once = collective(sizes.summed * held.number, held.shards, held.apart)
            return once + 2 * collective(sizes.summed * held.own, degrees.replicas, held.apart * held.shards)

        stages = [workload.held(stage) for stage in split]
        return replace(
            costs,
            gather=tuple(sum(map(gather, held)) for held in stages),
            reduce=tuple(sum(map(reduce, held)) for held in stages),
        )

    def _seconds(self, timeline: Timeline, split: Split) -> float:
        """A step with everything outside its schedule."""
        workload = self.workload
        if self.rates is None:
            return timeline.makespan
        held = workload.held_by_rank(timeline.schedule.placement, split)
        own = max(sum(each.own for each in parts) for parts in held)
        # No step is shorter than its launches on the host of any rank.
        blocks, (plain, apart) = workload.launches_by_stage(split), HOST[workload.compiled]
        launches = {OpKind.F: plain, OpKind.W: apart}
        hosts = [sum(blocks[op.stage] * launches.get(op.kind, 0.0) for op in ops) for ops in timeline.schedule]
        return self.rates.with_overheads(workload.rounds * max(timeline.makespan, *hosts), workload, own)

    def without_pipeline(self) -> Step:
        """A step with the same tokens and GPUs under FSDP without a pipeline."""
        if self.sizes:
            raise ValueError("without a pipeline, sizes of microbatches are not counted: omit them")
        assert self.rates is not None
        seconds, exposed, memory, batch = step_without_pipeline(self.workload, self.rates)
        others = (job.rates for job in self._extremes)
        ends = tuple(step_without_pipeline(self.workload, each).seconds for each in others if each is not None)
        row = self._row((NO_PIPELINE, "", 1), seconds, exposed / (seconds or 1.0), memory, ends)
        return replace(row, batch=batch)

    @cached_property
    def _extremes(self) -> tuple[_Job, ...]:
        """The job at the largest and the least plausible speeds. Empty with a given rate or measured times."""
        if self.measured is not None or self.rates is None:
            return ()
        return tuple(replace(self, rates=each) for each in reversed(self.rates.extremes))

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
                how = f"; {ends[0].speed:.0%} to {ends[1].speed:.0%} of these are plausible" if ends else ""
                yield (
                    f"speed: {device.name} sustains in {reached}, of a peak of {device.peak / 1e12:.0f}, and"
                    f" {device.memory / 1e12:.1f} TB/s in its memory ({where}{how})"
                )
            yield (
                f"links: {device.inside / 1e9:.0f} GB/s within a node, {device.between / 1e9:.0f} between"
                f" ({'given' if link is not None else device.source})"
            )
        yield (f"messages: {self.transport} (--transport), with receives posted where they are best")
        yield (
            "FSDP: a pipeline gathers a stage during its first F and reduces it during its last W or B; torch's"
            " schedules gather before and reduce after them; without a pipeline, a layer's communication overlaps"
            " another's computation, and the longer of both counts"
        )


def memories_by_rank(workload: Workload, timeline: Timeline, split: Split) -> Iterator[Memory]:
    placement = timeline.schedule.placement
    each = workload.parameter_bytes
    for own, held in zip(workload.held_by_rank(placement, split), peak_parts(timeline), strict=True):
        is_head = held.op is not None and held.op[:2] == (placement.num_stages - 1, OpKind.F)
        yield Memory(
            sum(part.number * each.weights(part.shards) for part in own),
            sum(part.number * each.optimizer(part.shards) for part in own),
            held.activations,
            held.waiting,
            held.messages,
            working=0.0 if is_head else held.working,
            logits=held.working if is_head else 0.0,
        )


def choose_own(
    workload: Workload, cut: WorkloadCut | None = None, *, on_cpu: bool = False
) -> tuple[Algorithm, Placement]:
    """The job's schedule, and the placement that it chooses. `on_cpu`: ignore the overhead of ops."""
    cut = cut or WorkloadCut(workload)
    degrees, how = workload.degrees, workload.checkpointing
    algorithm = resolve(workload.schedule)
    number, stages = workload.num_stages, None
    if number is not None:
        stages = algorithm.stages_of_cut(degrees.pipeline, number, "the job's number of layers per stage makes")
    if how is None:
        if stages is None and algorithm.chooses_stages:
            stages = stages_for(cut.num_layers or len(workload.layers), degrees.pipeline)[0]
        return algorithm, algorithm.place(degrees.pipeline, stages)
    chosen = choose(
        algorithm,
        degrees.pipeline,
        workload.microbatches,
        cut,
        how,
        tensor=degrees.tensor,
        tokens=0.0 if on_cpu else workload.tokens / degrees.sharing,
        stages_per_rank=stages,
        memory_limit=workload.memory_limit if "memory_limit" in algorithm.keywords else None,
    )
    return chosen.algorithm, chosen.placement


def memory_by_rank(workload: Workload) -> JobMemory:
    """Memory of each rank with the job's schedule. `USABLE` leaves room for the communication library's buffers, FSDP's
    copies, and fragmentation."""
    layers = workload.layer_costs(lambda layer: (1.0, 1.0, 1.0))  # only memory matters here
    if workload.degrees.pipeline == 1:
        alone = memory_without_pipeline(workload, layers, workload.microbatches)
        return JobMemory((workload.parameters,), (alone,), sum(layers.activations))
    cut, limit = WorkloadCut(workload), workload.memory_limit
    algorithm, placement = choose_own(workload, cut)
    split = cut.split(placement, algorithm)
    costs = join_stages(layers, split)
    found = []
    for each in [algorithm, resolve("ZB")] if algorithm.name == "Auto" else [algorithm]:  # Auto becomes ZB
        made_for = cut.usual_costs(each, placement)
        schedule = each.make_on(placement, workload.microbatches, costs=made_for, memory_limit=limit)
        assert schedule is not None, "the placement is one of the schedule, and Auto has ZB's"
        found.append(memories_by_rank(workload, simulate(schedule, costs), split))
    memories = tuple(max(both, key=lambda memory: memory.total) for both in zip(*found, strict=True))
    parameters = [sum(workload.layers[layer].parameters for layer in stage) for stage in split]
    return JobMemory(placement.sum_by_rank(parameters), memories, sum(costs.activations) / placement.num_ranks)
