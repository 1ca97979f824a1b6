"""Layers and weights that are used more than once, within a stage or by several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Batch, Case, linear, plain, stage

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
)
