"""The planner's front: costs and a limit in, the best schedule found and its distance from the best possible out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from zbpipe.costs import CostModel, as_cost_model, limits_by_rank
from zbpipe.ir import Placement
from zbpipe.job_costs import JobCosts
from zbpipe.layer_costs import LayerCosts
from zbpipe.planner.partition import plan_layers
from zbpipe.planner.request import DEFAULT_PLACEMENTS, Objective, Request, named_placements, require_job
from zbpipe.planner.result import Plan
from zbpipe.planner.search import Progress
from zbpipe.planner.stages import CostsOf, plan_stages
from zbpipe.transport import Transport

Costs = JobCosts | CostModel | LayerCosts | Sequence[float] | Callable[[Placement], CostModel]
Limit = float | Sequence[float]


# The arguments are those of a search that many ask for in different ways; all but four are by name only.
def plan(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: Limit | None = None,
    *,
    placements: str | Placement | Iterable[str | Placement] | None = None,
    objective: Objective = "makespan",
    budget: float | None = None,
    seed: int = 0,
    exact: bool = False,
    transport: Transport | str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search for the schedule with the shortest step that keeps to the memory limit.

        >>> found = plan(2, 4, (1.0, 1.2, 0.8), memory_limit=1.5, budget=1e4)
        >>> found.makespan <= 15.5 and max(found.timeline.peak_memory) <= 1.5
        True

    Of layers it first searches for the split into stages; the result says which stage gets which layers:

        >>> from zbpipe import Layer, LayerCosts
        >>> blocks = [Layer((f"layers.{n}",), f=1, i=1, w=1, activations=1e9) for n in range(3)]
        >>> head = Layer(("norm", "lm_head"), f=2, i=2, w=2, activations=1e9)
        >>> plan(2, 2, LayerCosts((*blocks, head)), placements=["single"], budget=1e4).module_fqns_per_model_part
        [['layers.0', 'layers.1', 'layers.2'], ['norm', 'lm_head']]

    Args:
        ranks: pipeline ranks, from 1 on.
        microbatches: from 1 on.
        costs: one of
            - what a job costs, as `zbpipe.Profiler` measures it and `zbpipe.load_costs` reads it; its placement, memory
              limit and transport are the defaults of those arguments here;
            - a CostModel: only placements with so many stages are tried;
            - LayerCosts: the layers are cut into stages, on each placement with no more stages than layers;
            - seconds of F, I and W that a rank spends on one microbatch, all its stages together;
            - a function that gives a CostModel for a placement.
        memory_limit: the activations that a rank can hold, one number for all or one for each, in the unit of the
            costs' activations: bytes where they were measured. With seconds of F, I and W, 1 is a rank's share of one
            microbatch. Default: no limit.
        placements: names out of "single", "loop", "v" and "wave", or placements. Default: all names but "wave".
        objective: the time to minimise: "makespan", of a synchronous step, or "longest_rank_span", which counts when
            each rank starts its next step as soon as it is done.
        budget: how many ops the search may time, so that results do not depend on the machine. Default: what takes a
            second or so. Layers get it once for the split found and once for TorchTitan's even split; the short
            searches that compare splits come on top.
        seed: of the search's random numbers.
        exact: whether to look for the provably best schedule with OR-Tools afterwards. For small cases.
        transport: what messages wait for (see `zbpipe.transport`), by default nothing. The search itself knows no
            queues: of all that it found, and the named schedules, it takes the one with the shortest step under this
            transport. The bounds hold for every transport.
        progress: called with the share of the work that is done, and the shortest time so far.

    Raises:
        TypeError: an argument of another type.
        ValueError: numbers that no schedule can have, an unknown placement or transport, costs for none of the
            placements, fewer layers than stages, or a limit too small for even one microbatch.
    """
    require_job(ranks, microbatches)
    if isinstance(costs, JobCosts):
        costs.require_ranks(ranks)
        placements = costs.placement if placements is None else placements
        memory_limit = costs.memory_limit if memory_limit is None else memory_limit
        transport = costs.transport if transport is None else transport
        costs = costs.costs
    if not isinstance(transport, (str, type(None))):
        raise TypeError(f"transport = {transport!r} is no zbpipe.transport.Transport, nor the name of one")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress = {progress!r} is no function (share, best)")
    request = Request(
        ranks,
        microbatches,
        named_placements(ranks, DEFAULT_PLACEMENTS if placements is None else placements),
        None if memory_limit is None else limits_by_rank(memory_limit, ranks),
        objective,
        budget,
        seed,
        exact,
        Transport.IDEAL if transport is None else Transport.parse(transport),
    )
    report = progress or _silent
    if isinstance(costs, LayerCosts):
        return plan_layers(request, costs, report)
    if isinstance(costs, CostModel):
        request = _with_stages(request, costs.num_stages)
    return plan_stages(request, _costs_of(costs), report)


def _with_stages(request: Request, num_stages: int) -> Request:
    """The request, without placements of another number of stages."""
    fitting = {name: each for name, each in request.placements.items() if each.num_stages == num_stages}
    if not fitting:
        raise ValueError(
            f"the costs are for {num_stages} stages, and none of the placements puts so many on {request.ranks} ranks;"
            " name one that does, or pass a function that gives a CostModel for any placement"
        )
    return replace(request, placements=fitting)


def _costs_of(costs: Any) -> CostsOf:
    """The costs of any placement's stages, from all that can tell them."""
    if not callable(costs):
        return lambda placement: as_cost_model(costs, placement)

    def called(placement: Placement) -> CostModel:
        try:
            return as_cost_model(costs(placement), placement)
        except TypeError as error:
            raise TypeError(f"the function given as costs, called with a placement: {error}") from error

    return called


def _silent(share: float, best: float) -> None:
    pass
