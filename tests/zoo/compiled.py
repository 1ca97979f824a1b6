"""Modules and functions that compile themselves, whatever surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from zoo.case import NOT_REPEATED, ONLY_EAGER, TOKENS, WIDTH, Case, bare, linear, parameter, stage
from zoo.precision import of as rows_in


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


class Flagged(Block):
    """A second time if a flag says so."""

    def forward(self, x: Tensor, again: bool = False) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        return super().forward(x) if again else x


class Listed(Block):
    """Once for each tensor of a list."""

    def forward(self, xs: list[Tensor]) -> Tensor:  # type: ignore[override]
        return torch.stack([super(Listed, self).forward(x) for x in xs]).sum(0)


class Named(Block):
    """A dictionary in, a dictionary out."""

    def forward(self, named: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {name: super(Named, self).forward(x) for name, x in named.items()}


class Trained(Block):
    """Another way in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return super().forward(y) if self.training else y


class Gated(Block):
    """A branch that the numbers decide: the graph breaks."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.sum() > 0:
            y = super().forward(y)
        return y


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


class Twice(Deep):
    """The inner block twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(self.first(x))))


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


def compiled(module: nn.Module, backend: str = "aot_eager", **options: Any) -> Any:
    module.compile(backend=backend, **options)
    return module


def optimized(module: nn.Module, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(module, backend=backend, **options)


def around(make: Callable[[], Any], forward: Callable[..., Any] = lambda s, x: s.a(s.c(x)), **parts: Any) -> Any:
    return bare(forward, a=linear(), c=make, **parts)


def pos_inside() -> nn.Module:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos = nn.Parameter(torch.randn(TOKENS, WIDTH))
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x) + self.pos.unsqueeze(0)))

    return Positioned()


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


def region_and_layer(s: Any, x: Tensor) -> Tensor:
    """A layer of a compiled block is called once more outside of it."""
    return s.a(s.c(x)) + s.c.up(torch.tanh(x))[..., :WIDTH]


