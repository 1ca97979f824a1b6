"""Plans that stand jitter: the schedule with the least quantile of the step's times.

A message that comes late is the same to who waits as one that takes long. So the search runs several times with links
that take longer by more and more of what is to be expected, which leaves slack where ranks wait for each other. Of what
it finds, and of the named schedules, the one that is best in a simulation with random times wins (`zbpipe.jitter`).
PipeMorph (2504.19232) shows what slack is worth where links are late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from zbpipe.costs import CostModel, Link
from zbpipe.ir import Placement, Schedule
from zbpipe.jitter import Jitter, StepTimes, step_times
from zbpipe.planner.problem import Problem
from zbpipe.planner.request import Request
from zbpipe.planner.result import Plan
from zbpipe.planner.search import Progress
from zbpipe.planner.stages import CostsOf, named_schedules, plan_stages, problem_of
from zbpipe.simulation import simulate
from zbpipe.transport import Transport

_SLACKS = (0.0, 0.5, 1.0, 2.0, 3.0)
"""How many times what is to be expected is added to each link. Chosen by hand: more makes steps longer."""
_DRAWS = 300
"""Steps to compare candidates by."""
_FINALISTS = 4
"""Candidates that are compared by more draws."""
_FINAL_DRAWS = 2000
_SEED = 1
"""Of the draws; users who look at a plan with another one see other luck."""


def plan_robust(
    request: Request, jitter: Jitter, quantile: float, most_loss: float, costs_of: CostsOf, progress: Progress
) -> Plan:
    """The schedule within the limits whose step times have the least `quantile`.

    Args:
        request: with placements that all have costs.
        jitter: what varies.
        quantile: between 0 and 1.
        most_loss: by how much of the shortest step known its step may be longer where nothing varies; from 0 on.
        costs_of: the costs of a placement's stages.
        progress: called with the share of the work that is done, and the shortest time so far.

    Raises:
        ValueError: a quantile outside of 0 to 1, a loss below 0, an objective or a transport that jitter is not
            simulated for, or a limit too small for even one microbatch.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"quantile = {quantile!r} has to be between 0 and 1, for example 0.95")
    if not most_loss >= 0:
        raise ValueError(f"most_loss = {most_loss!r} has to be 0 or more; 0.01 allows steps that are 1 % longer")
    if request.objective != "makespan" or request.transport is not Transport.IDEAL or request.exact:
        raise ValueError(
            "a robust plan is for synchronous steps with the ideal transport: leave objective, transport and exact out"
        )
    costs = {name: costs_of(placement) for name, placement in request.placements.items()}
    problems = [problem_of(request, name, placement, costs[name]) for name, placement in request.placements.items()]
    found = dict(_candidates(request, jitter, problems, progress))
    seconds = {schedule: simulate(schedule, costs[name]).makespan for schedule, (name, _) in found.items()}
    longest = min(seconds.values()) * (1 + most_loss) * (1 + 1e-9)
    found = {schedule: names for schedule, names in found.items() if seconds[schedule] <= longest}

    def reached(draws: int) -> dict[Schedule, StepTimes]:
        return {
            schedule: step_times(schedule, costs[name], jitter, draws=draws, seed=_SEED)
            for schedule, (name, _) in found.items()
        }

    def best_first(times: dict[Schedule, StepTimes]) -> list[Schedule]:
        return sorted(times, key=lambda schedule: times[schedule].quantile(quantile))

    found = {schedule: found[schedule] for schedule in best_first(reached(_DRAWS))[:_FINALISTS]}
    times = reached(_FINAL_DRAWS)
    best = best_first(times)[0]
    name, found_by = found[best]
    bounds = {problem.name: problem.lower_bound for problem in problems}
    timeline = simulate(best, costs[name])
    return Plan(timeline, name, found_by, request.objective, request.limits, bounds, step_times=times[best])


def _candidates(
    request: Request, jitter: Jitter, problems: Sequence[Problem], progress: Progress
) -> Iterator[tuple[Schedule, tuple[str, str]]]:
    """Schedules within the limits, with the names of their placements and how they were found."""
    searches = len(_SLACKS) * len(problems)
    done = 0
    for problem in problems:
        name, placement = problem.name, problem.placement
        for _, order, found_by in named_schedules([problem]):
            yield problem.schedule(f"plan-{name}", order), (name, found_by)
        one = replace(request.part(searches), placements={name: placement})
        for slack in _SLACKS:
            slower = with_slack(placement, problem.costs, jitter, slack)
            plan = plan_stages(one, lambda _, costs=slower: costs, lambda share, best: None)  # type: ignore[misc]
            done += 1
            progress(done / searches, plan.makespan)
            yield plan.schedule, (name, f"{plan.found_by}, with slack" if slack else plan.found_by)


def with_slack(placement: Placement, costs: CostModel, jitter: Jitter, slack: float) -> CostModel:
    """The costs with all that is known to be slow, and links that take longer by so many times what varies.

        >>> placement = Placement.loop(2)
        >>> slower = with_slack(placement, CostModel.uniform(placement), Jitter(delay=0.25), slack=2)
        >>> slower.transfer(0, 1)
        0.5

    Args:
        placement: of the stages.
        costs: of the stages.
        jitter: what varies.
        slack: from 0 on.
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
