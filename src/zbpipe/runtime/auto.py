"""`Auto`: start on a safe schedule, measure the job, plan for it, and run the plan if it is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.algorithms.auto import starts
from zbpipe.costs import CostModel
from zbpipe.ir import Placement, Schedule
from zbpipe.job_costs import JobCosts
from zbpipe.planner.plan import plan
from zbpipe.runtime.measure.profiler import Profiler
from zbpipe.runtime.measure.recording import StepRecord, Wanted, watch
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.simulation import simulate

_MANY_OPS = 20_000
_WORK = 5e8
"""For so many ops the search has a budget of about ten seconds, because all other ranks wait for it."""
USUAL_STEPS = 5
"""Steps that are timed of each schedule."""
_WORTH_IT = 0.995
"""A plan that promises less than half a percent stays on paper."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What `Auto` found out. Times are seconds of one step."""

    start: str
    """The schedule that it began with."""
    chosen: str
    """The schedule that runs from now on."""
    expected_before: float
    """What the simulator says of the start, with the measured costs."""
    expected_after: float
    """The same of the plan."""
    measured_before: float
    measured_after: float | None
    """None if the plan promised too little to be tried."""


@dataclass(frozen=True)
class _Proposal:
    """What the rank that plans tells all others."""

    table: str
    """As CSV."""
    expected: float
    """Seconds of a step; infinite if there is no plan."""
    words: str


