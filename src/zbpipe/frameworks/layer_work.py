"""Work of a model's layers before any measurement: the multiplications with their weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zbpipe.costs.layers import Layer
from zbpipe.costs.transformer import LLAMA_3_8B, Checkpointing
from zbpipe.runtime._torch.attributes import plain_attribute


def layer(names: Sequence[str], forward: float, how: Checkpointing = Checkpointing.NONE) -> Layer:
    """A layer with these multiplications per token in F, as many in I and in W, and in I also the recomputed ones."""
    again = LLAMA_3_8B.recomputed(how)
    return Layer(tuple(names), forward, forward * (1 + again), forward, 0.0)


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
