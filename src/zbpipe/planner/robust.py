"""Plans that tolerate jitter: the schedule with the least quantile of the step times.

A late message costs its receiver as much as a long one. So the search runs several times, with each link slowed by a
larger multiple of its expected delay. That leaves slack where ranks wait for each other. The best plans and named
schedules are then annealed in many samples of the times at once. This moves the slack to where it gains most. The
winner is the best with other random times (`zbpipe.simulator.jitter`). PipeMorph (2504.19232) measures the gain from
slack where links are late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, pstdev
from typing import Any

import numpy as np

from zbpipe.costs.baseline import CostsOf
from zbpipe.costs.model import ROUNDING, CostModel, Link
from zbpipe.costs.transport import Transport
from zbpipe.planner.engine import Engine, fastest
from zbpipe.planner.kernel import NEVER
from zbpipe.planner.problem import KINDS, Problem
from zbpipe.planner.request import Request
from zbpipe.planner.result import Plan
from zbpipe.planner.samples import Samples
from zbpipe.planner.search import Progress
from zbpipe.planner.stages import default_budget, make_named_schedules, make_problem, plan_stages
from zbpipe.planner.tails import hide_reductions
from zbpipe.schedule.ir import Op, Placement, Schedule
from zbpipe.simulator.jitter import Jitter, RandomTimes, Seconds, StepTimes, step_times
from zbpipe.simulator.simulation import simulate

_SLACKS = (0.0, 0.5, 1.0, 2.0, 3.0)
"""Multiples of its expected delay by which each link is slowed. Chosen by hand: more makes steps longer."""
_SAMPLES = 300
"""Number of simulated steps for comparing candidates."""
_FINALISTS = 4
"""Number of annealed candidates."""
ANNEALING_SAMPLES = 128
"""Number of samples for annealing. With fewer samples an order suits only these."""
_ANNEALING = 24
"""Ops to time for each op of the budget, summed over all samples. Each takes a tenth of the time, because samples are
adjacent in memory. So annealing takes two to three times as long as the searches before it."""
_HEAT = 1.0
"""Loss allowed for a move at the start, in mean times of an op. Chosen by hand: a fifth and four times as much also do
well."""
_SEARCHING = 0.3
"""Share of the searches in all work, for the progress."""
_BY = "annealing in samples"
_FINAL_SAMPLES = 2000
_SEED, ANNEALING_SEED = 1, 2
"""Seeds of the samples. Users who simulate a plan with another seed see other times."""


def plan_robust(
    request: Request, jitter: Jitter, quantile: float, most_loss: float, costs_of: CostsOf, progress: Progress
) -> Plan:
    """The schedule within the limits with the least `quantile` of its step times; see `zbpipe.plan`."""
    if not 0 < quantile < 1:
        raise ValueError(f"quantile = {quantile!r} has to be between 0 and 1, for example 0.95")
    if not most_loss >= 0:
        raise ValueError(f"most_loss = {most_loss!r} has to be 0 or more; 0.01 allows steps that are 1 % longer")
    if request.objective != "makespan" or request.transport is not Transport.IDEAL or request.exact:
        raise ValueError(
            "a robust plan is for synchronous steps with the ideal transport: omit objective, transport and exact"
        )
    problems = [
        make_problem(request, name, placement, costs_of(placement)) for name, placement in request.placements.items()
    ]
    found = list(_candidates(request, jitter, problems, progress))
    longest = min(each.makespan for each in found) * (1 + most_loss) * (1 + ROUNDING)
    search = Annealing(request, jitter, quantile, longest, progress)
    best, times = search.run(found)
    timeline = simulate(best.schedule, best.problem.full_costs)
    bounds = {problem.name: problem.bound_with_fsdp for problem in problems}
    return Plan(timeline, best.problem.name, best.by, request.objective, request.limits, bounds, step_times=times)


@dataclass(frozen=True)
class _Candidate:
    """A schedule within the limits."""

    problem: Problem
    schedule: Schedule
    by: str
    """Searches that led to it."""

    @classmethod
    def make(cls, problem: Problem, schedule: Schedule, by: str) -> _Candidate:
        """The schedule, with ends that hide FSDP's reductions."""
        return cls(problem, hide_reductions(schedule, problem.full_costs), by)

    @property
    def makespan(self) -> float:
        """Seconds of a step without jitter."""
        return simulate(self.schedule, self.problem.full_costs).makespan


def _candidates(
    request: Request, jitter: Jitter, problems: Sequence[Problem], progress: Progress
) -> Iterator[_Candidate]:
    """Named schedules, and the best schedules for times with increasing slack."""
    searches = len(_SLACKS) * len(problems)
    done = 0
    for problem in problems:
        name, placement = problem.name, problem.placement
        for _, order, by in make_named_schedules([problem]):
            yield _Candidate.make(problem, problem.schedule(f"plan-{name}", order), by)
        one = replace(request.part(searches), placements={name: placement})
        for slack in _SLACKS:
            slower = add_slack(placement, problem.full_costs, jitter, slack)
            plan = plan_stages(one, lambda _, costs=slower: costs)  # type: ignore[misc]
            done += 1
            progress(_SEARCHING * done / searches, plan.makespan)
            yield _Candidate.make(problem, plan.schedule, f"{plan.found_by}, with slack" if slack else plan.found_by)


