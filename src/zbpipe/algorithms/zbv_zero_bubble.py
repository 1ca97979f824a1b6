"""ZB-V as torch lists it under the name ZBVZeroBubble: the same drawing as ZBV, cut down where microbatches are few."""

from zbpipe.algorithms.zbv import cut_down
from zbpipe.ir import Schedule
from zbpipe.registry import register


@register(
    "ZBVZeroBubble", placement="v", stages_per_rank=2, source="torch", summary="torch's ZB-V, with torch's own split"
)
def zbv_zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """With fewer than 2p - 1 microbatches, the drawing for 2p - 1 without those that the job lacks."""
    return cut_down("ZBVZeroBubble", ranks, microbatches)
