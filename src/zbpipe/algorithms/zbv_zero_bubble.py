"""ZB-V (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6) under torch's name.

For comparison: torch's class runs it, with torch's split of the backward. With few microbatches it is the order of ZBV
for more, without those that the job lacks.
"""

from zbpipe.algorithms.zbv import draw_cut_down
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import register


@register(
    "ZBVZeroBubble",
    placement="v",
    stages_per_rank=2,
    source="torch",
    summary="torch's ZB-V with torch's own split, which fails under selective checkpointing",
)
def zbv_zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """With fewer than 2p - 1 microbatches, the order for 2p - 1 without those that the job lacks.

    >>> print(zbv_zero_bubble(2, 2))
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
    """
    return draw_cut_down("ZBVZeroBubble", ranks, microbatches)
