"""ZBV, VHalf and DualPipeV made lean: the shortest step found in 1F1B's memory, under any checkpointing.

ZB is as short or shorter, with any number of stages per rank. ZB-V (Zero Bubble Pipeline Parallelism, arXiv
2401.10241, section 6) takes 1F1B's activations, but with checkpointing deferred gradients take more memory than these.
Here W is deferred only as far as 1F1B's memory has room, deferred gradients and working memory included. Where there is
no room, I and W run as one op B.
"""

from collections.abc import Sequence

from zbpipe.algorithms._lean import find_best, resolve_limits
from zbpipe.algorithms.dualpipe_v import dualpipe_v
from zbpipe.algorithms.v_half import v_half
from zbpipe.algorithms.zbv import zbv
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import typical_costs
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import register


@register(
    "ZBVLean",
    placement="v",
    stages_per_rank=2,
    summary="two stages per rank: ZBV's kind of order, as short as found in 1F1B's memory",
    by_checkpointing=True,
)
def zbv_lean(
    ranks: int,
    microbatches: int,
    costs: CostModel | None = None,
    memory_limit: MemoryLimit | None = None,
    transport: Transport | None = None,
) -> Schedule:
    """The best of lean forms of known schedules and of a short search, by the synchronous step.

    Costs default to typical ones under selective checkpointing. The limit defaults to 1.02x of 1F1B's memory, or to the
    memory of one microbatch if that is more.

    >>> print(zbv_lean(2, 2))
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2B0 1I0 1W0 2I1 1I1 2W1 1W1
    """
    placement = Placement.v(ranks)
    costs = costs or typical_costs(placement)
    limits = resolve_limits("ZBVLean", placement, costs, microbatches, memory_limit)
    return find_shortest("ZBVLean", ranks, microbatches, costs, limits, transport)


def find_shortest(
    name: str,
    ranks: int,
    microbatches: int,
    costs: CostModel,
    limits: Sequence[float],
    transport: Transport | None = None,
) -> Schedule:
    """The shortest schedule found in a V within these limits, or within the memory of one microbatch."""
    return find_best(name, [form(ranks, microbatches) for form in (zbv, dualpipe_v, v_half)], costs, limits, transport)
