"""Operations of a layer's F, I and W, and their kept and working memory, counted on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zbpipe.runtime._torch import autograd, on_meta
from zbpipe.runtime.split.deferring_layers import defer_weights
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.weight_gradients import WeightGradients, accumulate
from zbpipe.runtime.split.work import WeightWork, find_products
from zbpipe.schedule.ir import OpKind

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Operations:
    """FLOPs per microbatch."""

    f: float
    i: float
    """FLOPs of I, including recomputation by checkpointing."""
    w: float
    in_i: float = 0.0
    """FLOPs of weight gradients that I computes, a part of `i`."""
    attention: tuple[float, float] = (0.0, 0.0)
    """FLOPs of attention in F and in I."""


def count_operations(module: nn.Module, *args: Any, **kwargs: Any) -> Operations:
    """FLOPs of F, I and W of `module`, with zbpipe's split.

        >>> with torch.device("meta"):
        ...     layer, x = nn.Linear(8, 32, bias=False), torch.empty(4, 8, requires_grad=True)
        >>> count_operations(layer, x)
        Operations(f=2048.0, i=2048.0, w=2048.0, in_i=0.0, attention=(0.0, 0.0))

    Only products count, as in torch's `FlopCounterMode`. Causal attention costs half of attention without a mask, and
    its backward 2.5 times its forward, because it computes the scores again.

    Args:
        module: on the meta device, wrapped for checkpointing as in the job; its linear layers defer from now on.
        args, kwargs: its arguments on the meta device, with `requires_grad` where a gradient is needed.

    Raises:
        RuntimeError, NotImplementedError: the module does something that meta tensors do not support, such as reading
            values.
    """
    gradients = WeightGradients()
    defer_weights(module, gradients)
    with on_meta.fuse_on_meta():
        output, forward, in_f = _count(lambda: module(*args, **kwargs))
        results = _results(output)
        products = find_products(results)
        with gradients.record() as pending:
            given = [torch.empty_like(leaf) for leaf in results]
            _, backward, in_i = _count(lambda: torch.autograd.backward(results, given))
        work = WeightWork(module, products, pending)
        _, weights, _ = _count(lambda: [*accumulate(pending)])
    weights = max(weights, work.flops * work.share)  # the counter misses sums into a part of a parameter
    return Operations(forward, backward, weights, work.flops * (1 - work.share), (in_f, in_i))


def _results(output: Any) -> list[Tensor]:
    return [leaf for leaf in autograd.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _count(run: Callable[[], _Result]) -> tuple[_Result, float, float]:
    with FlopCounterMode(display=False, custom_mapping=dict(on_meta.OPERATIONS)) as counter:
        result = run()
    counts = counter.get_flop_counts().get("Global", {})
    attention = sum(flops for operation, flops in counts.items() if "attention" in str(operation))
    return result, float(counter.get_total_flops()), float(attention)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per microbatch, without weights and gradients, as `zbpipe.CostModel` counts: F also keeps the input."""

    activations: int
    """Bytes kept from F to I."""
    waits: int
    """Bytes kept from I to W."""
    working: Mapping[OpKind, int]
    """The working memory of each kind of op."""


def count_bytes(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> LayerBytes:
    """Kept and working memory of `module(x, *args, **kwargs)`, on the meta device or the CPU.

        >>> with torch.device("meta"):
        ...     layer, x = nn.Linear(8, 32, bias=False), torch.empty(4, 8, requires_grad=True)
        >>> found = count_bytes(layer, x)
        >>> found.activations, found.waits  # x; x and dY
        (128, 640)

    Arguments and errors are those of `count_operations`.
    """
    gradients = WeightGradients()
    defer_weights(module, gradients)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with on_meta.fuse_on_meta():
        kept, most_in_f, waits, most_in_i = _measure(lambda x: module(x, *args, **kwargs), x, gradients)
        *_, most_in_b = _measure(lambda x: module(x, *args, **kwargs), x, None)
    working = {OpKind.F: most_in_f - kept, OpKind.I: most_in_i - max(kept, waits), OpKind.B: most_in_b - kept}
    return LayerBytes(kept, waits, {kind: max(size, 0) for kind, size in working.items()})


def _measure(run: Callable[[Tensor], Any], x: Tensor, gradients: WeightGradients | None) -> tuple[int, int, int, int]:
    """Kept and peak bytes of F, then of I. Without `gradients`, of a whole backward instead of I."""
    x = x.detach().requires_grad_(x.requires_grad)
    own = _size(x)
    with on_meta.StorageMeter() as meter:
        results = _results(run(x))
        output = sum(map(_size, results))
        most_in_f, kept_by_f = meter.peak, meter.live - output
        given = [torch.empty_like(leaf) for leaf in results]
        meter.reset_peak()
        recorded: AbstractContextManager[list[PendingGradient]] = gradients.record() if gradients else nullcontext([])
        with recorded as pending:
            torch.autograd.backward(results, given)
        most_in_i = meter.peak
        storages = {id(each.untyped_storage()): each.untyped_storage() for one in pending for each in (one.x, one.dy)}
        waits = sum(storage.nbytes() for storage in storages.values())
    return own + kept_by_f, own + most_in_f, waits, own + most_in_i - output


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
