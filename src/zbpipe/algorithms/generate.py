"""Generate a schedule from its name."""

from __future__ import annotations

from collections.abc import Sequence

from zbpipe.costs.job import MemoryLimit, MemoryLimitLike, as_cost_model
from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import Schedule, require_whole
from zbpipe.schedule.registry import USUAL_STAGES, resolve


def generate(
    schedule: str | Schedule,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int | None = None,
    costs: CostModel | Sequence[float] | None = None,
    memory_limit: MemoryLimitLike | None = None,
) -> Schedule:
    """The schedule with this name, for this number of ranks and microbatches.

        >>> print(zbpipe.generate("1F1B", ranks=2, microbatches=3))
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        schedule: a name, in any case, or the path of a CSV file. A Schedule is returned unchanged.
        ranks: pipeline ranks, at least 1.
        microbatches: at least 1.
        stages_per_rank: for looped schedules. Default: that of `costs`; else 4 for ZB and ZBLoop, as in the commands
            and in jobs with 4 layers per rank, and the least number for others.
        costs: costs of the stages, or three numbers (f, i, w), for schedules that adapt to them (ZB, ZB1P, ZB2P). Other
            schedules ignore them.
        memory_limit: for schedules that adapt to a limit (ZB, ZBLoop), see `zbpipe.costs.MemoryLimit`.

    Raises:
        TypeError: `costs` or `memory_limit` has another type.
        ValueError: the name is unknown, the schedule does not support these numbers, or there are more than 1024 stages
            or 2**18 microbatches times stages. Also if the limit is too small for one microbatch or the schedule takes
            no limit, or if a registered function returns a schedule other than requested.
    """
    algorithm = resolve(schedule)
    if stages_per_rank is None and algorithm.chooses_stages:
        (ranks,) = require_whole(1, ranks=ranks)
        stages_per_rank = max(costs.num_stages // ranks, 1) if isinstance(costs, CostModel) else USUAL_STAGES
    if costs is not None and ("costs" in algorithm.keywords or not isinstance(costs, CostModel)):
        costs = as_cost_model(costs, algorithm.place(ranks, stages_per_rank), microbatches)
    return algorithm.make(
        ranks,
        microbatches,
        stages_per_rank=stages_per_rank,
        costs=costs,
        memory_limit=MemoryLimit.parse(memory_limit),
    )
