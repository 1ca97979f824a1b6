"""The planner's entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from zbpipe.costs.job import CostsOf, JobCosts, MemoryLimit, MemoryLimitLike, as_cost_model
from zbpipe.costs.layers import LayerCosts
from zbpipe.costs.model import CostModel, Transport
from zbpipe.planner.request import PLACEMENTS, Objective, Request, name_placements
from zbpipe.planner.result import Plan
from zbpipe.planner.search import Progress, report_nothing
from zbpipe.planner.stages import plan_layers, plan_stages
from zbpipe.schedule import registry
from zbpipe.schedule.ir import Placement, require_size, require_whole
from zbpipe.simulator import lower_bound as bound
from zbpipe.simulator.offloading import Offload, OverLimitError, require_host
from zbpipe.simulator.offloading import offload as add_offload
from zbpipe.simulator.simulation import simulate

Costs = JobCosts | CostModel | LayerCosts | Sequence[float] | Callable[[Placement], CostModel]
_LOOSER = (1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, None)
"""Factors by which the search's limits exceed the ranks'. None means no limit."""


# Callers need different subsets of the arguments. All but four are keyword-only.
def plan(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: MemoryLimitLike | None = None,
    *,
    placements: str | Placement | Iterable[str | Placement] | None = None,
    objective: Objective = "makespan",
    budget: float | None = None,
    seed: int = 0,
    transport: Transport | str | None = None,
    offload: Offload | str | bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search for the schedule with the shortest step within the memory limit.

        >>> found = plan(2, 4, (1.0, 1.2, 0.8), memory_limit=1.5, budget=1e4)
        >>> found.makespan <= 15.5 and max(found.timeline.peak_memory) <= 1.5
        True

    For layers, it also searches for the split into stages. The result has the layers of each stage:

        >>> from zbpipe.costs import Layer, LayerCosts
        >>> blocks = [Layer((f"layers.{n}",), f=1, i=1, w=1, activations=1e9) for n in range(3)]
        >>> head = Layer(("norm", "lm_head"), f=2, i=2, w=2, activations=1e9)
        >>> plan(2, 2, LayerCosts((*blocks, head)), placements=["single"], budget=1e4).module_fqns_per_model_part
        [['layers.0', 'layers.1', 'layers.2'], ['norm', 'lm_head']]

    Args:
        ranks: pipeline ranks, at least 1.
        microbatches: at least 1.
        costs: one of
            - costs of a job, from `zbpipe.Profiler` or `zbpipe.load_costs`; its placement, memory limit and transport
              are defaults for the arguments here;
            - a CostModel: only placements with its number of stages are tried;
            - LayerCosts: the layers are cut into stages, on each placement with no more stages than layers;
            - seconds of F, I and W of one microbatch on a rank, all its stages together;
            - a function from a placement to a CostModel.
        memory_limit: see `zbpipe.costs.MemoryLimit`. Default: no limit.
        placements: some of "single", "loop", "v" and "wave", or placements. Default: these four.
        objective: the time to minimise: "makespan" of a synchronous step, or "period" if `zbpipe.OptimizerStep` lets
            ranks run ahead (with queues: the longest time from a rank's first op to its last).
        budget: number of ops that the search may time. Default: about a second. Layers get it for the best split and
            for TorchTitan's even split, besides the short searches that compare splits.
        seed: seed of the search's random numbers.
        transport: which messages wait for each other; default: none. The search ignores queues. Of all orders found and
            the named schedules, the plan has the shortest step under this transport. The bounds hold for all.
        offload: memory that may be offloaded to the host: "pairs" (deferred gradients), "activations" or "all"
            (also True). The costs need `host`. The plan is the best of the named schedules and of several searches,
            which share the budget. Copies that delay no op make them fit. Without a limit, the plan offloads as much as
            costs no time.
        progress: called with the completed share of the work, and the shortest time so far.

    ValueError if no schedule can have these numbers, a name is unknown, the costs fit none of the placements, there are
    fewer layers than stages, the limit is too small for one microbatch, or a period with offload is requested.
    """
    ranks, microbatches = require_whole(1, ranks=ranks, microbatches=microbatches)
    require_size(f"a plan for {ranks} ranks", ranks, microbatches)
    if isinstance(costs, JobCosts):
        costs.require_ranks(ranks)
        placements = costs.placement if placements is None else placements
        memory_limit = costs.memory_limit if memory_limit is None else memory_limit
        transport = costs.transport if transport is None else transport
        costs = costs.costs
    if progress is not None and not callable(progress):
        raise TypeError(f"progress = {progress!r} is not a function (share, best)")
    limit = MemoryLimit.parse(memory_limit)
    known = costs if isinstance(costs, (CostModel, LayerCosts)) else _costs_of(costs)
    request = Request(
        ranks,
        microbatches,
        name_placements(ranks, PLACEMENTS if placements is None else placements),
        limit.resolve(known, ranks, microbatches) if limit else None,
        objective,
        budget,
        seed,
        Transport.IDEAL if transport is None else Transport.parse(transport),
    )
    report = progress or report_nothing
    wanted = Offload.read(offload)
    if wanted is not None and objective == "period":
        raise ValueError(
            f"offload = {offload!r} and objective = 'period' exclude each other: schedules with copies to the host"
            " cannot run ahead of an optimizer step; omit one of them"
        )
    if isinstance(costs, CostModel):
        fitting = {name: each for name, each in request.placements.items() if each.num_stages == costs.num_stages}
        if not fitting:
            raise ValueError(
                f"the costs are for {costs.num_stages} stages, and no placement has that number on {ranks} ranks;"
                " name one that does, or pass a function that gives a CostModel for any placement"
            )
        request = replace(request, placements=fitting)

    def search(request: Request) -> Plan:
        with limit.explain(known, ranks, microbatches) if limit else nullcontext():
            if isinstance(costs, LayerCosts):
                return plan_layers(request, costs, report)
            return plan_stages(request, _costs_of(costs), report)

    if wanted is None:
        return search(request)
    return _plan_offloaded(request, wanted, search, None if isinstance(costs, LayerCosts) else _costs_of(costs))


