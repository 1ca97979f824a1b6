"""What stages share and hand on, and what is done with them around a step. Sequences of steps: test_modes."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Batch, Case, bare, linear, plain, stage

VOCABULARY = 12


def early_exit(s: Any, x: Tensor) -> Tensor:
    """The second half runs only in some microbatches."""
    h = s.a(x)
    return s.b(torch.tanh(h)) if s.microbatch in (0, 3) else h


def tied(index: int) -> nn.Module:
    module = stage(plain)(index)
    module.b.weight = module.a.weight
    return module


def tokens(samples: int) -> Batch:
    return (torch.randint(VOCABULARY, (samples, TOKENS)),), torch.randint(VOCABULARY, (samples, TOKENS))


class Language(nn.Module):
    """Embedding on the first stage, head on the last; the middle has neither."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.head: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embedding is None else self.embedding(x)
        h = h + torch.tanh(self.lin(h))
        return h if self.head is None else self.head(h)


def tie_ends(stages: Mapping[int, nn.Module]) -> None:
    last = max(stages)
    if 0 in stages:  # a V has the last one there, too
        stages[last].head = nn.Linear(WIDTH, VOCABULARY, bias=False)  # type: ignore[assignment]
        stages[last].head.weight = stages[0].embedding.weight  # type: ignore[union-attr]


def share_layer(stages: Mapping[int, nn.Module]) -> None:
    if 0 in stages:
        stages[max(stages)].a = stages[0].a


V_SHAPED = ("ZBV", "WeightsLast")


def layers(index: int) -> nn.Module:
    return nn.Sequential(OrderedDict(a=linear()(), tanh=nn.Tanh(), b=linear()()))


def of_first(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return mse_loss(output[0], target)


def of_all(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum(mse_loss(each, target) for each in output)  # type: ignore[return-value]


def rows(second: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[[int], Batch]:
    def make(samples: int) -> Batch:
        x, y, target = torch.randn(3, samples, TOKENS, WIDTH)
        return (x, second(y)), target

    return make


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


def is_traced(module: nn.Module) -> None:
    x = example()
    assert torch.allclose(torch.jit.trace(module, x)(x), module(x))


def trains_alone(module: nn.Module) -> None:
    module(example()).square().sum().backward()
    assert all(each.grad is not None for each in module.parameters())
    module.zero_grad()


def has_fresh_weights(module: nn.Module) -> None:
    """Other Parameters in the layers' place, as after a load with assign=True."""
    module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)


def has_another_layer(module: nn.Module) -> None:
    module.b = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for each in module.b.parameters():
            each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each))


def gives_transposed(s: Any, x: Tensor) -> Tensor:
    """The gradient of its input is a transposed tensor."""
    return torch.tanh(s.a(x.transpose(0, 1)).transpose(0, 1).contiguous())


_ALL = (
    Case("an early exit", stage(early_exit), modes=EVERY_MODE),
    Case("tied weights", tied, modes=EVERY_MODE),
    *(
        Case(
            f"embedding and head tied{words}",
            Language,
            batch=tokens,
            loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
            share=tie_ends,
            schedules=V_SHAPED,
            scale_grads=scales,
        )
        for words, scales in ((" over stages", True), (", not scaled", False))
    ),
    Case("a layer of two stages", stage(plain), share=share_layer, schedules=V_SHAPED),
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
    Case("a gradient that is not contiguous", bare(gives_transposed, a=linear()), samples=2),
    Case("gradients over two steps, shared weights", layers, accumulates=True, schedules=V_SHAPED, share=share_layer),
    Case("a copy for an average", layers, prepared=is_averaged),
    Case("torch.jit.trace", layers, ONLY_EAGER, prepared=is_traced),
    Case("a backward outside", layers, EVERY_MODE, prepared=trains_alone),
    Case("weights replaced", layers, EVERY_MODE, between=has_fresh_weights),
    Case("another layer later", layers, between=has_another_layer),
    Case(
        "a hook later",
        layers,
        EVERY_MODE,
        between=lambda stage: stage.a.weight.register_hook(lambda gradient: 2 * gradient),
    ),
    Case(
        "gradients over two steps, two schedules",
        layers,
        EVERY_MODE,
        scale_grads=False,
        schedules=V_SHAPED,
        second_schedule="VHalf",
    ),
)
CASES = tuple(replace(case, on_two_ranks=True) for case in _ALL)
