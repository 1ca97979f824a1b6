"""Schedules that adapt to the job: `ZB` to its activation checkpointing, `Auto` to its measured costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs.job import JobCosts, MemoryLimit, MemoryLimitLike, resolve_limits
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import Checkpointing, Work, usual_costs
from zbpipe.planner.plan import plan
from zbpipe.planner.request import Objective
from zbpipe.runtime import checks
from zbpipe.runtime._torch import checkpoints, pipelining
from zbpipe.runtime._torch.attributes import plain_attribute
from zbpipe.runtime.measure.profiler import Profiler, log_visibly
from zbpipe.runtime.measure.recording import Collector, StepRecord, Wanted, collect, watch
from zbpipe.runtime.offload import make_copier
from zbpipe.runtime.ranks import agreement
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.schedule.ir import Placement, Schedule, require_whole
from zbpipe.schedule.registry import Algorithm, resolve, schedules
from zbpipe.simulator.offloading import Offload
from zbpipe.simulator.simulation import simulate

_MANY_OPS = 20_000
_WORK = 5e8
"""Largest number of ops for a thorough search, and its budget of about ten seconds, for which all other ranks wait."""
USUAL_STEPS = 5
"""Timed steps per schedule."""
_WORTH_IT = 0.995
"""Largest simulated step time of a plan to try, relative to the start's."""

Records = list[StepRecord]

logger = logging.getLogger(__name__)


