"""A short search within a memory limit that includes deferred gradients and working memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbpipe.costs.model import ROUNDING, CostModel
from zbpipe.costs.transport import Transport
from zbpipe.planner.engine import at_hand
from zbpipe.planner.lean import fit_within, make_leanest
from zbpipe.planner.problem import Problem
from zbpipe.planner.search import Effort, Search
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.simulation import simulate

_MOST_WITH_QUEUES = 3
"""Number of orders simulated if messages share queues with compute. Chosen by hand: each takes 0.2 seconds."""
_BUDGET = 5e5
"""Budget of one search, in ops placed and timed: some 0.2 seconds without numba."""


def find_best(
    name: str,
    seeds: Sequence[Schedule],
    costs: CostModel,
    limits: Sequence[float],
    transport: Transport | None = None,
) -> Schedule:
    """The shortest schedule within `limits` that a short search finds from lean forms of `seeds`. Ties: the leanest.

    All seeds have the same placement and number of microbatches. With messages that share queues with compute, the
    shortest step is the one under that transport. Other transports make no difference.
    """
    placement, microbatches = seeds[0].placement, seeds[0].num_microbatches
    problem = Problem("", placement, costs, microbatches, tuple(limits))
    search = Search([problem], _BUDGET, at_hand(), effort=Effort.quick(_BUDGET, problem.num_ops))
    leanest = [make_leanest(seed, costs) for seed in seeds]
    forms = (
        form
        for seed, least in zip(seeds, leanest, strict=True)
        for form in (fit_within(seed, costs, problem.limits), least)
    )
    search.run((problem, problem.order(form), form.name) for form in dict.fromkeys(forms) if problem.fits(form))
    if transport is Transport.SHARED:
        found = sorted({each.order: each for each in search.kept}.values(), key=lambda each: each.length)
        best = [problem.schedule(name, each.order) for each in found[:_MOST_WITH_QUEUES]]
        fitting = (*best, *(replace(each, name=name) for each in leanest if problem.fits(each)))
        return min(fitting, key=lambda each: simulate(each, costs, transport=transport).makespan)
    shortest = [each.order for each in search.kept if each.length <= search.shortest * (1 + ROUNDING)]
    schedules = [problem.schedule(name, order) for order in dict.fromkeys(shortest)]
    return min(schedules, key=lambda each: max(simulate(each, costs).peak_memory))
