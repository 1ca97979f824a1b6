"""Modules and functions that compile themselves, whatever surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from zoo.case import ONLY_EAGER, WIDTH, Case, bare, linear, stage


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Looped(Block):
    """The block as often as it is told."""

    def forward(self, x: Tensor, times: int = 1) -> Tensor:  # type: ignore[override]
        for _ in range(times):
            x = super().forward(x)
        return x


class Named(Block):
    """A dictionary in, a dictionary out."""

    def forward(self, named: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {name: super(Named, self).forward(x) for name, x in named.items()}


class Trained(Block):
    """Another way in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return super().forward(y) if self.training else y


class Broken(Block):
    """A graph break between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return x + self.down(h)


class Deep(nn.Module):
    """A block within a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(torch.tanh(self.first(x))))


class Around(Deep):
    """Graph breaks before and after the inner block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        h = self.inner(h)
        torch._dynamo.graph_break()
        return self.last(h)


class Beside(Deep):
    """The inner block compiled, and the same block as it is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.fast = torch.compile(inner, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.fast(h) + self.inner(h.tanh()))


def compiled(module: nn.Module) -> Any:
    module.compile(backend="aot_eager")
    return module


def optimized(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def around(make: Callable[[], Any], forward: Callable[..., Any] = lambda s, x: s.a(s.c(x)), **parts: Any) -> Any:
    return bare(forward, a=linear(), c=make, **parts)


def compiled_function(s: Any, x: Tensor) -> Tensor:
    """Not the module but a function that calls its layers."""

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        return s.b(torch.tanh(s.a(x)))

    return run(x)


def region_and_function(s: Any, x: Tensor) -> Tensor:
    """A layer of a compiled block is called once more from a compiled function."""

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        return s.c.up(torch.tanh(x))[..., :WIDTH]

    return s.a(s.c(x)) + run(x)


def first_without_grad(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = s.c(x)
    return s.a(s.c(x) + y)


def set_trained(trained: bool) -> Callable[[Any], object]:
    return lambda stage: stage.c.up.weight.requires_grad_(trained)


def frozen_up() -> nn.Module:
    block = Block()
    block.up.weight.requires_grad_(False)
    return compiled(block)


def hooked_in_forward(s: Any, x: Tensor) -> Tensor:
    y = s.c(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.mul_(2))
    return s.a(y) + y


def a_dictionary(s: Any, x: Tensor) -> Tensor:
    return s.a(sum(s.c({str(n): x for n in range(1 + s.microbatch)}).values()))  # type: ignore[no-any-return]


_ALL = (
    *(
        Case(name, around(make))
        for name, make in {
            "compiled with breaks in compiled": lambda: compiled(Deep(compiled(Broken()))),
            "optimized in optimized, with breaks": lambda: optimized(Around(optimized(Block()))),
            "compiled beside itself": lambda: Beside(Block()),
        }.items()
    ),
    *(
        Case(name, around(lambda: compiled(Block()), forward))
        for name, forward in {
            "a compiled block twice": lambda s, x: s.a(s.c(s.c(x))),
            "a compiled block and function": region_and_function,
            "a compiled block and its layer": lambda s, x: s.a(s.c(x)) + s.c.up(torch.tanh(x))[..., :WIDTH],
            "a compiled block without grad first": first_without_grad,
            "a compiled block with a hook on y": hooked_in_forward,
        }.items()
    ),
    Case("a compiled function", stage(compiled_function)),
    Case(
        "a compiled block more often later",
        around(lambda: compiled(Looped()), lambda s, x: s.a(s.c(x, 1 + s.microbatch))),
    ),
    Case("a dictionary that grows", around(lambda: compiled(Named()), a_dictionary)),
    Case("from training to evaluation", around(lambda: compiled(Trained())), between=nn.Module.eval),
    Case("a compiled block, frozen later", around(lambda: compiled(Block())), between=set_trained(False)),
    Case("a compiled block, thawed later", around(frozen_up), between=set_trained(True), no_gradient=("c.up.weight",)),
)

CASES = tuple(
    replace(case, modes=ONLY_EAGER, most_ranks=1, schedules=("ZBV" if number % 4 == 0 else "WeightsLast",))
    for number, case in enumerate(_ALL)
)
"""Every run compiles anew, and so does every rank: one is enough."""
