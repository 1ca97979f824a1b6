"""Ways to call a linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import EVERY_MODE, TOKENS, WIDTH, Case, bare, buffer, frozen, linear, parameter, plain, stage


class Doubled(nn.Linear):
    """A forward of its own around that of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Scaled(nn.Linear):
    """A forward of its own that multiplies itself."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2 * self.weight, self.bias) + F.linear(input, self.weight)


class ByKeywords(nn.Linear):
    """A forward of its own that names the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, weight=self.weight, bias=self.bias)


def wrapped_in_a_closure() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    inner = layer.forward

    def forward(input: Tensor) -> Tensor:
        return 3 * inner(input)

    layer.forward = forward  # type: ignore[method-assign]
    return layer


def replaced_on_the_instance() -> nn.Linear:
    """A forward of a function that knows the layer, not of a closure around the old forward."""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda input: torch.addmm(layer.bias, input.flatten(0, -2), layer.weight.t()).view_as(input)  # type: ignore[method-assign]
    return layer


def used_twice(s: Any, x: Tensor) -> Tensor:
    y = s.a(x)
    return y * y + s.b(y)


def without_grad(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = s.a(x)
    return s.b(h) + x


def in_two_halves(s: Any, x: Tensor) -> Tensor:
    """What tensor parallelism does by hand."""
    first, second = s.a.weight.chunk(2)
    return s.b(torch.tanh(torch.cat([F.linear(x, first), F.linear(x, second)], -1)))


def only_bias() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(False)
    return layer


def only_weight() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


def many(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


CASES = (
    Case("plain", stage(plain), modes=EVERY_MODE),
    Case("the stage is a linear layer", lambda index: nn.Linear(WIDTH, WIDTH), modes=EVERY_MODE),
    Case("no linear layer", lambda index: nn.LayerNorm(WIDTH)),
    Case("a subclass with its own forward", bare(lambda s, x: s.a(torch.tanh(x)), a=lambda: Doubled(WIDTH, WIDTH))),
    Case("a subclass that multiplies twice", bare(lambda s, x: s.a(torch.tanh(x)), a=lambda: Scaled(WIDTH, WIDTH))),
    Case("a weight by keyword", bare(lambda s, x: s.a(torch.tanh(x)), a=lambda: ByKeywords(WIDTH, WIDTH))),
    Case("wrapped in a closure", stage(plain, a=wrapped_in_a_closure)),
    Case("a forward on the instance", stage(plain, a=replaced_on_the_instance)),
    Case("called by the parent", stage(lambda s, x: s.b(F.linear(x, s.a.weight, s.a.bias)))),
    Case(
        "called by the parent and itself",
        stage(lambda s, x: s.b(torch.tanh(s.a(x) + F.linear(x, s.a.weight)))),
        modes=EVERY_MODE,
    ),
    Case("called as forward", stage(lambda s, x: s.b.forward(torch.tanh(s.a.forward(x))))),
    Case(
        "a part of the weight",
        stage(lambda s, x: s.b(torch.cat([F.linear(x, s.a.weight[:3], s.a.bias[:3]), x[..., 3:]], -1))),
        modes=EVERY_MODE,
    ),
    Case("a weight in two halves", stage(in_two_halves), no_gradient=("a.bias",)),
    Case(
        "a transposed weight",
        stage(lambda s, x: s.b(torch.tanh(F.linear(x, s.a.weight.t(), s.a.bias)))),
        modes=EVERY_MODE,
    ),
    Case("a product with @", stage(lambda s, x: s.b(torch.tanh(x @ s.a.weight.t() + s.a.bias)))),
    Case(
        "a weight that is cast",
        stage(lambda s, x: s.b(F.linear(x.float(), s.a.weight.float(), s.a.bias.float()).double())),
        tolerance=1e-5,
    ),
    Case("einsum", stage(lambda s, x: s.b(torch.einsum("btd,od->bto", x, s.a.weight))), no_gradient=("a.bias",)),
    Case("bilinear", stage(lambda s, x: s.b(s.c(s.a(x), x)), c=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    Case(
        "one dimension",
        stage(lambda s, x: torch.stack([s.b(s.a(row)) for row in x.flatten(0, 1)]).view_as(x)),
        modes=EVERY_MODE,
    ),
    Case("two dimensions", stage(lambda s, x: s.b(torch.tanh(s.a(x.flatten(0, 1)))).view_as(x))),
    Case("over tokens, as is", bare(lambda s, x: s.a(x.mT).mT.contiguous(), a=linear(TOKENS, TOKENS))),
    Case("x of one number", stage(lambda s, x: s.b(s.a(x.mean(-1, keepdim=True).expand(-1, -1, WIDTH))))),
    Case("a sum of y", stage(lambda s, x: x + s.b(s.a(x)).sum((0, 1)))),
    Case(
        "no output features",
        stage(lambda s, x: s.b(torch.cat([s.a(x), s.c(x)], -1)), c=linear(WIDTH, 0)),
        no_gradient=("c.weight", "c.bias"),
        modes=EVERY_MODE,
    ),
    Case(
        "no tokens",
        stage(lambda s, x: s.b(x) + s.a(x[:, :0]).sum()),
        no_gradient=("a.weight", "a.bias"),
        modes=EVERY_MODE,
    ),
    Case("x is a parameter", stage(lambda s, x: s.b(x + s.a(s.queries)), queries=parameter(TOKENS, WIDTH))),
    Case("x is a buffer", stage(lambda s, x: s.b(x + s.a(s.table)), table=buffer(TOKENS, WIDTH))),
    Case("x without grad", stage(without_grad), no_gradient=("a.weight", "a.bias")),
    Case("detached x", stage(lambda s, x: s.b(s.a(x.detach())) + x), modes=EVERY_MODE),
    Case("frozen weight", stage(lambda s, x: s.b(s.a(x)), b=only_bias), no_gradient=("b.weight",), modes=EVERY_MODE),
    Case("frozen bias", stage(lambda s, x: s.b(s.a(x)), b=only_weight), no_gradient=("b.bias",)),
    Case(
        "a frozen layer",
        stage(lambda s, x: s.a(torch.tanh(s.b(x))), b=frozen(linear())),
        no_gradient=("b.weight", "b.bias"),
    ),
    Case("a sum of many", bare(lambda s, x: sum(layer(x) for layer in s.layers), layers=lambda: many(6))),
    Case("y used twice", stage(used_twice)),
    Case("a gated unit", stage(lambda s, x: x + s.b(s.a(x)) * F.silu(s.a(x)))),
)
