"""Linear layers that can put their weight gradient off: I leaves x and dY behind, W is a drain of GEMMs.

One ordinary backward runs as I. Where autograd would compute dW = dY^T x of a linear layer, `_DeferredLinear` keeps the
pair (x, dY) in the `WeightGradients` that is recording, and W multiplies and accumulates the pairs later. The autograd
graph is walked once and is gone after I, so checkpointed blocks are recomputed once, in I.

Outside of a recording the same layers compute dW on the spot, as any linear does. Thus a full backward, torch's
metadata inference before the first step, a loss that runs its own backward during F, and a module used without a
pipeline all give complete gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from zbpipe.runtime import _torch


class PendingGradient(NamedTuple):
    """What W needs for one use of one linear layer."""

    weight: Tensor
    """The leaf parameter, (out, in)."""
    x: Tensor
    """The layer's input, (..., in)."""
    dy: Tensor
    """The gradient of the layer's output, (..., out)."""

    def accumulate(self) -> None:
        """Add dY^T x to `weight.grad`, in the dtype in which autograd would accumulate it."""
        weight, x, dy = self.weight, _rows(self.x), _rows(self.dy)
        grad = weight.grad
        if grad is None:
            gradient = dy.t().mm(x)
            weight.grad = gradient.to(_torch.grad_dtype(weight, gradient))
        elif grad.is_sparse:  # from an embedding that shares this weight
            weight.grad = dy.t().mm(x) + grad
        elif grad.dtype == dy.dtype:
            grad.addmm_(dy.t(), x)
        else:
            grad.add_(dy.t().mm(x))


class WeightGradients:
    """Collects the weight gradients that backwards put off. One per schedule and rank."""

    def __init__(self) -> None:
        # A plain attribute: autograd runs the backward of CUDA ops in threads of its own.
        self._recording: list[PendingGradient] | None = None

    @contextmanager
    def record(self) -> Iterator[list[PendingGradient]]:
        """Within, linear layers put their weight gradients off into the list that this gives."""
        pending: list[PendingGradient] = []
        self._recording = pending
        try:
            yield pending
        finally:
            self._recording = None

    def defer(self, gradient: PendingGradient) -> bool:
        """Take over `gradient`; False if nothing is recording and it has to be computed now."""
        if self._recording is None:
            return False
        self._recording.append(gradient)
        return True


def defer_linears(module: nn.Module, gradients: WeightGradients) -> None:
    """Make every `nn.Linear` in `module` put its weight gradient off while `gradients` records.

    Parameters, buffers and their names stay as they are. What cannot be put off gets its gradient in I, from autograd:
    parametrized weights, weights with hooks, DTensors and other tensor subclasses, whatever runs inside a compiled
    region, and the parameters of all other layers. A layer that was prepared before follows the new `gradients`.
    """
    for layer in module.modules():
        if isinstance(layer.forward, _DeferringForward):
            layer.forward.gradients = gradients
        elif isinstance(layer, nn.Linear):
            layer.forward = _DeferringForward(layer, gradients)  # type: ignore[method-assign]


class _DeferringForward:
    """Stands in for the `forward` of one linear layer."""

    def __init__(self, layer: nn.Linear, gradients: WeightGradients) -> None:
        self.layer = layer
        self.gradients = gradients
        self.original = layer.forward
        self.is_plain = getattr(layer.forward, "__func__", None) is nn.Linear.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if self.is_plain:
            return self.forward(*args, **kwargs)
        # A subclass with a forward of its own, or one that was wrapped: keep it, and catch the linear inside.
        with _CatchLinear(self.layer, self.gradients):
            return self.original(*args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        return _linear(self.gradients, input, self.layer.weight, self.layer.bias)


class _CatchLinear(TorchFunctionMode):
    """Diverts `F.linear` with one of the layer's own parameters as its weight."""

    def __init__(self, layer: nn.Linear, gradients: WeightGradients) -> None:
        super().__init__()
        self.layer = layer
        self.gradients = gradients

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            if any(weight is parameter for parameter in self.layer.parameters(recurse=False)):
                return _linear(self.gradients, *args, **kwargs)
        return func(*args, **kwargs)


def _linear(gradients: WeightGradients, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _can_defer(input, weight):
        return F.linear(input, weight, bias)
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.is_floating_point():
        # The product runs in autocast's dtype, so that is the x to keep; autocast itself casts the weight.
        input = input.to(torch.get_autocast_dtype(device))
    return _DeferredLinear.apply(input, weight, bias, gradients)  # type: ignore[no-any-return]


def _can_defer(x: Tensor, weight: Tensor) -> bool:
    """Only a leaf has a `.grad` to add to, and only with plain tensors is W no more than a GEMM."""
    plain = (Tensor, nn.Parameter)
    return (
        weight.requires_grad
        and weight.is_leaf
        and torch.is_grad_enabled()
        and type(weight) in plain
        and type(x) in plain
    )


class _DeferredLinear(torch.autograd.Function):
    """y = x W^T + b, whose backward gives dX and db at once and leaves dW to the recording, if there is one.

    x: (..., in); W: (out, in); b: (out,) or None; y: (..., out).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        # Checkpointing hands out a copy of a saved tensor; only this is the leaf whose .grad counts.
        ctx.weight = weight
        ctx.gradients = gradients
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy.matmul(weight.to(dy.dtype))
        # Hooks on the weight wait for its gradient in the backward itself. And x is detached, because it would keep
        # the whole graph that made it alive until W.
        gradient = PendingGradient(ctx.weight, x.detach(), dy)
        if _torch.has_hooks(ctx.weight) or not ctx.gradients.defer(gradient):
            dw = _rows(dy).t().mm(_rows(x)).to(ctx.weight.dtype)
        if ctx.needs_input_grad[2]:
            db = _rows(dy).sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, None


def _rows(tensor: Tensor) -> Tensor:
    """All leading dimensions in one: (..., n) to (rows, n)."""
    return tensor.reshape(-1, tensor.shape[-1])
