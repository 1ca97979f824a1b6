"""Which layers each stage gets, by their work alone: as even as whole layers can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise, product

from zbpipe.costs.layers import LayerCosts, even_sizes
from zbpipe.schedule.ir import Placement

Sizes = tuple[int, ...]
"""The number of layers by stage."""

_DIGITS = 9
"""Of shares of all work, so that the rounding of sums decides nothing."""


def balance(costs: LayerCosts, placement: Placement) -> Sizes:
    """Layers by stage, so that the rank with the most work has as little as possible, and all stages are about alike.

    That is found by moving one layer at a time, from TorchTitan's even split, so it need not be the best there is.

        >>> block, head = zbpipe.costs.Layer(("block",), 1, 1, 1, 1), zbpipe.costs.Layer(("head",), 3, 3, 3, 1)
        >>> balance(LayerCosts((*[block] * 9, head)), Placement.v(2))
        (3, 3, 3, 1)
    """
    best = even_sizes(len(costs.layers), placement.num_stages)
    until = (0.0, *accumulate(layer.seconds for layer in costs.layers))
    stages = range(placement.num_stages)

    def unevenness(sizes: Sizes) -> tuple[float, float]:
        """The share of the rank with the most work, and the squared shares of stages: a V waits at its long stages."""
        shares = [(until[end] - until[begin]) / (until[-1] or 1) for begin, end in pairwise((0, *accumulate(sizes)))]
        most = max(placement.sum_by_rank(shares))
        return round(most, _DIGITS), round(sum(share**2 for share in shares), _DIGITS)

    while True:
        trial = min(move_layer(best, stages, stages), key=unevenness, default=best)
        if unevenness(trial) >= unevenness(best):
            return best
        best = trial


def move_layer(sizes: Sizes, givers: Iterable[int], takers: Iterable[int]) -> Iterator[Sizes]:
    """Splits with one layer less on a stage and one more on another; the layers between the two move on by one."""
    for giver, taker in product(givers, takers):
        if giver != taker and sizes[giver] > 1:
            changed = list(sizes)
            changed[giver] -= 1
            changed[taker] += 1
            yield tuple(changed)
