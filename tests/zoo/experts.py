"""Routing to experts, and tensors that are not plain."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpipe import WeightProduct
from zoo.case import TOKENS, WIDTH, Case, Mode, linear, stage

EAGER: tuple[Mode, ...] = ("eager", "checkpointed")
EXPERTS = 5


def experts() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))


def routed(s: Any, x: Tensor) -> Tensor:
    """The two best experts of each token, some of which get no tokens."""
    rows = x.flatten(0, 1)
    weights, chosen = s.router(rows).softmax(-1).topk(2)
    y = torch.zeros_like(rows)
    for number, expert in enumerate(s.experts):
        row, place = (chosen == number).nonzero(as_tuple=True)
        y = y.index_add(0, row, weights[row, place, None] * expert(rows[row]))
    return x + y.view_as(x)


def routed_if_any(s: Any, x: Tensor) -> Tensor:
    """Experts without tokens are not called."""
    rows = x.flatten(0, 1)
    chosen = s.router(rows).softmax(-1)
    y = torch.zeros_like(rows)
    for number, expert in enumerate(s.experts):
        mine = chosen.argmax(-1) == number
        if mine.any():
            y[mine] = chosen[mine, number, None] * expert(rows[mine])
    return x + y.view_as(x)


def shared_and_routed(s: Any, x: Tensor) -> Tensor:
    return routed(s, x) + s.b(torch.tanh(s.a(x)))


def expert_choice(s: Any, x: Tensor) -> Tensor:
    """Each expert takes the two tokens that it likes best."""
    rows = x.flatten(0, 1)
    scores = s.router(rows).softmax(-1)
    y = torch.zeros_like(rows)
    for number, expert in enumerate(s.experts):
        weight, row = scores[:, number].topk(2)
        y = y.scatter_add(0, row[:, None].expand(-1, WIDTH), weight[:, None] * expert(rows[row]))
    return x + y.view_as(x)


def soft(s: Any, x: Tensor) -> Tensor:
    """Every expert gets a mixture of tokens."""
    mix = s.router(x)
    slots = torch.einsum("bte,btd->bed", mix.softmax(1), x)
    out = torch.stack([expert(slots[:, n]) for n, expert in enumerate(s.experts)], 1)
    return torch.einsum("bte,bed->btd", mix.softmax(2), out)


class Grouped(nn.Module):
    """All experts in one tensor, multiplied in one go, as a layer of its own."""

    weight_products: ClassVar[Any] = {
        torch.bmm: WeightProduct(
            input_gradient=lambda dy, weight: dy @ weight.mT, weight_gradient=lambda dy, x: x.mT @ dy
        )
    }

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(TOKENS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(TOKENS, WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Token t goes to expert t."""
        h = F.silu(torch.bmm(x.transpose(0, 1), self.up))
        return torch.bmm(h, self.down.transpose(1, 2)).transpose(0, 1).contiguous()


class GroupedWithBias(Grouped):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(TOKENS, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.bmm(x.transpose(0, 1), self.up) + self.bias.unsqueeze(1))
        return torch.bmm(h, self.down.transpose(1, 2)).transpose(0, 1).contiguous()


def nested(layout: torch.layout) -> Any:
    def forward(s: Any, x: Tensor) -> Tensor:
        """Sequences of two lengths in one tensor."""
        parts = [x[0, :3], x[0, 1:]]
        y = s.a(torch.nested.as_nested_tensor(parts, layout=layout))
        first, second = y.unbind()
        return s.b(torch.cat([torch.tanh(first), torch.tanh(second)[:1]])[None]) + x

    return forward


def sparse_input(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        chosen = (x[0] > 0).to(x.dtype).to_sparse()
    return s.b(torch.tanh(s.a(x) + s.c(chosen)))


def sparse_with_grad(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.tanh(s.c((s.a(x)[0]).to_sparse())))[None]


CASES = (
    Case(
        "experts of their own",
        stage(routed, router=linear(WIDTH, EXPERTS), experts=experts),
        modes=EAGER,
        no_gradient=("a.weight", "a.bias", "b.weight", "b.bias"),
    ),
    Case(
        "experts that may not be called",
        stage(routed_if_any, router=linear(WIDTH, EXPERTS), experts=experts),
        modes=EAGER,
        no_gradient=(
            "a.weight",
            "a.bias",
            "b.weight",
            "b.bias",
            *(f"experts.{n}.{p}" for n in range(EXPERTS) for p in ("weight", "bias")),
        ),
    ),
    Case(
        "experts and a shared one",
        stage(shared_and_routed, router=linear(WIDTH, EXPERTS), experts=experts),
        modes=EAGER,
    ),
    Case(
        "experts that choose",
        stage(expert_choice, router=linear(WIDTH, EXPERTS), experts=experts),
        no_gradient=("a.weight", "a.bias", "b.weight", "b.bias"),
    ),
    Case(
        "soft experts",
        stage(soft, router=linear(WIDTH, EXPERTS), experts=experts),
        no_gradient=("a.weight", "a.bias", "b.weight", "b.bias"),
    ),
    Case("grouped experts", lambda index: Grouped()),
    Case("grouped experts with biases", lambda index: GroupedWithBias()),
    Case("nested, strided", stage(nested(torch.strided)), modes=("eager",)),
    Case("nested, jagged", stage(nested(torch.jagged)), modes=("eager",)),
    Case("sparse x", stage(sparse_input, c=linear()), modes=("eager",)),
    Case("sparse x with a gradient", stage(sparse_with_grad, c=linear(bias=False)), modes=("eager",)),
)
