"""ZB-1p (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1): a schedule searched for the given times.

At most p activations, deferred gradients included. Without checkpointing that is 1F1B's memory, and with equal times it
is ZBH1. Use it with measured times that are far from equal. With checkpointing, few deferred gradients fit, so a step
is long.
"""

from zbpipe.algorithms.zbh1 import zbh1
from zbpipe.costs.model import CostModel
from zbpipe.planner.search import find_best_within
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import register


@register("ZB1P", summary="a search fits it to the costs; p activations, including deferred gradients")
def zb1p(ranks: int, microbatches: int, costs: CostModel | None = None) -> Schedule:
    """The best schedule found with at most p activations per rank. F, I and W default to equal times.

    >>> print(zb1p(2, 3))
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    seeds = [zbh1(ranks, microbatches)]
    return find_best_within("ZB1P", Placement.loop(ranks), microbatches, ranks, costs, seeds)
