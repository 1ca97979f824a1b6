"""Plans for stages with known costs: the best schedule on any of the placements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from zbpipe.costs.memory_limit import CostsOf
from zbpipe.costs.model import CostModel, least_room, most_room, require_room, too_small
from zbpipe.costs.transport import Transport
from zbpipe.planner.engine import Engine, fastest
from zbpipe.planner.lean import fit_within
from zbpipe.planner.problem import Problem
from zbpipe.planner.request import Objective, Request
from zbpipe.planner.result import Plan
from zbpipe.planner.search import Found, Progress, Search, report_nothing
from zbpipe.planner.tails import hide_reductions
from zbpipe.schedule import registry
from zbpipe.schedule.ir import Placement, require_size
from zbpipe.simulator.post_validation import period_of
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline

_MOST_CANDIDATES = 64
"""Number of candidates simulated with a transport that has queues. Chosen by hand: each takes tens of milliseconds."""


def plan_stages(request: Request, costs_of: CostsOf, progress: Progress = report_nothing) -> Plan:
    """The best schedule found for these stages. All placements of the request have costs.

    ValueError for too many stages, or a limit too small for even one microbatch.
    """
    problems = [
        make_problem(request, name, placement, costs_of(placement)) for name, placement in request.placements.items()
    ]
    engine = fastest()
    budget = request.budget or request.share * default_budget(problems, engine)
    search = Search(problems, budget, engine, seed=request.seed, progress=progress)
    found = search.run(make_named_schedules(problems))
    bounds = {problem.name: problem.bound_with_fsdp for problem in problems}
    found, timeline = _find_shortest([found, *search.kept], request.transport, request.objective)
    return Plan(timeline, found.problem.name, found.by, request.objective, request.limits, bounds)


def default_budget(problems: Sequence[Problem], engine: Engine) -> float:
    """About a second of one core for 8 ranks and 32 microbatches, and no less. Larger jobs get more."""
    most = max(problem.num_ops for problem in problems)
    return max(1e8, 7e4 * float(most**0.85)) / (1 if engine.compiled else 30)


def fits(placement: Placement, costs: CostModel, limits: Sequence[float] | None) -> bool:
    """Whether every rank can hold one microbatch."""
    return limits is None or not too_small(least_room(placement, costs), limits)


def make_problem(request: Request, name: str, placement: Placement, costs: CostModel) -> Problem:
    """The search's problem on one placement."""
    require_size(f"the placement {name}", placement.num_stages, request.microbatches)
    with_fsdp = costs if costs.gather or costs.reduce else None
    costs = replace(costs, gather=0.0, reduce=0.0)
    limits = request.limits or (inf,) * request.ranks
    require_room(placement, costs, limits)
    # Numbers that no order reaches mean no limit.
    most = most_room(placement, costs, request.microbatches)
    limits = tuple(limit if limit < inf else room for limit, room in zip(limits, most, strict=True))
    return Problem(name, placement, costs, request.microbatches, limits, request.objective == "period", with_fsdp)


def _find_shortest(candidates: Sequence[Found], transport: Transport, objective: Objective) -> tuple[Found, Timeline]:
    """The candidate with the shortest step under the transport, with FSDP's collectives. With the ideal transport and
    none of these, the first and best one."""

    def timeline_of(found: Found) -> Timeline:
        schedule = found.problem.schedule(f"plan-{found.problem.name}", found.order)
        costs = found.problem.full_costs
        return simulate(hide_reductions(schedule, costs), costs, transport=transport)

    def length(timeline: Timeline) -> float:
        return timeline.makespan if objective == "makespan" else period_of(timeline)

    best, timeline = candidates[0], timeline_of(candidates[0])
    if transport is Transport.IDEAL and not any(each.problem.with_fsdp for each in candidates):
        return best, timeline
    others = {(each.problem.name, each.order): each for each in candidates}
    for each in sorted(others.values(), key=lambda found: found.length)[:_MOST_CANDIDATES]:
        # Neither queues nor collectives shorten anything.
        if each.length >= length(timeline):
            break
        trial = timeline_of(each)
        if length(trial) < length(timeline):
            best, timeline = each, trial
    return best, timeline


def make_named_schedules(problems: Sequence[Problem]) -> Iterator[tuple[Problem, list[int], str]]:
    """Every named schedule on its placement, made lean within the limits: its problem, order, and description."""
    for problem in problems:
        for algorithm in registry.schedules().values():
            # Skip schedules that are searched themselves. They take as long as this search with less effort, and begin
            # with the same lean forms of known schedules.
            if "costs" in algorithm.keywords:
                continue
            if found := _order(problem, algorithm):
                yield problem, *found


def _order(problem: Problem, algorithm: registry.Algorithm) -> tuple[list[int], str] | None:
    """The named schedule for this problem, and its description. None if there is none."""
    try:
        schedule = algorithm.make_on(problem.placement, problem.num_microbatches)
        if schedule is None:
            return None
        if problem.fits(schedule):
            return problem.order(schedule), algorithm.name
        lean = fit_within(schedule, problem.costs, problem.limits)
        return (problem.order(lean), f"{algorithm.name} made lean") if problem.fits(lean) else None
    except Exception:  # a broken function of an installed package does not end the search
        return None