class Annealing:
    """Annealing over samples: a short run for each of the best candidates, then a long one for the best of them."""

    def __init__(self, request: Request, jitter: Jitter, quantile: float, longest: float, progress: Progress) -> None:
        self.request = request
        self.jitter = jitter
        self.quantile = quantile
        self.longest = longest
        self.progress = progress

    def run(self, candidates: Sequence[_Candidate]) -> tuple[_Candidate, StepTimes]:
        """The best candidate or its annealed form, and its step times."""
        several = [each for each, _ in self.sort_best_first(candidates, _SAMPLES)[:_FINALISTS]]
        for number, each in enumerate(tuple(several)):
            several.append(self.anneal(each, 0.5 / _FINALISTS))
            self.progress(_SEARCHING + (1 - _SEARCHING) * 0.5 * (number + 1) / _FINALISTS, several[-1].makespan)
        best, _ = self.sort_best_first(several, _FINAL_SAMPLES)[0]
        return self.sort_best_first([best, self.anneal(best, 0.5)], _FINAL_SAMPLES)[0]

    def sort_best_first(self, candidates: Sequence[_Candidate], samples: int) -> list[tuple[_Candidate, StepTimes]]:
        """Candidates that are short enough without jitter and their step times, the shortest first, each once."""
        others = {each.schedule: each for each in reversed(candidates) if each.makespan <= self.longest}
        times = [
            (each, step_times(each.schedule, each.problem.full_costs, self.jitter, samples=samples, seed=_SEED))
            for each in others.values()
        ]
        return sorted(times, key=lambda pair: pair[1].quantile(self.quantile))

    def anneal(self, start: _Candidate, share: float) -> _Candidate:
        """The candidate after annealing with this share of the work. It need not be better in other samples."""
        problem, engine = start.problem, fastest()
        budget = self.request.budget or self.request.share * default_budget([problem], engine)
        _, order = self.order(problem, start.schedule, engine, share * _ANNEALING * budget)
        schedule = problem.schedule(start.schedule.name, order)
        return _Candidate.make(problem, schedule, start.by if start.by.endswith(_BY) else f"{start.by}, {_BY}")

    def order(self, problem: Problem, start: Schedule, engine: Engine, work: float) -> tuple[float, list[int]]:
        """The least value of the objective, and its order."""
        mean = problem.job.mean
        rows = [[0.0] * (ANNEALING_SAMPLES + 1)] * problem.num_ops
        return engine.anneal_in_samples(
            engine.prepare(problem.job),
            self.samples(problem, engine),
            engine.integers(problem.order(start)),
            engine.rows(rows),
            engine.rows(rows),
            _HEAT * mean,
            int(work),
            self.request.seed % 2147483646 + 1,
        )

    def samples(self, problem: Problem, engine: Engine) -> Samples:
        """Sampled times for annealing. The first sample has no jitter."""
        job, costs, rank_of = problem.job, problem.costs, problem.placement.rank_of
        times = RandomTimes(problem.placement.num_ranks, self.jitter, ANNEALING_SAMPLES, ANNEALING_SEED)
        seconds, lag = [], []
        for number, node in enumerate(job.nodes):
            (stage, kind), feeder = divmod(number, 3), node.feeder
            ranks = rank_of[feeder // 3], rank_of[stage]
            sent = feeder >= 0 and ranks[0] != ranks[1]
            usual, late = costs.seconds(stage, KINDS[kind]), costs.transfer(*ranks) if sent else 0.0
            for microbatch in range(problem.num_microbatches):
                op = Op(stage, KINDS[kind], microbatch)
                seconds.append(_row(usual, times.seconds(op, rank_of[stage], usual)))
                lag.append(_row(late, times.transfer(op, ranks, late) if sent else 0.0))
        most = min(self.longest, NEVER)
        return Samples(engine.rows(seconds), engine.rows(lag), NormalDist().inv_cdf(self.quantile), most)


def _row(usual: float, sampled: Seconds | float) -> list[float]:
    return [usual, *np.broadcast_to(sampled, ANNEALING_SAMPLES).tolist()]


def add_slack(placement: Placement, costs: CostModel, jitter: Jitter, slack: float) -> CostModel:
    """The costs with all known slow ranks and links, and links slowed by `slack` times their expected delay.

    The overhead of slow ranks stays.

    >>> placement = Placement.loop(2)
    >>> slower = add_slack(placement, CostModel.uniform(placement), Jitter(delay=0.25), slack=2)
    >>> slower.transfer(0, 1)
    0.5
    """
    ranks = range(placement.num_ranks)
    factor = [jitter.slow_ranks.get(rank, 1.0) for rank in placement.rank_of]
    times: dict[str, Any] = {
        column: tuple(seconds * by for seconds, by in zip(getattr(costs, column), factor, strict=True))
        for column in ("f", "i", "w")
    }
    op = fmean((*costs.f, *costs.i, *costs.w))
    deviation = pstdev(jitter.factors) if jitter.factors else jitter.ops
    late = jitter.delay + jitter.burst * (jitter.burst_delay + (jitter.burst_factor - 1) * op) + deviation * op

    def slower(sender: int, receiver: int) -> Link:
        link = costs.links.get((sender, receiver), costs.link)
        usual = link.seconds(costs.message_bytes)
        known = jitter.late_by(sender, receiver)
        return replace(link, latency=link.latency + known + slack * max(late + jitter.links * usual, 0.0))

    links = {(one, other): slower(one, other) for one in ranks for other in ranks if one != other}
    return replace(costs, links=links, **times)
