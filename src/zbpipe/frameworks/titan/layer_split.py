"""Split of a TorchTitan model into stages if the user gives none: all ranks get about the same work.

TorchTitan counts the embedding as one block, and norm and head together as one. The head of a model with a large
vocabulary costs two or three blocks, and the embedding almost nothing. In a V both are on rank 0. Here each counts with
the multiplications that it does. Imports no torchtitan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from zbpipe.costs.layers import Layer, LayerCosts, balance, split_of
from zbpipe.costs.transformer import Checkpointing
from zbpipe.frameworks.layer_work import layer, products
from zbpipe.schedule.ir import Placement

Cut = Callable[..., list[list[str]]]
"""TorchTitan's function: takes the numbers of stages, of blocks, and of blocks for which embedding and head count;
returns the modules by stage."""

logger = logging.getLogger(__name__)


class Model(NamedTuple):
    """The model that TorchTitan is about to cut."""

    module: nn.Module
    """The whole model, perhaps on the meta device."""
    config: Any
    """TorchTitan's config of the model."""
    seq_len: int
    """Tokens per sequence."""


def make_cut(titans: Cut, placement: Placement, parallelism: Any, model: Model, how: Checkpointing) -> Cut:
    """Replacement for TorchTitan's function. It cuts as TorchTitan does if the user chose a cut."""

    def cut(num_stages: int, num_layers: int, input_weight: int = 1, output_weight: int = 1) -> list[list[str]]:
        if ends_of_user(parallelism) is not None:
            # TorchTitan asks for one or two stages on each rank; a schedule may have more.
            parts = titans(placement.num_stages, num_layers, input_weight, output_weight)
            _log(parts, f"the embedding counts as {input_weight} and the head as {output_weight} blocks")
            return parts
        (names,) = titans(1, num_layers)
        everywhere = _in_all_stages(titans, num_layers)
        names = [name for name in names if name not in everywhere]
        first, *others = layers_of(model.module, names, attention_products(model) / num_layers, how)
        unlisted = {name: products(each) for name, each in modules_of(model.module).items() if name not in names}
        costs = LayerCosts((layer(first.modules, first.f + sum(unlisted.values())), *others))
        parts = [[*part, *everywhere] for part in costs.modules(split_of(balance(costs, placement)))]
        *blocks, head = (layer.seconds for layer in costs.layers[1:])
        average = sum(blocks) / len(blocks)
        ends = {"+".join(others[-1].modules): head}
        # TorchTitan puts image encoders here. One patch per token.
        ends |= {f"{name} on the first stage": layer([name], each).seconds for name, each in unlisted.items() if each}
        counted = ", ".join(f"{name} counts as {each / (average or 1):.2g} blocks" for name, each in ends.items())
        _log(parts, f"by work; {counted}")
        return parts

    return cut


def _in_all_stages(titans: Cut, num_layers: int) -> list[str]:
    """Modules that TorchTitan's function puts into every stage, such as the rotary embedding of some models."""
    first, last = titans(2, num_layers)
    return [name for name in first if name in last]


def ends_of_user(parallelism: Any) -> tuple[int, int] | None:
    """Numbers of blocks for which embedding and head count in the user's even cut; None for a cut by work."""
    ends = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    return None if ends == (1, 1) and parallelism.pipeline_parallel_layers_per_stage is None else ends


def _log(parts: Sequence[Sequence[str]], how: str) -> None:
    logger.info(
        "Layers by stage (%s): %s. parallelism.module_fqns_per_model_part replaces this cut",
        how,
        " | ".join(map(describe, parts)),
    )


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