class AdaptiveSchedule(RegisteredSchedule):
    """A schedule that defers W only where memory permits, which depends on the checkpointing.

        schedule = zbpipe.ScheduleZB(stages, n_microbatches=8, loss_fn=loss_fn)

    It takes the arguments of all zbpipe schedules, and

    Args:
        stages: all stages of this rank, already wrapped for checkpointing.
        work: relative work of each of the pipeline's stages, the same on all ranks: in layers under checkpointing, and
            in the other layers. Default: all stages are equal.
        tensor: degree of tensor parallelism.
        checkpointing: "none", "selective" or "full", the same on all ranks. Default: detected in the modules (see
            `checkpointing_of`); before the first step all ranks agree on the one that keeps least.
        costs: measured costs, the same on all ranks, instead of typical costs for the checkpointing.

    Raises:
        ValueError: as for every schedule, or an unknown checkpointing.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *args: Any,
        checkpointing: Checkpointing | str | None = None,
        costs: CostModel | None = None,
        memory_limit: MemoryLimitLike | None = None,
        work: Work | None = None,
        tensor: int = 1,
        **options: Any,
    ) -> None:
        limit = MemoryLimit.parse(memory_limit, costs_are_known=costs is not None)
        self._work, self._tensor = work, tensor
        found = None if checkpointing is None else Checkpointing.parse(checkpointing)
        is_sure = costs is not None or found is not None
        if costs is None:
            stages, placement = checks.place_stages(stages, self.algorithm)
            found = found or checkpointing_of([stage.submod for stage in stages])
            costs = usual_costs(placement, found, tensor, work)
        super().__init__(stages, n_microbatches, loss_fn, *args, costs=costs, memory_limit=limit, **options)
        self.checkpointing = found
        """Checkpointing for which the schedule is made; None with measured costs."""
        self._unsure = None if is_sure else self.schedule
        """A schedule that other ranks may not have made."""

    def settle(self) -> None:
        """Agree on the checkpointing with all ranks, because a rank may have only an embedding."""
        unsure = self._unsure
        if unsure is None or unsure is not self.lists.of(self.sizes.usual) or self.checkpointing is None:
            return
        stage, name = pipelining.stages_of(self)[0], self.algorithm.name
        topic = f"{name} with {pipelining.num_microbatches(self)} microbatches, checkpointing: "
        texts = agreement.compare(topic, topic + self.checkpointing, stage.group, stage.device)
        found = [Checkpointing.parse(each.removeprefix(topic)) for each in texts]
        agreed = max(found, key=list(Checkpointing).index)
        logger.info("%s is made for %s activation checkpointing, as the modules show", name, agreed)
        self._unsure = None  # only now, so that a rank that refuses this step asks again in the next one
        if self.checkpointing is not agreed:
            self.checkpointing = agreed
            self.remake(usual_costs(self.placement, agreed, self._tensor, self._work))


def checkpointing_of(parts: Sequence[nn.Module]) -> Checkpointing:
    """The activation checkpointing of these parts of a model, from `checkpoint_wrapper` around their layers.

    With a `context_fn`, as in TorchTitan, or with unwrapped layers of the same class, it is selective, otherwise full.
    Models of transformers declare it (`gradient_checkpointing`). Other calls of `torch.utils.checkpoint` in a forward
    are not detected: pass `checkpointing=`.
    """
    modules = [module for part in parts for module in part.modules()]
    found = [each for part in parts for each in checkpoints.find_checkpointed(part)]
    if not found:
        says_so = any(plain_attribute(module, "gradient_checkpointing") is True for module in modules)
        return Checkpointing.FULL if says_so else Checkpointing.NONE
    inside = {id(module) for wrapped, _ in found for module in wrapped.modules()}
    classes = {type(wrapped) for wrapped, _ in found}
    some_are_not = any(type(module) in classes and id(module) not in inside for module in modules)
    keeps_some = any(keeps for _, keeps in found)
    return Checkpointing.SELECTIVE if keeps_some or some_are_not else Checkpointing.FULL


@dataclass(frozen=True)
class AutoOutcome:
    """Result of `Auto`. Times are seconds per step."""

    start: str
    """Name of the schedule without a plan: ZB for the measured costs."""
    chosen: str
    """Name of the schedule from now on."""
    expected_before: float
    """Step time of the start, simulated with the measured costs."""
    expected_after: float
    """Step time of the plan, simulated with the measured costs."""
    measured_before: float
    """Step time of the start, alternating with the plan. Without a tried plan: of the steps that measured ops."""
    measured_after: float | None
    """Step time of the plan; None if it was not tried, because its simulated gain is below half a percent."""


@dataclass(frozen=True)
class _Proposal:
    table: str
    """The plan as CSV."""
    expected: float
    """Seconds per step; infinite if there is no plan."""
    words: str


class AutoSchedule(RegisteredSchedule):
    """ZB that measures the job, plans for it, and switches to the better schedule between two steps.

        schedule = zbpipe.build_pipeline_schedule("Auto", stages, n_microbatches=16, loss_fn=loss_fn)
        ...                     # train; the first rank's log reports each decision
        schedule.outcome        # the measurements and the choice; None before

    It measures with the ZB of full checkpointing, which has whole backwards and few I and W, for `profile_steps` + 2
    steps. Then it makes ZB for the measured costs, and plans. Plan and ZB alternate for `profile_steps` steps each, and
    the faster one stays. Weights, optimizer, data order and the placement of the stages (that of ZB) never change, so
    neither do the losses. With `zbpipe.OptimizerStep` it plans for the shortest period. Timed steps do not run ahead.

    Args:
        stages: as for every zbpipe schedule, like `n_microbatches`, `loss_fn`, `args` and `options`.
        offload: tensors that the plan and ZB may copy to the host: "pairs", "activations" or "all".
        memory_limit: as for every schedule. During measurement only activations and deferred gradients count. Default:
            that of ZB with the measured costs, working memory included.
        profile_steps: number of timed steps of the start, and later of the plan and of the start again.
        budget: for the search, see `zbpipe.plan`.
        group: all ranks that run this schedule, including other replicas. Default: all ranks of the job.
        measured: called on every rank with the measured costs.

    Raises:
        ValueError: as for every schedule, and for a limit below one microbatch's memory.
    """

    algorithm = resolve("Auto")
    changes_by_itself = True

    # More than seven parameters: users write them as keywords.
    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *args: Any,
        memory_limit: MemoryLimitLike | None = None,
        offload: Offload | str | bool | None = None,
        profile_steps: int = USUAL_STEPS,
        budget: float | None = None,
        group: dist.ProcessGroup | None = None,
        measured: Callable[[JobCosts], None] = lambda costs: None,
        **options: Any,
    ) -> None:
        checks.require_above_0("budget", budget)
        (profile_steps,) = require_whole(1, profile_steps=profile_steps)
        checks.require_group(group)
        checks.require_callable(measured=measured)
        super().__init__(stages, n_microbatches, loss_fn, *args, memory_limit=memory_limit, **options)
        self.outcome: AutoOutcome | None = None
        self._offload = Offload.read(offload)
        if self._offload:
            checks.require_offload(self._offload, options.get("split_backward", "deferred"))
            make_copier(pipelining.device_of(pipelining.stages_of(self)[0]))  # refuses devices without host copies
        self._group = group
        self._budget = budget
        self._measured = measured
        self._num_steps = profile_steps
        self.lists.improve = self._choose
        self._profiler = Profiler(self, profile_steps, group=group, done=self._plan)

    @property
    def is_steady(self) -> bool:
        return self.outcome is not None and super().is_steady

    def _choose(self, start: Schedule) -> Schedule:
        """The better one of `start` and a plan, after a plan was better for the usual number of microbatches."""
        if self.outcome is None or self.outcome.chosen == self.outcome.start:
            return start
        costs = self.lists.simulated_costs
        found = self._search(JobCosts(costs), start)
        is_better = found.expected < simulate(start, costs, transport=self.transport).makespan * _WORTH_IT
        return Schedule.from_csv(found.table, "plan") if is_better else start

    def _plan(self, costs: JobCosts) -> None:
        model, lists, number = costs.costs, self.lists, self.sizes.usual
        assert isinstance(model, CostModel), "the profiler measures stages"
        self._measured(costs)
        if lists.limit:  # one microbatch has run, so it always fits
            lists.limit = MemoryLimit(resolve_limits(lists.limit, self.placement, model, number), "")
        lists.algorithm, lists.offload = resolve("ZB"), self._offload
        lists.use_costs(model)
        start = lists.make(number)
        self.adopt(start)
        expected = simulate(start, model, transport=self.transport, receives=self.receives).makespan
        measured = _step_seconds(self._profiler.records, self._group)
        proposal = self._search(costs, start)
        outcome = AutoOutcome(start.name, start.name, expected, proposal.expected, measured, None)
        self._log(
            f"a step took {measured:.4g} s while it was measured; {start.name} should take {expected:.4g} s;"
            f" {proposal.words}"
        )
        if proposal.expected > expected * _WORTH_IT:
            self._log(f"stays with {start.name}")
            self.outcome = outcome
            return
        if any(each.num_microbatches != number for each in self._profiler.records):
            self._log(f"compares both only in steps of {number} microbatches, the usual number")

        def decide(after: float, before: float) -> None:
            self.adopt(start if after > before else planned)
            self._log(
                f"in turn, the plan takes {after:.4g} s per step (simulated {proposal.expected:.4g} s) and {start.name}"
                f" {before:.4g} s (simulated {expected:.4g} s); continues with {self.schedule.name}"
            )
            self.outcome = replace(outcome, chosen=self.schedule.name, measured_before=before, measured_after=after)

        planned = Schedule.from_csv(proposal.table, "plan")
        watch(self, _InTurn(self, planned, start, self._num_steps, decide, self._group))

    def _search(self, job: JobCosts, start: Schedule) -> _Proposal:
        """Plan within the given limit, or else within the memory of `start`."""
        number, costs, limit = start.num_microbatches, self.lists.simulated_costs, self.lists.limit
        limits = resolve_limits(limit, self.placement, costs, number)
        if limit is None:
            limits = tuple(map(max, limits, simulate(start, costs).peak_memory))
        job = replace(job, placement=self.placement, memory_limit=limits, transport=self.transport)
        objective: Objective = "period" if self.optimizer_steps and not self._offload else "makespan"
        size = self.placement.num_ranks, number, job
        is_large = 3 * self.placement.num_stages * number > _MANY_OPS
        budget = self._budget or (_WORK if is_large else None)
        wanted = {"budget": budget, "objective": objective, "offload": self._offload}
        return agreement.find_once(f"Auto {size} {wanted}", lambda: _make_proposal(*size, **wanted))

    def _log(self, words: str) -> None:
        if dist.get_rank(self._group) == 0:
            log_visibly(logger, "Auto: %s", words)


class _InTurn(Collector):
    """Alternates two schedules step by step, so that changes of the machine's speed affect both alike. `done` gets
    the seconds of both."""

    def __init__(
        self,
        runtime: RegisteredSchedule,
        first: Schedule,
        second: Schedule,
        times: int,
        done: Callable[[float, float], None],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # The first step of a schedule allocates memory, so it does not count.
        self._turns = [first, *[first, second] * times]
        self._runtime = runtime

        def compare(records: Records) -> None:
            done(_step_seconds(records[1::2], group), _step_seconds(records[2::2], group))

        super().__init__([Wanted.TIMES] * len(self._turns), compare)

    def before(self) -> Wanted | None:
        wanted = super().before()
        if wanted is not None:
            self._runtime.adopt(self._turns[len(self.records)])
        return wanted

    def after(self, record: StepRecord) -> None:
        if record.num_microbatches == self._runtime.sizes.usual:
            super().after(record)
        else:  # it ran the schedule for its own number
            self.missed()


def _step_seconds(records: Records, group: dist.ProcessGroup | None = None) -> float:
    """Median step time over all ranks; each step takes as long as its slowest rank."""
    mine = [record.seconds for record in records]
    by_rank: list[list[float]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, mine, group=group)
    return float(median(map(max, zip(*by_rank, strict=True))))


COMPARED_FROM = 3
"""Number of steps before a comparison: of the schedule itself, and of the other one."""


def compare_in_turn(schedule: RegisteredSchedule, other: Algorithm, steps: int) -> None:
    """Alternate a schedule with another one, for `steps` timed steps each, and log both times. Losses stay the same.

    Raises:
        ValueError: see `require_comparable`.
    """
    require_comparable(schedule.algorithm, other, schedule.placement)
    if other.table is not None:
        other.make_on(schedule.placement, schedule.sizes.usual)  # refuses another number of microbatches

    def begin(records: Records) -> None:  # costs and transport are known now
        own, lists = schedule.schedule, schedule.lists
        limit = lists.limit if "memory_limit" in other.keywords else None
        known = {"costs": lists.costs, "memory_limit": limit, "transport": lists.transport}
        compared = other.make_on(schedule.placement, schedule.sizes.usual, **known)
        assert compared is not None, "it is comparable"

        def tell(theirs: float, ours: float) -> None:
            schedule.adopt(own)
            gain = f"{abs(1 - ours / theirs):.1%} {'shorter' if ours < theirs else 'longer'}"
            words = f"{own.name} takes {ours:.4g} s per step and {compared.name} {theirs:.4g} s: {own.name} is {gain}"
            if dist.get_rank() == 0:
                log_visibly(logger, "in turn, medians of %d steps each, %s", steps, words)

        watch(schedule, _InTurn(schedule, compared, own, steps, tell))

    collect(schedule, [Wanted.NOTHING, Wanted.TIMES], begin)


def require_comparable(algorithm: Algorithm, other: Algorithm, placement: Placement) -> None:
    """Refuse a comparison with a schedule that needs another cut of the model, or unknown costs."""
    if not other.runs_on(placement):
        fitting = [each.name for each in schedules().values() if each.table is None and each.runs_on(placement)]
        raise ValueError(
            f"{algorithm.name} has its stages on the ranks {list(placement.rank_of)}, {other.name} on others, so one"
            f" job cannot compare them: name one of {', '.join(fitting)}, or train twice"
        )
    if other.by_checkpointing and not algorithm.by_checkpointing:
        raise ValueError(
            f"{other.name} is made for the job's checkpointing, which {algorithm.name} does not know: run {other.name},"
            f" and compare it with {algorithm.name}"
        )


def _make_proposal(*size: Any, **wanted: Any) -> _Proposal:
    try:
        found = plan(*size, **wanted)
    except ValueError as error:
        return _Proposal("", float("inf"), f"there is no plan: {error}")
    words = (
        f"the plan found by {found.found_by} should take {found.reached:.4g} s, at most {found.gap:.1%} more than"
        f" the best possible, with a peak of {max(found.timeline.peak_activations):.3g} microbatches"
    )
    return _Proposal(found.schedule.to_csv(), found.makespan, words)
