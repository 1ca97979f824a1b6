"""The best of several schedules under a memory limit, by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from zbpipe.costs import CostModel
from zbpipe.ir import Placement, Schedule
from zbpipe.planner.greedy import Policy, list_schedule
from zbpipe.simulate import Timeline, simulate

POLICIES = tuple(Policy(*choice) for choice in product((0.0, 0.5, 1.0), (False, True), (False, True)))
_ROUNDING = 1e-9


def best_within(
    name: str,
    placement: Placement,
    num_microbatches: int,
    limit: float,
    costs: CostModel | None = None,
    seeds: Iterable[Schedule] = (),
) -> Schedule:
    """List scheduling under every policy, and `seeds`: the one with the shortest synchronous step.

    Among equally long ones that with the shortest span of a single rank wins, which counts without synchronisation.

    Args:
        name: of the result.
        placement: where the stages are.
        num_microbatches: from 1 on.
        limit: peak activations per rank, in units of the rank's share of one microbatch; at least 1.
        costs: for the placement's stages; default: F, I and W take equal time and communication none.
        seeds: schedules with this placement to try besides; those that do not fit into the limit are passed over.
    """
    costs = costs or CostModel.uniform(placement)
    limits = tuple(
        limit * sum(costs.activations[stage] for stage in placement.stages_on(rank))
        for rank in range(placement.num_ranks)
    )

    def candidates() -> Iterator[Timeline]:
        for policy in POLICIES:
            yield simulate(list_schedule(name, placement, num_microbatches, costs, limits, policy), costs)
        for seed in seeds:
            timeline = simulate(seed, costs)
            if max(timeline.peak_activations) <= limit + _ROUNDING:
                yield timeline

    best = min(candidates(), key=lambda timeline: (timeline.makespan, timeline.longest_rank_span))
    return replace(best.schedule, name=name)
