"""Split of a TorchTitan model into stages if the user gives none: all ranks get about the same work.

TorchTitan counts the embedding as one block, and norm and head together as one. The head of a model with a large
vocabulary costs two or three blocks, and the embedding almost nothing. In a V both are on rank 0. Here each counts with
the multiplications that it does. Imports no torchtitan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from torch import nn

from zbpipe.costs.layers import Layer, LayerCosts, balance, split_of
from zbpipe.costs.transformer import Checkpointing, Work
from zbpipe.frameworks.layer_work import layer, products
from zbpipe.schedule.ir import Placement

Cut = Callable[..., list[list[str]]]
"""TorchTitan's function: takes the numbers of stages, of blocks, and of blocks for which embedding and head count;
returns the modules by stage."""


class Model(NamedTuple):
    """The model that TorchTitan is about to cut."""

    module: nn.Module
    """The whole model, perhaps on the meta device."""
    config: Any
    """TorchTitan's config of the model."""
    seq_len: int
    """Tokens per sequence."""


class LayerSplit:
    """The stages of a TorchTitan model on any placement: by work, or as TorchTitan or the user cuts it."""

    def __init__(self, titans: Cut, num_layers: int, parallelism: Any, model: Model, how: Checkpointing) -> None:
        """`titans` is TorchTitan's function, which also cuts the model if the user has set its ends."""
        self.by_hand: list[list[str]] | None = parallelism.module_fqns_per_model_part
        """The modules of each stage as the user lists them."""
        self._titans, self.num_layers, self._model, self.checkpointing = titans, num_layers, model, how
        self._ends = ends_of_user(parallelism)
        self._attention = attention_products(model) / num_layers
        found = {name: products(each) for name, each in modules_of(model.module).items()}
        self._products = {name: each + self._attention * name.startswith(_BLOCKS) for name, each in found.items()}
        self.products = sum(self._products.values())
        """Multiplications of the whole model for a token."""

    @cached_property
    def _everywhere(self) -> list[str]:
        """Modules that TorchTitan's function puts into every stage, such as the rotary embedding of some models."""
        first, last = self._titans(2, self.num_layers)
        return [name for name in first if name in last]

    @cached_property
    def _costs(self) -> LayerCosts:
        (names,) = self._titans(1, self.num_layers)
        listed = [name for name in names if name not in self._everywhere]
        first, *others = layers_of(self._model.module, listed, self._attention, self.checkpointing)
        return LayerCosts((layer(first.modules, first.f + sum(self._left_by([names]).values())), *others))

    def _left_by(self, parts: Sequence[Sequence[str]]) -> dict[str, float]:
        """Work of modules that these parts lack, such as image encoders. TorchTitan puts them on the first stage."""
        named = {name for part in parts for name in part}
        return {name: each for name, each in self._products.items() if each and name not in named}

    def parts(self, placement: Placement) -> list[list[str]]:
        """The modules of each stage."""
        if self.by_hand is not None and len(self.by_hand) == placement.num_stages:
            return self.by_hand
        if self._ends is not None:
            return self._titans(placement.num_stages, self.num_layers, *self._ends)
        return [[*part, *self._everywhere] for part in self._costs.modules(split_of(balance(self._costs, placement)))]

    def work(self, placement: Placement) -> Work:
        """The work of each stage, for `zbpipe.costs.transformer.usual_costs`."""
        first, *others = parts = self.parts(placement)
        found = []
        for part in ([*first, *self._left_by(parts)], *others):
            of_blocks = sum(self._products.get(name, 0.0) for name in part if name.startswith(_BLOCKS))
            found.append((of_blocks, sum(self._products.get(name, 0.0) for name in part) - of_blocks))
        return found

    def describe(self, placement: Placement) -> str:
        """The rule of the cut, and the modules of each stage."""
        parts, how = self.parts(placement), "by work"
        if parts is self.by_hand:
            how = "as listed"
        elif self._ends is not None:
            how = "the embedding counts as {} and the head as {} blocks".format(*self._ends)
        else:
            *blocks, head = self._costs.layers[1:]
            average = sum(each.seconds for each in blocks) / len(blocks) or 1
            ends = {"+".join(head.modules): head.seconds}
            # One patch of an image per token.
            ends |= {f"{name} on the first stage": 3 * each for name, each in self._left_by(parts).items()}
            how += "".join(f"; {name} counts as {each / average:.2g} blocks" for name, each in ends.items())
        return f"({how}): {' | '.join(map(describe, parts))}"