def _costs_of(costs: Any) -> CostsOf:
    if not callable(costs):
        return lambda placement: as_cost_model(costs, placement)

    def call(placement: Placement) -> CostModel:
        try:
            return as_cost_model(costs(placement), placement)
        except TypeError as error:
            raise TypeError(f"the function given as costs, called with a placement: {error}") from error

    return call


def _plan_offloaded(
    request: Request, what: Offload, search: Callable[[Request], Plan], costs_of: CostsOf | None
) -> Plan:
    """The best of named schedules, and of plans of `search` under looser limits, which copies make fit. Without limits
    it is the plan itself. `costs_of` is None if the search cuts the stages."""
    if request.limits is None:
        return _add_copies(search(request), request, what)
    found: list[Plan] = []
    refusals: list[ValueError] = []
    bounds: dict[str, float] = {}
    for plan in (*_search_looser(request, search, refusals), *_plan_named(request, costs_of)):
        require_host(plan.timeline.costs)
        bounds |= plan.bounds
        try:
            found.append(_add_copies(plan, request, what))
        except OverLimitError as error:
            refusals.append(error)
    if not found:
        known = [error for error in refusals if isinstance(error, OverLimitError)]
        raise min(known, key=lambda error: error.args[1]) if known else refusals[0]
    best = min(found, key=lambda each: (each.reached, sum(map(len, each.timeline.copies))))
    # With copies, the only known lower bound of a step is the one without any limit.
    return replace(best, bounds={name: bounds[name] for name in request.placements if name in bounds} or best.bounds)


def _search_looser(request: Request, search: Callable[[Request], Plan], refusals: list[ValueError]) -> Iterator[Plan]:
    """Plans under looser and looser limits. The last has none, so its bounds hold for all."""
    one = replace(request, budget=request.budget and request.budget / len(_LOOSER), share=1 / len(_LOOSER))
    for factor in _LOOSER:
        limits = None if factor is None else tuple(factor * limit for limit in request.limits or ())
        try:
            yield search(replace(one, limits=limits))
        except ValueError as error:  # the limit is too low for one microbatch
            refusals.append(error)


def _plan_named(request: Request, costs_of: CostsOf | None) -> Iterator[Plan]:
    """The named schedules on the placements, without a limit."""
    for name, placement in request.placements.items():
        if costs_of is None:
            return
        costs = costs_of(placement)
        bounds = {name: bound.lower_bound(placement, costs, request.microbatches)}
        for algorithm in registry.schedules().values():
            try:
                schedule = algorithm.make_on(placement, request.microbatches, costs=costs)
            except Exception:  # a broken function of an installed package does not end the search
                continue
            if schedule is not None:
                timeline = simulate(replace(schedule, name=f"plan-{name}"), costs, transport=request.transport)
                yield Plan(timeline, name, algorithm.name, request.objective, request.limits, bounds)


def _add_copies(plan: Plan, request: Request, what: Offload) -> Plan:
    transport, costs = plan.timeline.transport, plan.timeline.costs
    schedule = add_offload(plan.schedule, costs, request.limits, what=what, transport=transport)
    if not schedule.has_copies:
        return replace(plan, limits=request.limits)
    timeline = simulate(schedule, costs, transport=transport)
    return replace(plan, timeline=timeline, limits=request.limits, found_by=f"{plan.found_by}, offload", even=None)
