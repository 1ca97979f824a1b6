"""torch's op for attention, as one op on the meta device, and what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ATTENTION_OPERATIONS", "attention_as_one_op"]

_FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def attention_as_one_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`, which on the meta device torch takes apart into products."""
    result: Tensor = _FORWARD(query, key, value, attn_mask, True, dropout_p, is_causal)[0]
    return result


def _forward(query: Any, key: Any, value: Any, bias: Any, lse: Any, p: Any, is_causal: bool = False, **_: Any) -> int:
    """q times k, and the result times v; under a causal mask half of each."""
    batch, heads, length, width = query
    return int(batch * heads * length * key[2] * 2 * (width + value[3]) * (0.5 if is_causal else 1))


def _backward(grad: Any, query: Any, key: Any, value: Any, *more: Any, **_: Any) -> int:
    """The scores again, and two products for each of the forward's two."""
    batch, heads, length, width = query
    is_causal = len(more) > _CAUSAL and more[_CAUSAL]
    return int(batch * heads * length * key[2] * 2 * (3 * width + 2 * value[3]) * (0.5 if is_causal else 1))


_CAUSAL = 7
"""The place of `is_causal` behind the value."""

ATTENTION_OPERATIONS = {_FORWARD: _forward, _BACKWARD: _backward}
"""For torch's `FlopCounterMode(custom_mapping=...)`, whose own formulas know no causal mask."""
