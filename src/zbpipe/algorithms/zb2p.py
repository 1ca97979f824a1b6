"""ZB-2p (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1): a schedule searched for the given times.

Like ZB1P, with at most 2p activations, deferred gradients included. Use it if there is memory to spare.
"""

from zbpipe.algorithms.zbh1 import zbh1
from zbpipe.algorithms.zbh2 import zbh2
from zbpipe.costs.model import CostModel
from zbpipe.planner.search import find_best_within
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import register


@register("ZB2P", summary="a search fits it to the costs; 2p activations, including deferred gradients")
def zb2p(ranks: int, microbatches: int, costs: CostModel | None = None) -> Schedule:
    """The best schedule found with at most 2p activations per rank. F, I and W default to equal times.

    >>> print(zb2p(2, 3))
    rank 0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    seeds = [zbh1(ranks, microbatches), zbh2(ranks, microbatches)]
    return find_best_within("ZB2P", Placement.loop(ranks), microbatches, 2 * ranks, costs, seeds)
