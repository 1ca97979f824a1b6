"""1F1B's memory under the same costs: the baseline by which people choose a schedule."""

from __future__ import annotations

from collections.abc import Callable

from zbpipe.costs import CostModel, highest
from zbpipe.ir import OpKind, Placement
from zbpipe.layer_costs import merged

CostsOf = Callable[[Placement], CostModel]
"""The costs of a placement's stages; raises ValueError where there are none."""


def memory_of_1f1b(costs: CostModel | CostsOf, ranks: int, microbatches: int) -> float:
    """The peak memory of 1F1B's worst rank, in the unit of the costs.

        >>> memory_of_1f1b(CostModel.uniform, 4, 8)
        4.0

    Args:
        costs: of the stages, of which neighbours are taken together, or a function that gives those of one stage a
            rank.
        ranks: p.
        microbatches: of a step.

    Raises:
        ValueError: the stages cannot be shared equally by the ranks, or the function has no costs.
    """
    one_a_rank = merged(costs, ranks) if isinstance(costs, CostModel) else costs(Placement.loop(ranks))

    def peak(rank: int) -> float:
        """Of the warm-up, and then one backward, one forward."""
        warm_up = min(ranks - rank, microbatches)
        kinds = [OpKind.F] * warm_up + [OpKind.B, OpKind.F][: 1 + (warm_up < microbatches)]
        return highest(one_a_rank, [(rank, kind) for kind in kinds])

    return max(map(peak, range(ranks)))
