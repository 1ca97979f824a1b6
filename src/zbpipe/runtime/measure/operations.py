"""Count the floating-point operations of F, I and W of a module on meta tensors, where nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zbpipe.runtime._torch import autograd, on_meta
from zbpipe.runtime.split.layers import defer_weights
from zbpipe.runtime.split.products import PendingGradient, WeightGradients

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one microbatch."""

    f: float
    """Of the forward."""
    i: float
    """Of the backward for the input, with what checkpointing recomputes."""
    w: float
    """Of the backward for the weights."""


def operations(module: nn.Module, *args: Any, **kwargs: Any) -> Operations:
    """What F, I and W of `module` compute, split as zbpipe splits them.

        >>> with torch.device("meta"):
        ...     layer, x = nn.Linear(8, 32, bias=False), torch.empty(4, 8, requires_grad=True)
        >>> operations(layer, x)
        Operations(f=2048.0, i=2048.0, w=2048.0)

    Only products count, as in torch's `FlopCounterMode`. Causal attention costs half of what it would without a mask,
    and its backward 2.5 times its forward, because it computes the scores again.

    Args:
        module: on the meta device, wrapped for checkpointing as in the job; its linear layers defer from now on.
        args: for it, on the meta device; those that need a gradient require one. Likewise `kwargs`.

    Raises:
        RuntimeError, NotImplementedError: the module does what meta tensors cannot, such as looking at values.
    """
    gradients = WeightGradients()
    defer_weights(module, gradients)
    with on_meta.fused_on_meta():
        output, forward = _count(lambda: module(*args, **kwargs))
        results = [leaf for leaf in autograd.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        with gradients.record() as pending:
            given = [torch.empty_like(leaf) for leaf in results]
            _, backward = _count(lambda: torch.autograd.backward(results, given))
        _, weights = _count(lambda: _accumulate(pending))
    return Operations(forward, backward, weights)


def _accumulate(pending: list[PendingGradient]) -> None:
    for gradient in pending:
        gradient.accumulate()


def _count(run: Callable[[], _Result]) -> tuple[_Result, float]:
    with FlopCounterMode(display=False, custom_mapping=dict(on_meta.ATTENTION_OPERATIONS)) as counter:
        result = run()
    return result, float(counter.get_total_flops())