def first_without_grad(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = s.c(x)
    return s.a(s.c(x) + y)


def to_eval(stages: Any) -> None:
    for module in stages:
        module.train(not module.training)


def freeze(stages: Any) -> None:
    for module in stages:
        module.c.up.weight.requires_grad_(False)


def unfreeze(stages: Any) -> None:
    for module in stages:
        module.c.up.weight.requires_grad_(True)


def frozen_up() -> nn.Module:
    block = Block()
    block.up.weight.requires_grad_(False)
    return compiled(block)


def with_hook() -> nn.Module:
    block = Block()
    block.up.weight.register_hook(lambda gradient: 2 * gradient)
    return compiled(block)


def hooked_in_forward(s: Any, x: Tensor) -> Tensor:
    y = s.c(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.mul_(2))
    return s.a(y) + y


def autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return s.a(s.c(x)).to(x.dtype)


NESTED = [
    ("compiled in compiled", lambda: compiled(Deep(compiled(Block())))),
    ("compiled in eager", lambda: Deep(compiled(Block()))),
    ("a compiled layer in compiled", lambda: compiled(Deep(compiled(nn.Linear(WIDTH, WIDTH))))),
    ("compiled with breaks in compiled", lambda: compiled(Deep(compiled(Broken())))),
    ("optimized in optimized, with breaks", lambda: optimized(Around(optimized(Block())))),
    ("compiled beside itself", lambda: Beside(Block())),
    ("compiled beside itself in compiled", lambda: compiled(Beside(Block()))),
    ("compiled in compiled, twice", lambda: compiled(Twice(compiled(Block())))),
]

_ALL = (
    Case(
        "an optimized stage with a compiled block", lambda index: optimized(Deep(compiled(Block()))), modes=ONLY_EAGER
    ),
    Case(
        "a compiled stage with a compiled block twice",
        lambda index: compiled(Twice(compiled(Block()))),
        modes=ONLY_EAGER,
    ),
    Case("a compiled block", around(lambda: compiled(Block())), modes=ONLY_EAGER),
    Case("a compiled layer", around(lambda: compiled(nn.Linear(WIDTH, WIDTH))), modes=ONLY_EAGER),
    Case("compiled by inductor", around(lambda: compiled(Block(), "inductor")), modes=ONLY_EAGER, schedules=("ZBV",)),
    *(Case(name, around(make), modes=NOT_REPEATED if "itself" in name else ONLY_EAGER) for name, make in NESTED),
    Case("a compiled block twice", around(lambda: compiled(Block()), lambda s, x: s.a(s.c(s.c(x)))), modes=ONLY_EAGER),
    Case(
        "a compiled block more often later",
        around(lambda: compiled(Looped()), lambda s, x: s.a(s.c(x, 1 + s.microbatch))),
        modes=ONLY_EAGER,
    ),
    Case(
        "a compiled block less often later",
        around(lambda: compiled(Looped()), lambda s, x: s.a(s.c(x, 4 - s.microbatch))),
        modes=ONLY_EAGER,
    ),
    Case(
        "an optimized block more often later",
        around(lambda: optimized(Looped()), lambda s, x: s.a(s.c(x, times=1 + s.microbatch))),
        modes=ONLY_EAGER,
    ),
    Case(
        "a flag that adds a call",
        around(lambda: compiled(Flagged()), lambda s, x: s.a(s.c(x, s.microbatch > 1))),
        modes=ONLY_EAGER,
    ),
    Case(
        "a list that grows",
        around(lambda: compiled(Listed()), lambda s, x: s.a(s.c([x] * (1 + s.microbatch)))),
        modes=ONLY_EAGER,
    ),
    Case(
        "a dictionary that grows",
        around(
            lambda: compiled(Named()), lambda s, x: s.a(sum(s.c({str(n): x for n in range(1 + s.microbatch)}).values()))
        ),
        modes=ONLY_EAGER,
    ),
    Case("from training to evaluation", around(lambda: compiled(Trained())), modes=ONLY_EAGER, between=to_eval),
    Case("a branch by the numbers", around(lambda: compiled(Gated())), modes=ONLY_EAGER),
    Case("a graph break", around(lambda: compiled(Broken())), modes=ONLY_EAGER),
    Case("a compiled function", stage(compiled_function), modes=ONLY_EAGER),
    Case("a compiled block and function", around(lambda: compiled(Block()), region_and_function), modes=ONLY_EAGER),
    Case("a compiled block and its layer", around(lambda: compiled(Block()), region_and_layer), modes=ONLY_EAGER),
    Case(
        "a compiled block without grad first", around(lambda: compiled(Block()), first_without_grad), modes=ONLY_EAGER
    ),
    Case("a compiled block, frozen later", around(lambda: compiled(Block())), modes=ONLY_EAGER, between=freeze),
    Case(
        "a compiled block, thawed later",
        around(frozen_up),
        modes=ONLY_EAGER,
        between=unfreeze,
        no_gradient=("c.up.weight",),
    ),
    Case("a compiled block with a hook", around(with_hook), modes=ONLY_EAGER),
    Case("a compiled block with a hook on y", around(lambda: compiled(Block()), hooked_in_forward), modes=ONLY_EAGER),
    Case("a compiled block with pos", around(lambda: compiled(pos_inside())), modes=ONLY_EAGER),
    Case(
        "a compiled block and pos",
        around(lambda: compiled(Block()), lambda s, x: s.a(s.c(x) + s.pos[None]), pos=parameter(TOKENS, WIDTH)),
        modes=ONLY_EAGER,
    ),
    Case(
        "a compiled block under autocast",
        lambda index: around(lambda: compiled(Block()), autocast)(index).float(),
        modes=ONLY_EAGER,
        batch=rows_in(torch.float32),
        tolerance=0.05,
    ),
)

CASES = tuple(
    replace(
        case, most_ranks=2 if number % 8 == 0 else 1, schedules=case.schedules or ("ZBV", "WeightsLast", "WeightsNext")
    )
    for number, case in enumerate(_ALL)
)
"""Every schedule of torch's compiles anew, and so does every rank: a few are enough on more than one."""
