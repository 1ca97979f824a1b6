"""Work of a model's layers before any measurement: the multiplications with their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from zbpipe.costs.transformer import LLAMA_3_8B, Block, Checkpointing
from zbpipe.estimation.workload import LayerWork
from zbpipe.runtime._torch.attributes import plain_attribute
from zbpipe.runtime.measure.counts import Operations

_IN_BLOCK = 4
"""Collectives of tensor parallelism in a block: two gather the sequence, two scatter it."""
_AGAIN = {Checkpointing.NONE: 0, Checkpointing.SELECTIVE: 2, Checkpointing.FULL: 4}
"""Number of these that I repeats: selective checkpointing keeps the scattered results."""
_BF16 = 2


def products(module: nn.Module, *, recurse: bool = True) -> float:
    """Number of weight elements with which each token is multiplied. Only the experts that a token visits count.

    Without `recurse`, parts of the module do not count.

    >>> products(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 16), nn.LayerNorm(16)))
    128.0
    """
    modules = list(module.modules()) if recurse else [module]
    sizes = [[plain_attribute(each, name) for name in ("top_k", "num_experts")] for each in modules]
    share = next((top_k / experts for top_k, experts in sizes if top_k and experts), 1.0)
    return float(
        sum(
            parameter.numel() * (share if parameter.dim() == _GROUPED else 1.0)
            for each in modules
            if not isinstance(each, nn.Embedding)
            for parameter in each.parameters(recurse=False)
            if parameter.dim() > 1
        )
    )


_GROUPED = 3
"""Dimensions of expert weights, with the experts first."""


def by_products(products: float, tokens: int, how: Checkpointing, attention: float = 0.0) -> Operations:
    """Operations counted by products: two per weight with which a token is multiplied. Attention has none in W."""
    forward, in_f = 2 * products * tokens, 2 * attention * tokens
    in_i = (2.5 + (how is Checkpointing.FULL)) * in_f
    again = 1 + LLAMA_3_8B.recomputed(how)
    return Operations(forward + in_f, again * forward + in_i, forward, attention=(in_f, in_i))


class Shape(NamedTuple):
    """A layer's numbers that are not in its operations."""

    products: float = 0.0
    """Number of weights with which each token is multiplied. Only the experts that a token visits count."""
    heads_share: float = 0.5
    """Key-value heads per query head."""
    experts_per_token: int = 0
    """Number of routed experts that compute each token."""
    num_experts: int = 0
    in_experts: float = 0.0
    """Number of weights in all of them."""

    @property
    def visited(self) -> float:
        """Number of weights in the routed experts that compute a token."""
        return self.in_experts * self.experts_per_token / max(self.num_experts, 1)


NO_SHAPE = Shape()


def shape_of(block: nn.Module) -> Shape:
    found = (plain_attribute(module, "top_k") for module in block.modules())
    experts = next((each for each in found if isinstance(each, int)), 0)
    grouped = [each for each in block.parameters() if each.dim() == _GROUPED and experts]
    number = len(grouped[0]) if grouped else 0
    return Shape(products(block), _heads_share(block), experts, number, float(sum(each.numel() for each in grouped)))


def as_block(work: LayerWork, shape: Shape, dim: int, tokens: int, how: Checkpointing, compiled: bool) -> LayerWork:
    """A block's work with all that is no product: communication, norms and activation functions.

    `dim` is the width of the hidden states.
    """
    in_f, in_i = as_llama(dim, shape).traffic(how, compiled)
    return replace(
        work,
        transfers=(_IN_BLOCK, _IN_BLOCK + _AGAIN[how]),
        traffic=(_BF16 * tokens * in_f, _BF16 * tokens * in_i),
        keys=_BF16 * tokens * 2 * dim * shape.heads_share,
        routed=_BF16 * tokens * dim * shape.experts_per_token,
        num_experts=shape.num_experts,
        in_experts=shape.in_experts,
        in_routed=shape.visited / shape.products if shape.products else 0.0,
    )


def as_llama(dim: int, shape: Shape, **style: Any) -> Block:
    """A Llama block of the same width, with as many weights per token."""
    keys_and_values = round(2 * dim * shape.heads_share)
    hidden = max(shape.products - dim * (2 * dim + keys_and_values), 0) / (3 * dim)
    return Block(dim, dim, keys_and_values, round(hidden), **style)


def _heads_share(block: nn.Module) -> float:
    """Key-value heads per query head; Llama's ratio if the block does not show it."""
    for module in block.modules():
        keys, queries, queries_a_key = (plain_attribute(module, name) for name in ("n_kv_heads", "n_heads", _FUSED))
        if queries_a_key:
            return float(1 / queries_a_key)
        if keys and queries:
            return float(keys / queries)
    return LLAMA_3_8B.keys_and_values / 2 / LLAMA_3_8B.queries


_FUSED = "heads_per_kv"
"""Attribute of the fused product for queries, keys and values in TorchTitan 0.3."""
