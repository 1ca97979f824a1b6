"""Schedules that adapt to the job: `ZB` to its activation checkpointing, `Auto` to its measured costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs.job import JobCosts, MemoryLimit, MemoryLimitLike, resolve_limits
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import Checkpointing, Work, usual_costs
from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime._torch.attributes import find_checkpointed, plain_attribute
from zbpipe.runtime.measure.profiler import Profiler, log_visibly
from zbpipe.runtime.measure.recording import Collector, StepRecord, Wanted, collect, watch
from zbpipe.runtime.offload import make_copier
from zbpipe.runtime.ranks import agreement
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.schedule.ir import Placement, Schedule, require_whole
from zbpipe.schedule.registry import Algorithm, resolve, schedules
from zbpipe.simulator.offloading import Offload
from zbpipe.simulator.simulation import simulate

USUAL_STEPS = 5
"""Timed steps per schedule."""

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
    found = [each for part in parts for each in find_checkpointed(part)]
    if not found:
        says_so = any(plain_attribute(module, "gradient_checkpointing") is True for module in modules)
        return Checkpointing.FULL if says_so else Checkpointing.NONE
    inside = {id(module) for wrapped, _ in found for module in wrapped.modules()}
    classes = {type(wrapped) for wrapped, _ in found}
    some_are_not = any(type(module) in classes and id(module) not in inside for module in modules)
    keeps_some = any(keeps for _, keeps in found)
    return Checkpointing.SELECTIVE if keeps_some or some_are_not else Checkpointing.FULL


class AutoSchedule(RegisteredSchedule):
    """ZB that measures the job, and is made again for the measured costs between two steps.

        schedule = zbpipe.build_pipeline_schedule("Auto", stages, n_microbatches=16, loss_fn=loss_fn)
        ...                     # train; the first rank's log has the measured and the expected step
        schedule.costs          # the measured costs; None before

    It measures with the ZB of full checkpointing, which has whole backwards and few I and W, for `profile_steps` + 2
    steps. Weights, optimizer, data order and the placement of the stages (that of ZB) never change, so neither do the
    losses. With `zbpipe.OptimizerStep`, timed steps do not run ahead.

    Args:
        stages: as for every zbpipe schedule, like `n_microbatches`, `loss_fn`, `args` and `options`.
        offload: tensors that ZB may then copy to the host: "pairs", "activations" or "all".
        memory_limit: as for every schedule. During measurement only activations and deferred gradients count.
        profile_steps: number of timed steps.
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
        group: dist.ProcessGroup | None = None,
        measured: Callable[[JobCosts], None] = lambda costs: None,
        **options: Any,
    ) -> None:
        (profile_steps,) = require_whole(1, profile_steps=profile_steps)
        checks.require_group(group)
        checks.require_callable(measured=measured)
        super().__init__(stages, n_microbatches, loss_fn, *args, memory_limit=memory_limit, **options)
        self.costs: JobCosts | None = None
        self._offload = Offload.read(offload)
        if self._offload:
            checks.require_offload(self._offload, options.get("split_backward", "deferred"))
            make_copier(pipelining.device_of(pipelining.stages_of(self)[0]))  # refuses devices without host copies
        self._group = group
        self._measured = measured
        self._profiler = Profiler(self, profile_steps, group=group, done=self._make_for)

    @property
    def is_steady(self) -> bool:
        return self.costs is not None and super().is_steady

    def _make_for(self, costs: JobCosts) -> None:
        model, lists, number = costs.costs, self.lists, self.sizes.usual
        assert isinstance(model, CostModel), "the profiler measures stages"
        self._measured(costs)
        if lists.limit:  # one microbatch has run, so it always fits
            lists.limit = MemoryLimit(resolve_limits(lists.limit, self.placement, model, number), "")
        lists.algorithm, lists.offload = resolve("ZB"), self._offload
        self.remake(model)
        self.costs = costs
        measured = _step_seconds(self._profiler.records, self._group)
        expected = simulate(self.schedule, model, transport=self.transport, receives=self.receives).makespan
        if dist.get_rank(self._group) == 0:
            words = "Auto: a step took %.4g s while it was measured; %s should take %.4g s"
            log_visibly(logger, words, measured, self.schedule.name, expected)


class _InTurn(Collector):
    """Runs a schedule per step, so that changes of the machine's speed affect all alike."""

    def __init__(self, runtime: RegisteredSchedule, turns: Sequence[Schedule], done: Callable[[Records], None]) -> None:
        super().__init__([Wanted.TIMES] * len(turns), done)
        self._runtime, self._turns = runtime, turns

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

        def tell(records: Records) -> None:
            schedule.adopt(own)
            theirs, ours = _step_seconds(records[1::2]), _step_seconds(records[2::2])
            gain = f"{abs(1 - ours / theirs):.1%} {'shorter' if ours < theirs else 'longer'}"
            words = f"{own.name} takes {ours:.4g} s per step and {compared.name} {theirs:.4g} s: {own.name} is {gain}"
            if dist.get_rank() == 0:
                log_visibly(logger, "in turn, medians of %d steps each, %s", steps, words)

        # The first step of a schedule allocates memory, so it does not count.
        watch(schedule, _InTurn(schedule, [compared, *[compared, own] * steps], tell))

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
