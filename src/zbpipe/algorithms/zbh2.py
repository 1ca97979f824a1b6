"""ZB-H2 (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3): ZB-H1 with a longer warm-up.

Use it with one stage per rank and much memory to spare: that of 2p - 1 microbatches. Their deferred gradients take the
most memory with checkpointing. No rank idles between its first and last op if F, I and W take equal time. The skew at
the start costs time unless each rank starts its next step at once.
"""

from zbpipe.algorithms.zbh1 import f_i_w
from zbpipe.planner.search import find_best_within
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import register


@register("ZBH2", summary="no bubble if F, I and W take equal time; 2p - 1 activations or W, one stage per rank")
def zbh2(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs 2 (p - r) - 1 forwards before its first I, so it never waits for that I, and starts its W 2r late.

    With fewer than 2p - 1 microbatches that warm-up is impossible. Then each rank runs a ready op, I first, W last.

        >>> print(zbh2(2, 3))
        rank 0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    if microbatches < 2 * ranks - 1:
        return find_best_within("ZBH2", Placement.loop(ranks), microbatches, 2 * ranks - 1)
    rows = tuple(f_i_w(rank, microbatches, warmup=2 * (ranks - rank) - 1, lag=2 * rank) for rank in range(ranks))
    return Schedule("ZBH2", Placement.loop(ranks), microbatches, rows)
