"""Advice on other placements of the stages that would shorten the steps of a job, from its next start on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbpipe.costs.job import JobCosts
from zbpipe.costs.layers import merge_stages
from zbpipe.costs.model import CostModel
from zbpipe.planner.plan import plan
from zbpipe.planner.request import PLACEMENTS
from zbpipe.schedule.ir import OpKind, Placement, Schedule

_WORTH_A_START = 0.99
_EVEN_ENOUGH = 1.05


@dataclass(frozen=True)
class PlacementAdvice:
    """A plan with another placement."""

    schedule: Schedule
    words: str
    """The advice in words, for a log."""


def advise_placement(
    microbatches: int, job: JobCosts, here: float, budget: float | None = None
) -> PlacementAdvice | None:
    """The fastest plan on another placement, if it is faster by more than a hundredth.

    Candidates have the same number of stages on each rank, or one stage per rank, which joins two stages of the job. A
    stage that does not fit into memory there, as in the job, is not tried. More stages per rank, as on the wave, are
    not tried either: only the sum over the layers of a stage is measured, and the embedding and the head belong to one
    half of theirs. A plan for `LayerCosts` knows both halves.

    `job` has measured costs of stages, their placement, and memory limits. `here` is the step time in seconds with the
    current placement of the job.
    """
    stages, current = _require_stages(job)
    ranks = current.num_ranks
    found = []
    for name, place in sorted(PLACEMENTS.items()):
        placement = place(ranks)
        costs = None if placement == current or ranks == 1 else _on(placement, stages)
        if costs is None:
            continue
        try:
            best = plan(ranks, microbatches, replace(job, costs=costs, placement=placement), budget=budget)
        except ValueError:  # it does not fit
            continue
        found.append((best.makespan, name, best.schedule))
    if not found or min(found)[0] >= here * _WORTH_A_START:
        return None
    seconds, name, schedule = min(found)
    words = f"with the placement {name!r} a step should take {seconds:.4g} s, {1 - seconds / here:.1%} shorter than now"
    return PlacementAdvice(replace(schedule, name=f"plan-{name}"), words)


def _on(placement: Placement, costs: CostModel) -> CostModel | None:
    """Costs of the stages on this placement: the same stages, or pairs joined. None for other numbers of stages.

    Pairs of ranks without a measured link get the slowest of the measured links.
    """
    slowest = max(costs.links.values(), key=lambda link: link.seconds(costs.message_bytes), default=costs.link)
    costs = replace(costs, link=slowest)
    if placement.num_stages == costs.num_stages:
        return costs
    return merge_stages(costs, placement.num_stages) if 2 * placement.num_stages == costs.num_stages else None


def _require_stages(job: JobCosts) -> tuple[CostModel, Placement]:
    if not isinstance(job.costs, CostModel) or job.placement is None:
        raise TypeError("advice on placements needs the costs of stages and their placement")
    return job.costs, job.placement


def uneven_stages(job: JobCosts) -> str:
    """The stages with the most and the least work, between which layers should move. Empty if the stages are even.

    >>> uneven_stages(JobCosts(CostModel((1, 1, 1, 2), (1, 1, 1, 2), (1, 1, 1, 2), (1,) * 4), Placement.v(2)))
    'stage 3 (rank 0) takes 1.60 times the average of all stages, and stage 1 (rank 1) 0.80 times: move layers there'
    """
    costs, placement = _require_stages(job)
    seconds = [costs.seconds(stage, OpKind.F) + costs.seconds(stage, OpKind.B) for stage in range(costs.num_stages)]
    ranks = placement.sum_by_rank(seconds)
    average = sum(seconds) / len(seconds)
    if not average or max(ranks) * len(ranks) <= _EVEN_ENOUGH * sum(ranks):
        return ""
    rank = ranks.index(max(ranks))
    most = max(placement.stages_on(rank), key=lambda stage: seconds[stage])
    least = min(placement.stages_on(ranks.index(min(ranks))), key=lambda stage: seconds[stage])
    return (
        f"stage {most} (rank {rank}) takes {seconds[most] / average:.2f} times the average of all stages, and stage"
        f" {least} (rank {placement.rank_of[least]}) {seconds[least] / average:.2f} times: move layers there"
    )
