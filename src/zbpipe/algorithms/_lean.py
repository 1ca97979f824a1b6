"""What the lean schedules share: the best that is found within a memory limit, which counts all that ops need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbpipe.baseline import memory_of_1f1b
from zbpipe.costs import ROUNDING, CostModel, least_room, require_room
from zbpipe.ir import Placement, Schedule
from zbpipe.lean import leanest, within
from zbpipe.memory_limit import AS_1F1B, LEEWAY, MemoryLimit, MemoryLimitLike
from zbpipe.planner.lean_search import found
from zbpipe.simulation import simulate
from zbpipe.transformer import typical_costs


def usual_costs(placement: Placement) -> CostModel:
    """Those of TorchTitan's default, selective checkpointing."""
    return typical_costs(placement, "selective")


def room(
    name: str,
    placement: Placement,
    costs: CostModel,
    microbatches: int,
    memory_limit: MemoryLimitLike | None = None,
) -> tuple[float, ...]:
    """What each rank may hold: the limit, or a little more than 1F1B's worst rank holds.

    Raises:
        ValueError: the limit is too small for even one microbatch of the schedule called `name`.
    """
    limit = MemoryLimit.parse(memory_limit)
    limits = (limit or AS_1F1B).resolve(costs, placement.num_ranks, microbatches)
    if limit is not None:
        require_room(placement, costs, limits, f" for {name}")
    return limits


def best(name: str, seeds: Sequence[Schedule], costs: CostModel, limits: Sequence[float]) -> Schedule:
    """The shortest found within `limits`: lean forms of known schedules, and list scheduling. Of equals the leanest.

    Args:
        name: of the result.
        seeds: valid schedules, all with the same placement and as many microbatches.
        costs: of their stages.
        limits: what each rank may hold, in the unit of `costs.activations`. A rank on which one microbatch alone takes
            more may hold that.
    """
    placement, microbatches = seeds[0].placement, seeds[0].num_microbatches
    limits = tuple(map(max, limits, least_room(placement, costs)))
    listed = found(name, placement, microbatches, costs, limits)
    candidates = [listed] if listed else []
    for seed in seeds:
        candidates += [within(seed, costs, limits), leanest(seed, costs)]
    timelines = [simulate(each, costs) for each in dict.fromkeys(candidates)]

    def badness(number: int) -> tuple[float, float, float]:
        peaks = timelines[number].peak_memory
        excess = max(peak - limit * (1 + ROUNDING) for peak, limit in zip(peaks, limits, strict=True))
        return max(excess, 0.0), timelines[number].makespan, max(peaks)

    return replace(timelines[min(range(len(timelines)), key=badness)].schedule, name=name)


def within_share(name: str, form: Schedule, share: float, costs: CostModel) -> Schedule:
    """The best within a share of 1F1B's activations, or within the leanest form of the paper's schedule.

    What ops need only while they run is not shared: a rank runs one op at a time.

    Args:
        name: of the result.
        form: the paper's schedule.
        share: of 1F1B's activations that it is to hold.
        costs: of its stages.
    """
    ranks = form.num_ranks
    peak = memory_of_1f1b(costs, ranks, ranks)
    held = memory_of_1f1b(replace(costs, working={}), ranks, ranks)
    least = max(simulate(leanest(form, costs), costs).peak_memory)
    limit = max(LEEWAY * (share * held + peak - held), least)
    return best(name, [form], costs, (limit,) * ranks)
