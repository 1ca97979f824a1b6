"""1F1B's memory under the same costs: the baseline by which people choose a schedule."""

from __future__ import annotations

from collections.abc import Callable

from zbpipe.costs.layers import LayerCosts, merge_stages
from zbpipe.costs.model import CostModel, highest
from zbpipe.schedule.ir import OpKind, Placement

CostsOf = Callable[[Placement], CostModel]
"""Function from a placement to the costs of its stages. It raises ValueError if there are none."""


def one_stage_a_rank(costs: CostModel | LayerCosts | CostsOf, ranks: int) -> CostModel:
    """Costs of 1F1B's stages: neighbouring stages joined, or TorchTitan's even split of the layers.

    ValueError if the stages cannot be shared equally by the ranks, or have no costs.
    """
    if isinstance(costs, CostModel):
        return merge_stages(costs, ranks)
    return (costs.even if isinstance(costs, LayerCosts) else costs)(Placement.loop(ranks))


def memory_of_1f1b(costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> float:
    """The peak memory of 1F1B's worst rank, in the unit of the costs.

    >>> memory_of_1f1b(CostModel.uniform, 4, 8)
    4.0
    """
    of_ranks = one_stage_a_rank(costs, ranks)

    def peak(rank: int) -> float:
        """The peak is in the warm-up, or in the first backward after it; the next F finds what its last F found."""
        return highest(of_ranks, [*[(rank, OpKind.F)] * min(ranks - rank, microbatches), (rank, OpKind.B)])

    return max(map(peak, range(ranks)))
