"""Losses that run their own backwards during F, such as TorchTitan's chunked loss with the LM head."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from zbpipe.runtime._torch import autograd
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.weight_gradients import WeightGradients, find_changed_contents, find_changed_versions


def defer_in_loss(loss_fn: Callable[..., Tensor], gradients: WeightGradients) -> Callable[..., Tensor]:
    """`loss_fn` with the weight gradients of its own backwards deferred to the last stage's W."""
    # The loss's backward in I passes the gradients deferred in F on to W. Until then the gradients of all logits stay
    # in memory, which a chunked loss otherwise avoids.

    @wraps(loss_fn)
    def compute(*args: Any, **kwargs: Any) -> Tensor:
        with gradients.record() as pending:
            loss = loss_fn(*args, **kwargs)
        if loss.requires_grad:
            return _HandOn.apply(loss, pending, gradients)  # type: ignore[no-any-return]
        _defer_or_add(pending, gradients)
        return loss

    return compute


def _defer_or_add(pending: list[PendingGradient], gradients: WeightGradients) -> None:
    while pending:
        for gradient in pending.pop(0).parts:
            if not gradients.defer(gradient):
                gradient.accumulate()


class _HandOn(torch.autograd.Function):
    """The identity. Its backward passes on the loss's deferred gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, pending: list[PendingGradient], gradients: WeightGradients) -> Tensor:
        ctx.pending, ctx.gradients = pending, gradients
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        for gradient, words in find_changed_versions(ctx.pending) or find_changed_contents(ctx.pending):
            raise RuntimeError(
                f"{words} of a {type(gradient.layer).__name__} in the loss was changed in place between F and I, so its"
                " weight gradient in W would be wrong: keep it in I by layer.weight_products = {}"
            )
        _defer_or_add(ctx.pending, ctx.gradients)
        return dloss, None, None


autograd.copy_type(_HandOn, lambda loss, *_: loss.view_as(loss))