def count_stages(parallelism: Any, num_layers: int) -> int | None:
    """The number of stages by TorchTitan's `pipeline_parallel_layers_per_stage`; None if it is not set."""
    per_stage, ends = parallelism.pipeline_parallel_layers_per_stage, ends_of_user(parallelism) or ()
    # TorchTitan counts embedding and head as these numbers of further layers.
    return None if per_stage is None else ceil((num_layers + sum(ends)) / per_stage)


def ends_of_user(parallelism: Any) -> tuple[int, int] | None:
    """Numbers of blocks for which embedding and head count in the user's even cut; None for a cut by work."""
    ends = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    return None if ends == (1, 1) and parallelism.pipeline_parallel_layers_per_stage is None else ends


def describe(names: Sequence[str]) -> str:
    """A stage's modules, with consecutive blocks as a range.

    >>> describe(["tok_embeddings", "layers.0", "layers.1", "layers.2"]), describe(["layers.3", "norm", "lm_head"])
    ('tok_embeddings layers.0-2', 'layers.3 norm lm_head')
    """
    blocks = [name for name in names if name.startswith(_BLOCKS)]
    if len(blocks) < 2:
        return " ".join(names)
    first, last = names.index(blocks[0]), names.index(blocks[-1])
    return " ".join([*names[:first], f"{blocks[0]}-{blocks[-1].removeprefix(_BLOCKS)}", *names[last + 1 :]])


_BLOCKS = "layers."


def layers_of(model: nn.Module, names: Sequence[str], attention: float, how: Checkpointing) -> tuple[Layer, ...]:
    """Layers for the planner: all modules before the blocks, each block, and all modules after them.

    `names` are the modules' names, in order. `attention` is the number of multiplications per token in one block's
    attention.
    """
    first = next(number for number, name in enumerate(names) if name.startswith(_BLOCKS))
    behind = next(number for number, name in enumerate(names) if number > first and not name.startswith(_BLOCKS))
    modules = modules_of(model)

    def products_in(group: Sequence[str]) -> float:
        return sum(products(modules[name]) for name in group if name in modules)

    return (
        layer(names[:first], products_in(names[:first])),
        *(layer([name], products_in([name]) + attention, how) for name in names[first:behind]),
        layer(names[behind:], products_in(names[behind:])),
    )


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that TorchTitan assigns to stages by name: the children of a model, and the blocks of its containers.

    >>> list(modules_of(nn.ModuleDict({"layers": nn.ModuleList([nn.ReLU(), nn.ReLU()]), "norm": nn.ReLU()})))
    ['layers.0', 'layers.1', 'norm']
    """
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            found |= {f"{name}.{block}": each for block, each in child.named_children()}
        else:
            found[name] = child
    return found


def attention_products(model: Model) -> float:
    """Multiplications per token in the attention of all blocks, which sees half of the sequence on average.

    TorchTitan's FLOP estimate has 12 operations per multiplication, and counts the whole sequence. A custom model may
    have no estimate. Its attention counts as zero.
    """
    if not hasattr(model.config, "get_nparams_and_flops"):
        return 0.0
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # some models log their counts
    try:
        (_, with_attention), (_, without) = (
            model.config.get_nparams_and_flops(model.module, length) for length in (model.seq_len, 0)
        )
    finally:
        logging.disable(before)
    return float(with_attention - without) / 12
