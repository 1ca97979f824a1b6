"""ZBH1 made lean: the shortest step found in 1F1B's memory with one stage per rank, under any checkpointing.

**Try it first on AMD GPUs**, where a message may block both of its ranks and a V sends twice as many messages. Use it
also for jobs that cannot place their stages in a V. On other GPUs ZBVLean has the shorter step. As in ZB-H1 (Zero
Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3), W fills the tail, but only as far as 1F1B's memory allows.
Where there is no room, I and W run as one op B. With no room anywhere, this is 1F1B.
"""

from zbpipe.algorithms._lean import find_best, resolve_limits
from zbpipe.algorithms.zbh1 import zbh1
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import typical_costs
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import register


@register(
    "ZBH1Lean",
    summary="for AMD's GPUs, and one stage per rank: the shortest step found in 1F1B's memory",
    by_checkpointing=True,
)
def zbh1_lean(
    ranks: int,
    microbatches: int,
    costs: CostModel | None = None,
    memory_limit: MemoryLimit | None = None,
    transport: Transport | None = None,
) -> Schedule:
    """The best of lean forms of ZBH1 and of a short search, by the synchronous step. It is never longer than 1F1B.

    Costs and limit have the same defaults as for ZBVLean.

    >>> print(zbh1_lean(2, 2))
    rank 0: 0F0 0F1 0B0 0I1 0W1
    rank 1: 1F0 1I0 1W0 1F1 1I1 1W1
    """
    placement = Placement.loop(ranks)
    costs = costs or typical_costs(placement)
    limits = resolve_limits("ZBH1Lean", placement, costs, microbatches, memory_limit)
    return find_best("ZBH1Lean", [zbh1(ranks, microbatches)], costs, limits, transport)
