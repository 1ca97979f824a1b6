"""What stages hand on, and what is done with them around a step."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Batch, Case, bare, linear, stage
from zoo.shared import share_layer


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


def two_rows(samples: int) -> Batch:
    return (torch.randn(samples, TOKENS, WIDTH), torch.randn(samples, TOKENS, WIDTH)), torch.randn(
        samples, TOKENS, WIDTH
    )


def with_mask(samples: int) -> Batch:
    shape = (samples, TOKENS, WIDTH)
    return (torch.randn(shape), torch.rand(shape) > 0.3), torch.randn(shape)


def two_outputs(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return s.b(torch.tanh(s.a(x))) + y, s.c(y)


def mask_along(s: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return s.b(torch.tanh(s.a(x))) * mask, mask


def skips(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One goes on as it came."""
    return s.b(torch.tanh(s.a(x))) + y, y


def detached_second(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return s.b(torch.tanh(s.a(x)) + y), x.detach() + 1


def same_twice(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor, handed on twice."""
    out = s.b(torch.tanh(s.a(x)) + y)
    return out, 1 * out


def averaged(stages: Sequence[nn.Module]) -> None:
    """A copy, as for an average of the weights, is a module of its own: it trains without the pipeline."""
    for module in stages:
        twin = copy.deepcopy(module)
        twin(torch.randn(1, TOKENS, WIDTH)).square().sum().backward()
        assert all(each.grad is not None for each in twin.parameters())
        assert all(each.grad is None for each in module.parameters())


def pickled(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        twin = pickle.loads(pickle.dumps(module))
        x = torch.randn(1, TOKENS, WIDTH)
        assert torch.equal(twin(x), module(x))


def saved(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert twin.state_dict().keys() == module.state_dict().keys()


def traced(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        x = torch.randn(1, TOKENS, WIDTH)
        assert torch.allclose(torch.jit.trace(module, x)(x), module(x))


def exported(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        x = torch.randn(1, TOKENS, WIDTH)
        assert torch.allclose(torch.export.export(module, (x,)).module()(x), module(x))


def trained_alone(stages: Sequence[nn.Module]) -> None:
    """A forward and backward outside of the pipeline is complete at once."""
    for module in stages:
        module(torch.randn(1, TOKENS, WIDTH)).square().sum().backward()
        assert all(each.grad is not None for each in module.parameters())
        module.zero_grad()


def stepped(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        torch.optim.SGD(module.parameters(), lr=0.1).step()


def fresh_weights(stages: Sequence[nn.Module]) -> None:
    """Other Parameters in the layers' place, as after a load with assign=True."""
    for module in stages:
        state = {name: each.clone() for name, each in module.state_dict().items()}
        module.load_state_dict(state, assign=True)


def freeze(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        module.a.requires_grad_(False)


def thaw(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        module.a.requires_grad_(True)


def half_frozen(index: int) -> nn.Module:
    module = Plain(index)
    module.a.requires_grad_(False)
    return module


def another_layer(stages: Sequence[nn.Module]) -> None:
    """A layer that was not there when the schedule was built."""
    for module in stages:
        module.b = copy.deepcopy(nn.Linear(WIDTH, WIDTH).requires_grad_(True))
        with torch.no_grad():
            for each in module.b.parameters():
                each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each))


def hooked_later(stages: Sequence[nn.Module]) -> None:
    for module in stages:
        module.a.weight.register_hook(lambda gradient: 2 * gradient)


def filled(stages: Sequence[nn.Module]) -> None:
    """`.grad` is there, and zero, instead of None."""
    for module in stages:
        for each in module.parameters():
            each.grad = torch.zeros_like(each)


OURS = ("ZBV", "WeightsLast", "WeightsNext", "ZBH1")
"""torch's own schedules divide what is in `.grad` after each step, and after an evaluation, too."""


def lstm() -> nn.Module:
    return nn.LSTM(WIDTH, WIDTH, batch_first=True)


def of_lstm(s: Any, x: Tensor) -> Tensor:
    """Its steps are contiguous, not its samples."""
    return torch.tanh(s.rnn(x)[0])


def channels_last(s: Any, x: Tensor) -> Tensor:
    return torch.tanh(s.c(x.to(memory_format=torch.channels_last))).to(memory_format=torch.channels_last)


def images(samples: int) -> Batch:
    return (torch.randn(samples, 3, 5, 4),), torch.randn(samples, 3, 5, 4)


def gives_transposed(s: Any, x: Tensor) -> Tensor:
    """The gradient of its input is a transposed tensor."""
    return torch.tanh(s.a(x.transpose(0, 1)).transpose(0, 1).contiguous())


def gives_gaps(s: Any, x: Tensor) -> Tensor:
    """The gradient of its input is every second column of another one."""
    return s.b(torch.tanh(s.a(Interleaved.apply(x))))


class Interleaved(torch.autograd.Function):
    """The identity, whose backward gives a part of a wider tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.stack([dy, dy], dim=-1)[..., 0]


NOT_ALL: tuple[str, ...] = ("c.weight", "c.bias")

CASES = (
    Case("two outputs", stage(two_outputs, c=linear()), batch=two_rows, loss=of_all, modes=EVERY_MODE),
    Case(
        "two outputs, one for the loss",
        stage(two_outputs, c=linear()),
        batch=two_rows,
        loss=of_first,
        no_gradient=NOT_ALL,
        modes=EVERY_MODE,
    ),
    Case("a mask goes along", stage(mask_along), batch=with_mask, loss=of_first, modes=EVERY_MODE),
    Case("an output that skips", stage(skips), batch=two_rows, loss=of_all),
    Case("an output without gradient", stage(detached_second), batch=two_rows, loss=of_first),
    Case("an output twice", stage(same_twice), batch=two_rows, loss=of_all),
    Case("an output that is a view", stage(lambda s, x: s.b(torch.tanh(s.a(x))).flatten().view(1, TOKENS, WIDTH))),
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
    Case(
        "an output that is expanded",
        stage(lambda s, x: s.b(torch.tanh(s.a(x))).mean(1, keepdim=True).expand(-1, TOKENS, -1)),
    ),
    Case("an output of an LSTM", bare(of_lstm, rnn=lstm), samples=3),
    Case("channels last", bare(channels_last, c=lambda: nn.Conv2d(3, 3, 3, padding=1)), batch=images, samples=2),
    Case("a gradient that is not contiguous", bare(gives_transposed, a=linear()), samples=2),
    Case("a gradient with gaps", stage(gives_gaps), samples=2),
    Case("gradients over two steps, divided in each", Plain, accumulates=True, schedules=OURS),
    Case(
        "gradients over two steps, shared weights",
        Plain,
        accumulates=True,
        schedules=("ZBV", "WeightsLast", "WeightsNext"),
        share=share_layer,
    ),
    *(
        Case(f"an evaluation between, {mode}", Plain, accumulates=True, schedules=OURS, evaluates=mode)
        for mode in get_args(Literal["no_grad", "inference_mode", "enable_grad"])
    ),
    Case("a copy for an average", Plain, prepared=averaged),
    Case("pickle", Plain, prepared=pickled),
    Case("torch.jit.trace", Plain, modes=ONLY_EAGER, prepared=traced),
    Case("torch.export", Plain, modes=ONLY_EAGER, prepared=exported),
    Case("a backward outside", Plain, prepared=trained_alone, modes=EVERY_MODE),
    Case("an optimizer step", Plain, between=stepped),
    Case("weights replaced", Plain, between=fresh_weights, modes=EVERY_MODE),
    Case("frozen later", Plain, between=freeze, modes=EVERY_MODE),
    Case("thawed later", half_frozen, between=thaw, no_gradient=("a.weight", "a.bias"), modes=EVERY_MODE),
    Case("another layer later", Plain, between=another_layer),
    Case("a hook later", Plain, between=hooked_later, modes=EVERY_MODE),
    Case("gradients that are zero at first", Plain, prepared=filled),
    Case("gradients over two steps", Plain, options={"scale_grads": False}),
    Case(
        "gradients over two steps, two schedules",
        Plain,
        options={"scale_grads": False},
        schedules=("ZBV", "WeightsLast", "WeightsNext"),
        second_schedule="VHalf",
        modes=EVERY_MODE,
    ),
    Case("another schedule later", Plain, schedules=("ZBV", "WeightsLast", "WeightsNext"), second_schedule="VMin"),
    Case(
        "another schedule later, with W last",
        stage(lambda s, x: s.b(s.a(x))),
        schedules=("ZBV", "WeightsNext"),
        second_schedule="WeightsLast",
    ),
)