class AutoSchedule(RegisteredSchedule):
    """Starts as V-Half (or V-Min, under a tight limit) with W at once, measures, plans, and swaps between two steps.

    Weights, optimizer, order of the data and the placement of the stages (two a rank, on a V) stay as they are, and so
    do the losses. It takes `profile_steps` + 2 steps to measure, and then twice as many in which plan and start take
    turns, to see whether the plan keeps its promise; if it does not, the start stays. The log of the first rank tells
    what happens.

    Args:
        stages, n_microbatches, loss_fn, args, options: as for every schedule of zbpipe's.
        memory_limit: activations that a rank may hold, in microbatches of a rank's average share of the model, as
            1F1B on p ranks holds p; default: p.
        profile_steps: how many steps are timed of each, the start and the plan.
        budget: for the search, see `zbpipe.plan`.
        group: all ranks of the job that run this schedule, those of other replicas too; default: all ranks of the job.
        measured: called with the costs on every rank, once they are there.

    Raises:
        ValueError: as every schedule, and for a limit below what V-Min holds.
    """

    schedule_name = "Auto"

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *args: Any,
        memory_limit: float | None = None,
        profile_steps: int = USUAL_STEPS,
        budget: float | None = None,
        group: dist.ProcessGroup | None = None,
        measured: Callable[[JobCosts], None] = lambda costs: None,
        **options: Any,
    ) -> None:
        super().__init__(stages, n_microbatches, loss_fn, *args, **options)
        self.outcome: Outcome | None = None
        """None as long as it is at it."""
        self._limit = float(self._placement.num_ranks if memory_limit is None else memory_limit)
        self._group = group
        self._budget = budget
        self._measured = measured
        self._num_steps = profile_steps
        self.adopt(start_within(self._limit, self._placement, n_microbatches))
        self._profiler = Profiler(self, profile_steps, group=group, done=self._plan)

    def _plan(self, costs: JobCosts) -> None:
        model = costs.costs
        assert isinstance(model, CostModel), "the profiler measures stages"
        self._measured(costs)
        self.adopt(self.schedule, model)
        start = self.schedule
        expected = simulate(start, model, transport=self.transport, receives=self.receives).makespan
        measured = self._step_seconds(self._profiler.records)
        proposal = self._from_first_rank(lambda: self._search(costs))
        outcome = Outcome(start.name, start.name, expected, proposal.expected, measured, None)
        self._tell(f"{start.name} takes {measured:.4g} s a step, simulated {expected:.4g} s; {proposal.words}")
        if proposal.expected > expected * _WORTH_IT:
            self.outcome = outcome
            self._tell(f"stays with {start.name}")
            return

        def decide(of_plan: Sequence[StepRecord], of_start: Sequence[StepRecord]) -> None:
            after, before = self._step_seconds(of_plan), self._step_seconds(of_start)
            self.adopt(start if after > before else planned)
            self.outcome = replace(outcome, chosen=self.schedule.name, measured_before=before, measured_after=after)
            self._tell(
                f"in turn, the plan takes {after:.4g} s a step and {start.name} {before:.4g} s, simulated"
                f" {proposal.expected:.4g} and {expected:.4g} s; goes on with {self.schedule.name}"
            )

        planned = Schedule.from_csv(proposal.table, "plan")
        watch(self, _InTurn(self, planned, start, self._num_steps, decide))

    def _search(self, job: JobCosts) -> _Proposal:
        num_ops = 3 * self._placement.num_stages * self._n_microbatches
        budget = self._budget or (_WORK if num_ops > _MANY_OPS else None)
        try:
            limits = memory_limits(self._limit, self.schedule, job.stages(self._placement))
            job = replace(job, placement=self._placement, memory_limit=limits, transport=self.transport)
            found = plan(self._placement.num_ranks, self._n_microbatches, job, budget=budget)
        except ValueError as error:
            return _Proposal("", float("inf"), f"there is no plan: {error}")
        words = (
            f"the plan found by {found.found_by} should take {found.makespan:.4g} s, at most {found.gap:.1%} more than"
            f" the best possible, with a peak of {max(found.timeline.peak_activations):.3g} microbatches"
        )
        return _Proposal(found.schedule.to_csv(), found.makespan, words)

    def _step_seconds(self, records: Sequence[StepRecord]) -> float:
        """The median step of all ranks, each as long as its slowest rank."""
        mine = [record.seconds for record in records]
        by_rank: list[list[float]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, mine, group=self._group)
        return float(median(map(max, zip(*by_rank, strict=True))))

    def _from_first_rank(self, make: Callable[[], _Proposal]) -> _Proposal:
        made: list[Any] = [make() if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(made, group=self._group, group_src=0)
        proposal: _Proposal = made[0]
        return proposal

    def _tell(self, words: str) -> None:
        if dist.get_rank(self._group) == 0:
            logger.info("Auto: %s", words)


class _InTurn:
    """Runs two schedules in turn, step by step, so that a machine that gets faster or slower does so for both."""

    def __init__(
        self,
        runtime: AutoSchedule,
        first: Schedule,
        second: Schedule,
        times: int,
        done: Callable[[Sequence[StepRecord], Sequence[StepRecord]], None],
    ) -> None:
        self._runtime = runtime
        self._done = done
        # The first one of a schedule finds its memory.
        self._coming = [first, *[first, second] * times][::-1]
        self._records: list[StepRecord] = []

    def before(self) -> Wanted:
        if not self._coming:
            return Wanted.NOTHING
        self._runtime.adopt(self._coming.pop())
        return Wanted.TIMES

    def after(self, record: StepRecord) -> None:
        self._records.append(record)
        if not self._coming:
            _, *records = self._records
            self._done(records[::2], records[1::2])


def start_within(limit: float, placement: Placement, microbatches: int) -> Schedule:
    """The shortest of the schedules to begin with that keeps to `limit`, in microbatches of a rank's share.

    Raises:
        ValueError: all of them hold more.
    """
    for schedule in starts(placement.num_ranks, microbatches):
        peak = max(simulate(schedule, CostModel.uniform(placement)).peak_activations)
        if peak <= limit:
            return schedule
    raise ValueError(
        f"memory_limit={limit:g} is too little for Auto, whose most sparing schedule, {schedule.name},"
        f" holds {peak:g} microbatches of a rank's share on {placement.num_ranks} ranks: raise it, or use smaller"
        " microbatches"
    )


def memory_limits(limit: float, start: Schedule, costs: CostModel) -> tuple[float, ...]:
    """By rank the activations that it may hold, in the unit of `costs.activations`: `limit` average shares.

    At least what `start` holds, which has shown that there is room for it.
    """
    room = limit * sum(costs.activations) / start.placement.num_ranks
    return tuple(max(room, held) for held in simulate(start, costs).peak_memory)
