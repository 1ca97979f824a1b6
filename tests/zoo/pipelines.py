"""What stages share and hand on, and what is done with them around a step. Sequences of steps: test_modes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Batch, Case, bare, linear, plain, stage

VOCABULARY = 12


def looped(s: Any, x: Tensor) -> Tensor:
    """Once in the first microbatch and then more often."""
    h = s.a(x)
    for _ in range(1 + s.microbatch):
        h = torch.tanh(s.b(h))
    return h


def early_exit(s: Any, x: Tensor) -> Tensor:
    """The second half runs only in some microbatches."""
    h = s.a(x)
    return s.b(torch.tanh(h)) if s.microbatch in (0, 3) else h


def tied(index: int) -> nn.Module:
    module = stage(plain)(index)
    module.b.weight = module.a.weight
    return module


def one_module_two_names(index: int) -> nn.Module:
    module = stage(lambda s, x: s.again(torch.tanh(s.a(s.b(x)))))(index)
    module.again = module.a
    return module


def swapped(s: Any, x: Tensor) -> Tensor:
    return s.b(functional_call(s.a, dict(s.c.named_parameters()), (torch.tanh(s.a(x)),)))


class Swapping(nn.Module):
    """What FSDP2 does: other parameters in the layer's place during F and I, sharded ones between."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.sharded = dict(self.lin._parameters)
        self.gathered: dict[str, nn.Parameter] = {}

    def gather(self) -> None:
        if not self.gathered:
            self.gathered = {name: nn.Parameter(each.detach().clone()) for name, each in self.sharded.items()}  # type: ignore[union-attr]
        self.lin._parameters.update(self.gathered)

    def forward(self, x: Tensor) -> Tensor:
        self.gather()
        y = torch.tanh(self.lin(x))
        self.lin._parameters.update(self.sharded)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.gather())
        return self.out(y)

    def finish_step(self) -> None:
        self.lin._parameters.update(self.sharded)
        for name, sharded in self.sharded.items():
            gradient = self.gathered[name].grad
            if gradient is not None:
                sharded.grad = gradient / 4  # type: ignore[union-attr]
        self.gathered = {}


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
    """The first and the last stage have a layer in common."""
    if 0 in stages:
        stages[max(stages)].a = stages[0].a


V_SHAPED = ("ZBV", "WeightsLast")


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
    Case("a layer used more often later", stage(looped), modes=EVERY_MODE),
    Case("an early exit", stage(early_exit), modes=EVERY_MODE),
    Case("tied weights", tied, modes=EVERY_MODE),
    Case("one module under two names", one_module_two_names),
    Case("functional_call with other parameters", stage(swapped, c=linear()), modes=EVERY_MODE),
    Case("swapped parameters", lambda index: Swapping(), modes=ONLY_EAGER, options={"scale_grads": False}),
    *(
        Case(
            f"embedding and head tied{words}",
            Language,
            batch=tokens,
            loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
            share=tie_ends,
            schedules=V_SHAPED,
            options={"scale_grads": scales},
        )
        for words, scales in ((" over stages", True), (", not scaled", False))
    ),
    Case("a layer of two stages", stage(plain), share=share_layer, schedules=V_SHAPED),
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
