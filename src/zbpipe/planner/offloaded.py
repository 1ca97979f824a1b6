"""Plans that offload: schedules above the memory limit, with copies to the host that make them fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from zbpipe.costs.memory_limit import CostsOf
from zbpipe.planner.request import Request
from zbpipe.planner.result import Plan
from zbpipe.schedule import registry
from zbpipe.simulator import lower_bound as bound
from zbpipe.simulator.offloading import LimitTooSmallError, Offload, offload, require_host
from zbpipe.simulator.simulation import simulate

_LOOSER = (1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, None)
"""Factors by which the limits of the search exceed those of the ranks. None means no limit."""


def plan_offloaded(
    request: Request, what: Offload, search: Callable[[Request], Plan], costs_of: CostsOf | None
) -> Plan:
    """The best of named schedules, and of plans under looser limits, which copies make fit.

    Without limits it is the plan itself, with as little memory as costs no time.

    Args:
        request: request with the limits to keep, or none.
        what: the kinds of memory that may be copied.
        search: search for a plan that offloads nothing.
        costs_of: costs of any placement's stages. None where the search cuts the stages.
    """
    if request.limits is None:
        return _add_copies(search(request), request, what)
    found: list[Plan] = []
    refusals: list[ValueError] = []
    bounds: dict[str, float] = {}
    for plan in (*_search(request, search, refusals), *_plan_named(request, costs_of)):
        require_host(plan.timeline.costs)
        bounds |= plan.bounds
        try:
            found.append(_add_copies(plan, request, what))
        except LimitTooSmallError as error:
            refusals.append(error)
    if not found:
        known = [error for error in refusals if isinstance(error, LimitTooSmallError)]
        raise min(known, key=lambda error: error.args[1]) if known else refusals[0]
    best = min(found, key=lambda each: (each.reached, sum(map(len, each.timeline.copies))))
    # With copies, the only known lower bound of a step is the one without any limit.
    return replace(best, bounds={name: bounds[name] for name in request.placements if name in bounds} or best.bounds)


def _search(request: Request, search: Callable[[Request], Plan], refusals: list[ValueError]) -> Iterator[Plan]:
    """Plans under looser and looser limits. The last one has none, so its bounds hold for all."""
    one = request.part(len(_LOOSER))
    for factor in _LOOSER:
        limits = None if factor is None else tuple(factor * limit for limit in request.limits or ())
        try:
            yield search(replace(one, limits=limits))
        except ValueError as error:  # too little for one microbatch
            refusals.append(error)


def _plan_named(request: Request, costs_of: CostsOf | None) -> Iterator[Plan]:
    """The named schedules on the placements, with any memory."""
    for name, placement in request.placements.items() if costs_of else ():
        assert costs_of is not None
        costs = costs_of(placement)
        bounds = {name: bound.lower_bound(placement, costs, request.microbatches)}
        for algorithm in registry.schedules().values():
            try:
                schedule = algorithm.make_on(placement, request.microbatches, costs)
            except Exception:  # a broken function of an installed package does not end the search
                continue
            if schedule is not None:
                timeline = simulate(replace(schedule, name=f"plan-{name}"), costs, transport=request.transport)
                yield Plan(timeline, name, algorithm.name, request.objective, request.limits, bounds)


def _add_copies(plan: Plan, request: Request, what: Offload) -> Plan:
    transport, costs = plan.timeline.transport, plan.timeline.costs
    schedule = offload(plan.schedule, costs, request.limits, what=what, transport=transport)
    if not schedule.has_copies:
        return replace(plan, limits=request.limits)
    timeline = simulate(schedule, costs, transport=transport)
    return replace(plan, timeline=timeline, limits=request.limits, found_by=f"{plan.found_by}, offload", even=None)
