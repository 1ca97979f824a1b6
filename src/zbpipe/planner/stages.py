"""The best schedule for stages whose costs are known, on any of the placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from zbpipe import registry
from zbpipe.costs import CostModel, least_room
from zbpipe.frozen import FrozenDict
from zbpipe.ir import Placement, require_size
from zbpipe.planner.engine import PLAIN, Engine, fastest
from zbpipe.planner.exact import prove
from zbpipe.planner.problem import Problem
from zbpipe.planner.request import Objective, Request
from zbpipe.planner.result import Plan
from zbpipe.planner.search import Found, Progress, Search
from zbpipe.simulation import simulate
from zbpipe.timeline import Timeline
from zbpipe.transport import Transport

CostsOf = Callable[[Placement], CostModel]

_MOST_CANDIDATES = 64
"""Candidates that are simulated with a transport that has queues. Chosen by hand: each takes tens of milliseconds."""
_NEAR = 1 - 1e-9
"""What rounding may take from a limit that is just enough."""


def plan_stages(request: Request, costs_of: CostsOf, progress: Progress) -> Plan:
    """The best schedule found for these stages.

    Args:
        request: with placements that all have costs.
        costs_of: the costs of a placement's stages.
        progress: called with the share of the budget that is used, and the shortest time so far.

    Raises:
        ValueError: stages that are too many, or a limit too small for even one microbatch.
    """
    problems = [
        problem_of(request, name, placement, costs_of(placement)) for name, placement in request.placements.items()
    ]
    engine = fastest()
    search = Search(problems, request.budget or default_budget(problems, engine), request.seed, engine, progress)
    found = search.run(_named_schedules(problems))
    bounds = {problem.name: problem.lower_bound for problem in problems}
    if request.exact:
        found, proven = prove(search.by_placement)
        bounds |= proven
    found, timeline = _shortest([found, *search.kept], request.transport, request.objective)
    return Plan(timeline, found.problem.name, found.by, request.objective, request.limits, FrozenDict(bounds))


def default_budget(problems: Sequence[Problem], engine: Engine = PLAIN) -> float:
    """A second or so of one core for 8 ranks and 32 microbatches, and no less; larger jobs get more."""
    most = max(problem.num_ops for problem in problems)
    return max(1e8, 7e4 * float(most**0.85)) / (1 if engine.compiled else 30)


def fits(placement: Placement, costs: CostModel, limits: Sequence[float] | None) -> bool:
    """Whether every rank can hold one microbatch."""
    return limits is None or not _too_small(least_room(placement, costs), limits)


def problem_of(request: Request, name: str, placement: Placement, costs: CostModel) -> Problem:
    """The search's problem on one placement.

    Raises:
        ValueError: stages that are too many, or a limit too small for even one microbatch.
    """
    require_size(f"the placement {name}", placement.num_stages, request.microbatches)
    least = least_room(placement, costs)
    all_at_once = tuple(request.microbatches * needed for needed in least)
    limits = request.limits or all_at_once
    if short := _too_small(least, limits):
        rank = max(short, key=least.__getitem__)
        raise ValueError(
            f"memory_limit = {limits[rank]:.12g} is too small: one microbatch peaks at {least[rank]:.12g} on rank"
            f" {rank}; give at least that, or cut the batch into more microbatches"
        )
    limits = tuple(limit if limit < inf else room for limit, room in zip(limits, all_at_once, strict=True))
    return Problem(name, placement, costs, request.microbatches, limits, request.objective == "longest_rank_span")


def _too_small(least: Sequence[float], limits: Sequence[float]) -> list[int]:
    """The ranks that cannot hold one microbatch, which needs `least` there."""
    return [rank for rank, needed in enumerate(least) if not limits[rank] >= needed * _NEAR]


def _shortest(candidates: Sequence[Found], transport: Transport, objective: Objective) -> tuple[Found, Timeline]:
    """The candidate with the shortest step under the transport; with the ideal one the first, which is the best."""

    def timeline_of(found: Found) -> Timeline:
        schedule = found.problem.schedule(f"plan-{found.problem.name}", found.order)
        return simulate(schedule, found.problem.costs, transport=transport)

    best, timeline = candidates[0], timeline_of(candidates[0])
    if transport is Transport.IDEAL:
        return best, timeline
    others = {(each.problem.name, each.order): each for each in candidates}
    for each in sorted(others.values(), key=lambda found: found.length)[:_MOST_CANDIDATES]:
        # Queues make nothing shorter.
        if each.length >= getattr(timeline, objective):
            break
        trial = timeline_of(each)
        if getattr(trial, objective) < getattr(timeline, objective):
            best, timeline = each, trial
    return best, timeline


def _named_schedules(problems: Sequence[Problem]) -> Iterator[tuple[Problem, list[int], str]]:
    """Every named schedule that has one of the placements and keeps to the limits: its order, and its name."""
    for problem in problems:
        for algorithm in registry.schedules().values():
            if "costs" in algorithm.keywords:  # searched with less effort than this search makes
                continue
            if order := _order(problem, algorithm):
                yield problem, order, algorithm.name


def _order(problem: Problem, algorithm: registry.Algorithm) -> list[int] | None:
    """The named schedule for this problem, None if there is none."""
    placement = problem.placement
    stages = len(placement.stages_on(0)) if algorithm.any_stages_per_rank else None
    try:
        if algorithm.place(placement.num_ranks, stages) != placement:
            return None
        schedule = registry.generate(
            algorithm.name, placement.num_ranks, problem.num_microbatches, stages_per_rank=stages
        )
        return problem.order(schedule) if problem.fits(schedule) else None
    except Exception:  # a broken function of an installed package is no reason to end the search
        return None
