"""Layers of each stage, balanced by work alone, as evenly as whole layers allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise, product

from zbpipe.costs.layers import LayerCosts, even_sizes
from zbpipe.schedule.ir import Placement

Sizes = tuple[int, ...]
"""Number of layers of each stage."""

_DIGITS = 9
"""Decimal digits of a share of all work, so that rounding of sums does not decide."""


def balance(costs: LayerCosts, placement: Placement) -> Sizes:
    """Layers per stage, such that the most loaded rank has as little work as possible and stages are about equal.

    A local search moves one layer at a time, starting with TorchTitan's even split. The result need not be optimal.

        >>> block, head = zbpipe.costs.Layer(("block",), 1, 1, 1, 1), zbpipe.costs.Layer(("head",), 3, 3, 3, 1)
        >>> balance(LayerCosts((*[block] * 9, head)), Placement.v(2))
        (3, 3, 3, 1)
    """
    best = even_sizes(len(costs.layers), placement.num_stages)
    until = (0.0, *accumulate(layer.seconds for layer in costs.layers))
    stages = range(placement.num_stages)

    def unevenness(sizes: Sizes) -> tuple[float, float]:
        """Largest work share of a rank, and sum of squared shares of stages, because a V waits at its long stages."""
        shares = [(until[end] - until[begin]) / (until[-1] or 1) for begin, end in pairwise((0, *accumulate(sizes)))]
        most = max(placement.sum_by_rank(shares))
        return round(most, _DIGITS), round(sum(share**2 for share in shares), _DIGITS)

    while True:
        trial = min(move_layer(best, stages, stages), key=unevenness, default=best)
        if unevenness(trial) >= unevenness(best):
            return best
        best = trial


def move_layer(sizes: Sizes, givers: Iterable[int], takers: Iterable[int]) -> Iterator[Sizes]:
    """Splits with one layer less on one stage and one more on another. Layers between the two move by one stage."""
    for giver, taker in product(givers, takers):
        if giver != taker and sizes[giver] > 1:
            changed = list(sizes)
            changed[giver] -= 1
            changed[taker] += 1
            yield tuple(changed)
