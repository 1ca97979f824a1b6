"""What stages hand on, and what is done with them around a step. Sequences of steps are generated: test_modes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Batch, Case, bare, linear, stage
from zoo.shared import V_SHAPED, share_layer


class Plain(nn.Module):
    """Two linear layers, of a class that can be pickled."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def of_first(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return mse_loss(output[0], target)


def of_all(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum(mse_loss(each, target) for each in output)  # type: ignore[return-value]


def rows(second: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[[int], Batch]:
    """Two inputs."""

    def make(samples: int) -> Batch:
        x, y, target = torch.randn(3, samples, TOKENS, WIDTH)
        return (x, second(y)), target

    return make


def two_outputs(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return s.b(torch.tanh(s.a(x))) + y, s.c(y)


def mask_along(s: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return s.b(torch.tanh(s.a(x))) * mask, mask


def skips(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One goes on as it came."""
    return s.b(torch.tanh(s.a(x))) + y, y


def detached_second(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return s.b(torch.tanh(s.a(x)) + y), x.detach() + 1


def example() -> Tensor:
    return torch.randn(1, TOKENS, WIDTH)


def is_averaged(module: nn.Module) -> None:
    """A copy, as for an average of the weights, is a module of its own: it trains without the pipeline."""
    twin = copy.deepcopy(module)
    twin(example()).square().sum().backward()
    assert all(each.grad is not None for each in twin.parameters())
    assert all(each.grad is None for each in module.parameters())


def computes_the_same(made_from: Callable[[nn.Module, Tensor], Any]) -> Callable[[nn.Module], None]:
    def check(module: nn.Module) -> None:
        x = example()
        assert torch.allclose(made_from(module, x)(x), module(x))

    return check


def trains_alone(module: nn.Module) -> None:
    """A forward and backward outside of the pipeline is complete at once."""
    module(example()).square().sum().backward()
    assert all(each.grad is not None for each in module.parameters())
    module.zero_grad()


def has_fresh_weights(module: nn.Module) -> None:
    """Other Parameters in the layers' place, as after a load with assign=True."""
    module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)


def has_another_layer(module: nn.Module) -> None:
    """A layer that was not there when the schedule was built."""
    module.b = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for each in module.b.parameters():
            each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each))


def channels_last(s: Any, x: Tensor) -> Tensor:
    return torch.tanh(s.c(x.to(memory_format=torch.channels_last))).to(memory_format=torch.channels_last)


def images(samples: int) -> Batch:
    return (torch.randn(samples, 3, 5, 4),), torch.randn(samples, 3, 5, 4)


def gives_transposed(s: Any, x: Tensor) -> Tensor:
    """The gradient of its input is a transposed tensor."""
    return torch.tanh(s.a(x.transpose(0, 1)).transpose(0, 1).contiguous())


CASES = (
    Case("two outputs", stage(two_outputs, c=linear()), EVERY_MODE, batch=rows(), loss=of_all),
    Case("a mask goes along", stage(mask_along), EVERY_MODE, batch=rows(lambda y: y > -0.5), loss=of_first),
    Case("an output that skips", stage(skips), batch=rows(), loss=of_all),
    Case("an output without gradient", stage(detached_second), batch=rows(), loss=of_first),
    Case(
        "an output in another order",
        stage(lambda s, x: s.b(torch.tanh(s.a(x))).permute(2, 0, 1).contiguous().permute(1, 2, 0)),
        samples=3,
    ),
    Case(
        "an output with gaps",
        stage(lambda s, x: s.c(torch.tanh(s.a(x)))[..., ::2], c=linear(WIDTH, 2 * WIDTH)),
        no_gradient=("b.weight", "b.bias"),
    ),
    Case("channels last", bare(channels_last, c=lambda: nn.Conv2d(3, 3, 3, padding=1)), batch=images, samples=2),
    Case("a gradient that is not contiguous", bare(gives_transposed, a=linear()), samples=2),
    Case("gradients over two steps, shared weights", Plain, accumulates=True, schedules=V_SHAPED, share=share_layer),
    Case("a copy for an average", Plain, prepared=is_averaged),
    *(
        Case(name, Plain, ONLY_EAGER, prepared=computes_the_same(make))
        for name, make in {
            "pickle": lambda module, x: pickle.loads(pickle.dumps(module)),
            "torch.jit.trace": torch.jit.trace,
            "torch.export": lambda module, x: torch.export.export(module, (x,)).module(),
        }.items()
    ),
    Case("a backward outside", Plain, EVERY_MODE, prepared=trains_alone),
    Case("weights replaced", Plain, EVERY_MODE, between=has_fresh_weights),
    Case("another layer later", Plain, between=has_another_layer),
    Case(
        "a hook later",
        Plain,
        EVERY_MODE,
        between=lambda stage: stage.a.weight.register_hook(lambda gradient: 2 * gradient),
    ),
    Case(
        "gradients over two steps, two schedules",
        Plain,
        EVERY_MODE,
        options={"scale_grads": False},
        schedules=V_SHAPED,
        second_schedule="VHalf",
    ),
)
