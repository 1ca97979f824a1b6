"""1F1B's memory under the same costs: the yardstick by which people choose a schedule."""

from __future__ import annotations

from collections.abc import Callable

from zbpipe.costs import CostModel
from zbpipe.ir import Placement
from zbpipe.layer_costs import joined, split_of
from zbpipe.limits import Limit
from zbpipe.registry import generate
from zbpipe.simulation import simulate

CostsOf = Callable[[Placement], CostModel]
"""The costs of a placement's stages; raises ValueError where there are none."""


def peak_of_1f1b(costs_of: CostsOf, ranks: int, microbatches: int, measured: CostModel | None = None) -> float | None:
    """What 1F1B's worst rank holds at most, in the unit of the costs; None where that is not known.

        >>> peak_of_1f1b(CostModel.uniform, 4, 8)
        4.0

    Args:
        costs_of: the costs of a placement's stages.
        ranks: p. It counts one stage for each rank.
        microbatches: of a step.
        measured: costs of several stages a rank, of which neighbours are taken together, where `costs_of` has no
            others.
    """
    if measured is not None:
        if measured.num_stages % ranks:
            return None
        costs = merged(measured, ranks)
    else:
        costs = costs_of(Placement.loop(ranks))
    return max(simulate(generate("1F1B", ranks, microbatches), costs).peak_memory)


def in_unit_of(costs: CostModel, limit: Limit, ranks: int, microbatches: int) -> float:
    """A limit in the unit of `costs.activations`; a bare number is of microbatches of an average rank's share.

        >>> costs = CostModel((1, 1), (1, 1), (1, 1), activations=(3e9, 1e9))
        >>> in_unit_of(costs, Limit.parse("1.5"), 2, 8), in_unit_of(costs, Limit.parse("0.5x"), 2, 8)
        (3000000000.0, 3000000000.0)

    Raises:
        ValueError: a multiple of 1F1B's memory, which costs of stages of no whole ranks do not tell.
    """
    if limit.unit != "x":
        return limit.amount * (1.0 if limit.unit == "bytes" else sum(costs.activations) / ranks)
    peak = peak_of_1f1b(CostModel.uniform, ranks, microbatches, measured=costs)
    if peak is None:
        raise ValueError(
            f"memory_limit = {limit.text!r} is a multiple of 1F1B's memory, which costs of {costs.num_stages} stages on"
            f" {ranks} ranks do not tell: give a number"
        )
    return limit.amount * peak


def merged(costs: CostModel, num_stages: int) -> CostModel:
    """The costs of fewer stages, each of them equally many neighbours in one.

        >>> merged(CostModel((1, 2), (1, 2), (1, 2), activations=(3, 4)), 1).activations
        (7.0,)

    Raises:
        ValueError: a number of stages that is no divisor of the present one.
    """
    each, rest = divmod(costs.num_stages, num_stages)
    if rest:
        raise ValueError(f"{costs.num_stages} stages cannot become {num_stages} of equally many")
    return joined(costs, split_of([each] * num_stages))
