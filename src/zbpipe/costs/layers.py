"""Costs of a model's layers, and of the stages cut from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise, product
from typing import Any

from zbpipe.costs.model import COLUMNS, OF_DATA_PARALLELISM, CommonCosts, CostModel, highest
from zbpipe.costs.numbers import amount, set_fields
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement

MOST_LAYERS = 10_000
_NUMBERS = (*COLUMNS, *OF_DATA_PARALLELISM)

Split = tuple[range, ...]
"""Layers of each stage, in order. No stage is empty."""
Sizes = tuple[int, ...]
"""Number of layers of each stage."""

_DIGITS = 9
"""Decimal digits of a share of all work, so that rounding does not decide."""


@dataclass(frozen=True)
class Layer:
    """A piece of the model that stays on one stage. Times are seconds per microbatch.

    >>> Layer(("norm", "lm_head"), f=2, i=2, w=2, activations=4e8).seconds
    6.0

    Raises TypeError or ValueError for invalid fields.
    """

    modules: tuple[str, ...]
    """TorchTitan's names of its modules: `("layers.3",)`, or `("norm", "lm_head")`."""
    f: float
    """Seconds of the forward."""
    i: float
    """Seconds of the backward for the input (dI), with any recomputation."""
    w: float
    """Seconds of the backward for the weights (dW)."""
    activations: float
    """Bytes that it keeps of one microbatch after F."""
    gather: float = 0.0
    """Seconds in which data-parallel ranks gather its parameters, and reduce its gradients."""
    reduce: float = 0.0

    def __post_init__(self) -> None:
        names = self.modules
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"a layer cannot have modules = {names!r}: give a list of names, for example ('layers.0',)")
        if not names:
            raise ValueError("a layer cannot have modules = (): give at least one name, for example ('layers.0',)")
        what = f"the layer {'+'.join(names)}"
        numbers = {name: amount(what, name, getattr(self, name)) for name in _NUMBERS}
        set_fields(self, modules=tuple(names), **numbers)

    @property
    def seconds(self) -> float:
        return self.f + self.i + self.w


@dataclass(frozen=True)
class LayerCosts(CommonCosts):
    """Costs of a model before it is cut into stages.

        >>> block = Layer(("layers.0",), f=1, i=1, w=1, activations=1e9)
        >>> costs = LayerCosts((block, block, block))
        >>> costs.even(Placement.loop(2)).f
        (2.0, 1.0)

    Raises TypeError or ValueError for invalid fields, and for no layer or more than 10,000.
    """

    layers: tuple[Layer, ...]
    """Layers from the embedding to the head."""

    def __post_init__(self) -> None:
        what = "the costs of layers"
        if not isinstance(self.layers, (tuple, list)) or not all(isinstance(each, Layer) for each in self.layers):
            raise TypeError(f"{what} cannot have layers = {self.layers!r}: give a list of zbpipe.costs.Layer")
        if not self.layers:
            raise ValueError("a model needs at least one layer, got none")
        if len(self.layers) > MOST_LAYERS:
            raise ValueError(f"a model of more than {MOST_LAYERS} layers cannot be cut: describe several as one layer")
        set_fields(self, layers=tuple(self.layers))
        seconds = {OpKind.F: [each.f for each in self.layers], OpKind.I: [each.i for each in self.layers]}
        self.check_common(what, seconds, "layer")

    def stages(self, split: Split) -> CostModel:
        columns: dict[str, Any] = {name: tuple(getattr(layer, name) for layer in self.layers) for name in _NUMBERS}
        shared = {each.name: getattr(self, each.name) for each in fields(CommonCosts)}
        return join_stages(CostModel(**columns, **shared), split)

    def times(self, split: Split) -> list[tuple[float, float, float]]:
        stages = self.stages(split)
        return list(zip(stages.f, stages.i, stages.w, strict=True))

    def even(self, placement: Placement) -> CostModel:
        """Costs of a placement's stages with equal numbers of layers, TorchTitan's default."""
        return self.stages(split_of(even_sizes(len(self.layers), placement.num_stages)))

    def modules(self, split: Split) -> list[list[str]]:
        """The split as TorchTitan's `module_fqns_per_model_part`: module names of each stage."""
        return [[name for layer in stage for name in self.layers[layer].modules] for stage in split]


