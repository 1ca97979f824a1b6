"""Schedules by name, as users ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from zbpipe.costs.memory_limit import MemoryLimit, MemoryLimitLike
from zbpipe.costs.model import CostModel, as_cost_model
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import resolve


def generate(
    schedule: str | Schedule,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int | None = None,
    costs: CostModel | Sequence[float] | None = None,
    memory_limit: MemoryLimitLike | None = None,
    runs_ahead: bool = False,
) -> Schedule:
    """The schedule of that name for this number of ranks and microbatches.

        >>> print(zbpipe.generate("1F1B", ranks=2, microbatches=3))
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        schedule: a name, in any case, or the path of a CSV file; a Schedule is given back.
        ranks: pipeline ranks, from 1 on.
        microbatches: from 1 on.
        stages_per_rank: for the looped schedules; default: the schedule's usual one.
        costs: of the stages, or three numbers (f, i, w), for the schedules that fit themselves to them (ZB1P, ZB2P);
            the others do not look at them.
        memory_limit: for the schedules that fit themselves to one (ZBVLean, ZBH1Lean), see
            `zbpipe.costs.MemoryLimit`.
        runs_ahead: whether it is for steps with `zbpipe.OptimizerStep`, for the schedules that then become others
            (ZB2P): with the shortest period, in place of the shortest makespan.

    Raises:
        TypeError: `costs` or `memory_limit` is something else.
        ValueError: unknown name, numbers that the schedule cannot have, more than 1024 stages or 2**18 microbatches
            times stages; a limit that is too small for one microbatch, or for a schedule that takes none; or a
            registered function that returns something else than it is asked for.
    """
    algorithm = resolve(schedule)
    if costs is not None and ("costs" in algorithm.keywords or not isinstance(costs, CostModel)):
        costs = as_cost_model(costs, algorithm.place(ranks, stages_per_rank))
    return algorithm.make(
        ranks,
        microbatches,
        stages_per_rank=stages_per_rank,
        costs=costs,
        memory_limit=MemoryLimit.parse(memory_limit),
        runs_ahead=runs_ahead,
    )
