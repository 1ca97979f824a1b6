"""A module with the backward split beside the same module without, on the same inputs."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zbpipe.runtime.split.deferring_layers import defer_in_compiled_regions, defer_weights
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.weight_gradients import WeightGradients, accumulate

Call = Callable[..., Tensor]


def call(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs)  # type: ignore[no-any-return]


CALLS: dict[str, Call] = {
    "plain": call,
    "checkpointed": lambda module, *inputs: checkpoint(module, *inputs, use_reentrant=False),  # type: ignore[no-any-return]
}


class Compared:
    """With what their gradients may differ by, or their norms; `of_y` is for their outputs and the gradients of x."""

    def __init__(self, module: nn.Module, *, of_norm: float = 0.0, of_y: Any = None, **tolerance: Any) -> None:
        self.module, self.plain, self.gradients = module, copy.deepcopy(module), WeightGradients()
        self.tolerance: Any = tolerance or {"rtol": 1e-5, "atol": 1e-6}
        self.of_y, self.of_norm = self.tolerance if of_y is None else of_y, of_norm
        defer_weights(module, self.gradients)
        defer_in_compiled_regions(module, self.gradients)

    def train(self, *inputs: Tensor, call: Call = call, on_trial: bool = False) -> list[PendingGradient]:
        """F, I and W of one microbatch of both; returns what I has left to W."""
        with self.gradients.record(on_trial) as pending:
            found = train(self.module, *inputs, call=call)
        left = [part for each in pending for part in each.parts]
        if not on_trial:  # then it is added already
            list(accumulate(pending))
        torch.testing.assert_close(found, train(self.plain, *inputs, call=call), **self.of_y)
        self.compare()
        return left

    def compare(self) -> None:
        for (name, found), expected in zip(self.module.named_parameters(), self.plain.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None), name
            if found.grad is not None:
                assert not found.grad.requires_grad
                assert type(found.grad) in (Tensor, DTensor), "it is to be computed later, by what may have changed"
                gradient = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
                if self.of_norm:
                    assert found.grad.dtype == expected.grad.dtype
                    assert (gradient - expected.grad).norm() < self.of_norm * expected.grad.norm(), name
                    continue
                torch.testing.assert_close(gradient.to_dense(), expected.grad.to_dense(), **self.tolerance, msg=name)


def train(module: nn.Module, *inputs: Tensor, call: Call = call) -> list[Tensor]:
    """Backward of the sum of squares; the module's output and the gradients of its inputs."""
    leaves = [each.detach().clone() for each in inputs]
    trained = [each.requires_grad_() for each in leaves if each.is_floating_point() or each.is_complex()]
    y = call(module, *(torch.tanh(each) if each.requires_grad else each for each in leaves))
    y.abs().square().sum().backward()
    return [y.detach(), *(each.grad for each in trained if each.grad is not None)]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def functions(self) -> list[Any]:
        return [func for func, *_ in self.seen if func is not torch.ops.aten.t.default]

    def arguments(self, *functions: Any) -> list[tuple[Any, ...]]:
        return [args for func, args, _ in self.seen if func in functions]
