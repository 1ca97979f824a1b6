"""What a model's layers cost, and what the stages cost that are cut from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from zbpipe.costs import CostModel, Link, require_amounts, require_shares
from zbpipe.ir import Placement

MOST_LAYERS = 10_000

Split = tuple[range, ...]
"""By stage the layers that it holds, in their order; no stage is empty."""


@dataclass(frozen=True)
class Layer:
    """A piece of the model that lies on one stage. Times are seconds of one microbatch.

    Raises:
        ValueError: a number that is negative or not finite.
    """

    modules: tuple[str, ...]
    """TorchTitan's names of what is in it: `("layers.3",)`, or `("norm", "lm_head")`."""
    f: float
    """Seconds of the forward."""
    i: float
    """Seconds of the backward for the input (dI), with any recomputation."""
    w: float
    """Seconds of the backward for the weights (dW)."""
    activations: float
    """Bytes that it keeps of one microbatch after F."""

    def __post_init__(self) -> None:
        columns = {"f": self.f, "i": self.i, "w": self.w, "activations": self.activations}
        require_amounts(f"the layer {'+'.join(self.modules)}", **{name: (cost,) for name, cost in columns.items()})

    @property
    def seconds(self) -> float:
        """F, I and W together."""
        return self.f + self.i + self.w


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a model that is not cut into stages yet.

    Raises:
        ValueError: no layer or more than 10,000, or a number that is negative or not finite.
    """

    layers: tuple[Layer, ...]
    """From the embedding to the head."""
    freed_by_i: float = 0.0
    """The share of the activations that I frees already, 1 at the most; below zero where it takes more."""
    link: Link = field(default_factory=Link)
    """The way between any two ranks."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=lambda: MappingProxyType({}))
    """Links that differ, by (from rank, to rank)."""
    message_bytes: float = 0.0
    """Bytes that one stage hands to the next for one microbatch, and gets back as a gradient."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer, got none")
        if len(self.layers) > MOST_LAYERS:
            raise ValueError(f"a model of more than {MOST_LAYERS} layers cannot be cut: take several as one layer")
        require_amounts("LayerCosts", message_bytes=(self.message_bytes,))
        require_shares("LayerCosts", (self.freed_by_i,))

    def stages(self, split: Split) -> CostModel:
        """The costs of the stages of this split."""

        def summed(name: str) -> tuple[float, ...]:
            return tuple(sum(getattr(self.layers[layer], name) for layer in stage) for stage in split)

        costs = (summed("f"), summed("i"), summed("w"), summed("activations"))
        return CostModel(*costs, self.freed_by_i, self.link, self.links, self.message_bytes)

    def even(self, placement: Placement) -> CostModel:
        """The costs of a placement's stages if they get equally many layers, as by TorchTitan's default.

        Raises:
            ValueError: fewer layers than stages.
        """
        return self.stages(split_of(even_sizes(len(self.layers), placement.num_stages)))

    def modules(self, split: Split) -> list[list[str]]:
        """The split as TorchTitan's `module_fqns_per_model_part`: names of modules by stage."""
        return [[name for layer in stage for name in self.layers[layer].modules] for stage in split]


def split_of(sizes: Sequence[int]) -> Split:
    """The split with so many layers a stage: `(2, 1)` gives `(range(0, 2), range(2, 3))`."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def even_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As many layers on each stage as on any other, or one more on the first stages: TorchTitan's default.

    TorchTitan counts the embedding as one layer and so norm and head together, as they are one `Layer` here.

    Raises:
        ValueError: fewer layers than stages.
    """
    require_enough(num_layers, num_stages)
    each, more = divmod(num_layers, num_stages)
    return (each + 1,) * more + (each,) * (num_stages - more)


def require_enough(num_layers: int, num_stages: int) -> None:
    """Refuse fewer layers than stages.

    Raises:
        ValueError: just that.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {num_stages} stages, one layer each at least: use fewer ranks, or"
            " a placement with fewer stages a rank"
        )
