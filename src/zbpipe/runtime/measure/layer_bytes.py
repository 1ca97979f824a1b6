"""Bytes that a layer's F, I, W and B keep and need, on the meta device or the CPU; no weights, no gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpipe.runtime._torch import live, on_meta
from zbpipe.runtime.split.layers import defer_weights
from zbpipe.runtime.split.products import WeightGradients
from zbpipe.schedule.ir import OpKind


@dataclass(frozen=True)
class LayerBytes:
    """Of one microbatch, as `zbpipe.CostModel` counts them: what F leaves includes the input."""

    activations: int
    """From F to I."""
    waits: int
    """From I to W."""
    working: Mapping[OpKind, int]
    """What an op needs only while it runs."""


def layer_bytes(module: nn.Module, x: Tensor, *args: Any) -> LayerBytes:
    """What `module(x, *args)` keeps and needs.

        >>> with torch.device("meta"):
        ...     layer, x = nn.Linear(8, 32, bias=False), torch.empty(4, 8, requires_grad=True)
        >>> found = layer_bytes(layer, x)
        >>> found.activations, found.waits  # x; x and dY
        (128, 640)

    Args:
        module: wrapped for checkpointing as in the job; its linear layers defer from now on.
        x: its input, which requires a gradient. What it gives has one tensor.
        args: further ones.

    Raises:
        RuntimeError, NotImplementedError: the module does something that meta tensors cannot.
    """
    gradients = WeightGradients()
    defer_weights(module, gradients)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with on_meta.fused_on_meta():
        split = _run(module, x, args, gradients)
        whole = _run(module, x, args, None)
    kept, waits = split.kept_by_f, split.kept_by_i
    return LayerBytes(
        kept,
        waits,
        {
            OpKind.F: max(split.most_in_f - kept, 0),
            OpKind.I: max(split.most_in_i - max(kept, waits), 0),
            OpKind.B: max(whole.most_in_i - kept, 0),
        },
    )


class _Run(NamedTuple):
    kept_by_f: int
    most_in_f: int
    kept_by_i: int
    most_in_i: int


def _run(module: nn.Module, x: Tensor, args: tuple[Any, ...], gradients: WeightGradients | None) -> _Run:
    """F and I, or without a place for gradients a whole backward."""
    x = x.detach().requires_grad_(x.requires_grad)
    own, pending = _size(x), []
    with live.StorageMeter() as meter:
        y = module(x, *args)
        most_in_f, kept_by_f = meter.peak, meter.live - _size(y)
        given = torch.empty_like(y)
        meter.peak = meter.live

        def backward() -> None:
            torch.autograd.backward([y], [given])

        if gradients is None:
            backward()
        else:
            with gradients.record() as pending:
                backward()
        most_in_i = meter.peak
        waits = _distinct(pending)
    return _Run(own + kept_by_f, own + most_in_f, waits, own + most_in_i - _size(y))


def _distinct(pending: list[Any]) -> int:
    """Bytes of all x and dY, each storage once."""
    storages = {id(each.untyped_storage()): each.untyped_storage() for one in pending for each in (one.x, one.dy)}
    return sum(storage.nbytes() for storage in storages.values())


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
