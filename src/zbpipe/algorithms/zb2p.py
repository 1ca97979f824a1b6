"""ZB-2p (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1): searched for the times it is given.

It takes twice the memory of 1F1B. Use it like ZB1P, where there is memory to spare.
"""

from zbpipe.algorithms.zbh1 import zbh1
from zbpipe.algorithms.zbh2 import zbh2
from zbpipe.costs import CostModel
from zbpipe.ir import Placement, Schedule
from zbpipe.planner.search import best_within
from zbpipe.registry import register


@register("ZB2P", summary="searched for measured times, twice 1F1B's memory; never longer than ZBH2")
def zb2p(ranks: int, microbatches: int, costs: CostModel | None = None) -> Schedule:
    """The best found that holds at most 2p activations per rank.

        >>> print(zb2p(2, 3))
        rank 0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Args:
        ranks: p.
        microbatches: from 1 on.
        costs: one stage a rank; default: F, I and W take equal time and communication none.
    """
    seeds = [zbh1(ranks, microbatches), zbh2(ranks, microbatches)]
    return best_within("ZB2P", Placement.loop(ranks), microbatches, 2 * ranks, costs, seeds)
