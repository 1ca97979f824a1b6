"""ZB-1p (2401.10241, section 3.1): searched for the given times, in the memory of 1F1B."""

from zbpipe.algorithms.zbh1 import zbh1
from zbpipe.costs import CostModel
from zbpipe.ir import Placement, Schedule
from zbpipe.planner.search import best_within
from zbpipe.registry import register


@register("ZB1P", summary="searched for measured times, 1F1B's memory; never longer than ZBH1")
def zb1p(ranks: int, microbatches: int, costs: CostModel | None = None) -> Schedule:
    """The best found that holds at most p activations per rank.

    Args:
        ranks: p.
        microbatches: from 1 on.
        costs: one stage a rank; default: F, I and W take equal time and communication none.
    """
    seeds = [zbh1(ranks, microbatches)]
    return best_within("ZB1P", Placement.loop(ranks), microbatches, ranks, costs, seeds)