def join_stages(costs: CostModel, split: Split) -> CostModel:
    """Costs of joined stages: F runs the parts in order; I, W and B run them from the last one.

        >>> layers = CostModel((1, 1), (1, 1), (1, 1), activations=(4, 4), freed_by_i=-1, working={OpKind.I: (2, 9)})
        >>> stage = join_stages(layers, (range(2),))
        >>> stage.activations, stage.of(0, OpKind.I).adds, stage.of(0, OpKind.I).needs
        ((8.0,), 8.0, 13.0)

    If F of a stage keeps nothing, the stage cannot keep anything from I to W.
    """

    def add_up(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[layer] for layer in stage) for stage in split)

    def beyond(kind: OpKind, stage: range) -> float:
        ops = [(layer, kind) for layer in (stage if kind is OpKind.F else reversed(stage))]
        return highest(costs, ops) - max(sum(costs.of(*op).adds for op in ops), 0.0)

    whole, costs = costs, replace(costs, sizes=())
    waits = {kind: add_up(costs.by_stage(each)) for kind, each in costs.waits.items()}
    working = {kind: tuple(max(beyond(kind, stage), 0.0) for stage in split) for kind in COMPUTATIONS}
    columns: dict[str, Any] = {name: add_up(getattr(costs, name)) for name in COLUMNS}
    for name in OF_DATA_PARALLELISM:
        columns[name] = add_up(costs.by_stage(given)) if (given := getattr(costs, name)) else 0.0
    freed = costs.freed_by_i
    if isinstance(freed, tuple):
        deferred = [costs.of(layer, OpKind.W).frees for layer in range(costs.num_stages)]
        pairs = zip(columns["activations"], add_up(deferred), strict=True)
        freed = tuple(1 - waiting / kept if kept else 0.0 for kept, waiting in pairs)
    used = {kind: each for kind, each in working.items() if any(each)}
    attention = costs.attention
    if isinstance(attention, tuple):
        both = [f + i for f, i in zip(costs.f, costs.i, strict=True)]
        of_stages = add_up([each * share for each, share in zip(both, attention, strict=True)])
        attention = tuple(min(part / (each or 1.0), 1.0) for part, each in zip(of_stages, add_up(both), strict=True))
    return replace(whole, **columns, freed_by_i=freed, working=used, waits=waits, attention=attention)


def merge_stages(costs: CostModel, num_stages: int) -> CostModel:
    """Costs after joining equal numbers of neighbouring stages. ValueError if the numbers do not divide."""
    each, rest = divmod(costs.num_stages, num_stages)
    if rest:
        raise ValueError(f"{costs.num_stages} stages cannot become {num_stages} stages of equal size")
    return join_stages(costs, split_of([each] * num_stages))


def split_of(sizes: Sequence[int]) -> Split:
    return tuple(range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


def even_sizes(num_layers: int, num_stages: int, ends: tuple[int, int] = (1, 1)) -> tuple[int, ...]:
    """Layers per stage, equal or one more on the first stages: TorchTitan's default. TorchTitan counts the embedding as
    one layer, and norm and head together as one. `ends` overrides these counts. ValueError for fewer layers than
    stages, or an end that counts for more than a stage has."""
    require_enough(num_layers, num_stages)
    first, last = ends
    each, more = divmod(num_layers - 2 + first + last, num_stages)
    if max(1, *ends) > each:
        raise ValueError(
            f"embedding and head count as {first} and {last} layers, more than a stage's {each}: lower these settings"
        )
    sizes = [each + (stage < more) for stage in range(num_stages)]
    sizes[0] += 1 - first
    sizes[-1] += 1 - last
    return tuple(sizes)


def require_enough(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {num_stages} stages, one layer each at least: use fewer ranks, or"
            " a placement with fewer stages per rank"
        )


def balance(costs: LayerCosts, placement: Placement) -> Sizes:
    """Layers per stage with the least work on the most loaded rank, and about equal stages.

    A local search moves one layer at a time, starting with TorchTitan's even split.

        >>> block, head = Layer(("block",), 1, 1, 1, 1), Layer(("head",), 3, 3, 3, 1)
        >>> balance(LayerCosts((*[block] * 9, head)), Placement.v(2))
        (3, 3, 3, 1)
    """
    best = even_sizes(len(costs.layers), placement.num_stages)
    until = (0.0, *accumulate(layer.seconds for layer in costs.layers))
    stages = range(placement.num_stages)

    def unevenness(sizes: Sizes) -> tuple[float, float]:
        """Largest share of a rank, and sum of squared shares of stages, because a V waits for its long stages."""
        shares = [(until[end] - until[begin]) / (until[-1] or 1) for begin, end in pairwise((0, *accumulate(sizes)))]
        most = max(placement.sum_by_rank(shares))
        return round(most, _DIGITS), round(sum(share**2 for share in shares), _DIGITS)

    while True:
        trial = min(move_layer(best, stages, stages), key=unevenness, default=best)
        if unevenness(trial) >= unevenness(best):
            return best
        best = trial


def move_layer(sizes: Sizes, givers: Iterable[int], takers: Iterable[int]) -> Iterator[Sizes]:
    """Splits that move one layer from one stage to another. Layers between the two move by one stage."""
    for giver, taker in product(givers, takers):
        if giver != taker and sizes[giver] > 1:
            changed = list(sizes)
            changed[giver] -= 1
            changed[taker] += 1
            yield tuple(changed)
