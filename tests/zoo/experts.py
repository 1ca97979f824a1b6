"""Routing to experts, and tensors that are not plain."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpipe.runtime.split import GROUPED_MM
from zoo.case import EVERY_MODE, ONE_BY_ONE, ONLY_COMPILED, ONLY_EAGER, TOKENS, WIDTH, Case, linear, one_by_one, stage
from zoo.precision import rows_in

EXPERTS = 5


def experts() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))


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


class Grouped(nn.Module):
    """All experts in one tensor, multiplied in one go, as a layer of its own."""

    weight_products: ClassVar[Any] = {torch.bmm: lambda dy, x: x.mT @ dy}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(TOKENS, WIDTH, 2 * WIDTH)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(TOKENS, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Token t goes to expert t."""
        h = torch.tanh(torch.bmm(x.transpose(0, 1), self.up) + self.bias.unsqueeze(1))
        return torch.bmm(h, self.down.transpose(1, 2)).transpose(0, 1).contiguous()


class Ragged(nn.Module):
    """Experts whose groups have sizes that the numbers decide, multiplied by a function that tells how."""

    def __init__(self, multiply: Any, products: Any = None) -> None:
        super().__init__()
        self.multiply = multiply
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.ends = nn.Buffer(torch.zeros(EXPERTS, dtype=torch.int32))
        self.weight_products = products or {F.grouped_mm: GROUPED_MM}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen, order = (10 * rows[:, 0]).long().remainder(EXPERTS).sort()
        ends = (chosen.unsqueeze(1) <= torch.arange(EXPERTS)).sum(0).int()
        self.ends.copy_(ends)
        h = F.silu(self.multiply(self, rows[order], self.up.mT, ends))
        return x + torch.zeros_like(rows).index_add(0, order, self.multiply(self, h, self.down.mT, ends)).view_as(x)


def in_buffer(s: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The ends of the groups lie in a buffer that the next microbatch overwrites."""
    return torch._grouped_mm(x, weight, offs=s.ends)


def in_buffer_by_position(s: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight, s.ends, None, None)


def in_half(multiply: Any) -> Any:
    """The compiler refuses grouped_mm in float32 on the CPU."""
    return lambda s, x, weight, ends: multiply(s, x.bfloat16(), weight.bfloat16(), ends).type_as(x)


def public_by_keyword(s: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(mat_b=weight, mat_a=x, offs=ends, bias=None, out_dtype=None)


def private_by_keyword(s: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, mat2=weight, offs=ends, bias=None)


OWN = {F.grouped_mm: lambda dy, x, offs: torch._grouped_mm(dy.mT, x, offs=offs).mT}
"""Knows nothing of a bias and a dtype."""


class Gathered(nn.Module):
    """A function of the user, with tensors in a list, which lie in buffers that the next microbatch overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.gates = nn.Buffer(torch.zeros(2, TOKENS, 1))
        self.weight_products = {
            gated_product: lambda dy, x, gates, scale: (
                x.flatten(0, -2).mT @ (dy * gates[0] * gates[1] * scale["by"]).flatten(0, -2)
            )
        }

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.gates.copy_(x[0, :, :2].T.unsqueeze(-1))
        y = gated_product(x, self.weight, [self.gates[0], self.gates[1]], scale={"by": self.gates.mean()})
        return x + y


def gated_product(x: Tensor, weight: Tensor, gates: list[Tensor], scale: dict[str, Tensor]) -> Tensor:
    tensors = (x, weight, *gates)
    if torch.overrides.has_torch_function(tensors):
        given: Tensor = torch.overrides.handle_torch_function(gated_product, tensors, x, weight, gates, scale=scale)
        return given
    return (x @ weight) * gates[0] * gates[1] * scale["by"]


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
        "experts that may not be called",
        stage(routed_if_any, router=linear(WIDTH, EXPERTS), experts=experts),
        no_gradient=(
            *("a.weight", "a.bias", "b.weight", "b.bias"),
            *(f"experts.{n}.{p}" for n in range(EXPERTS) for p in ("weight", "bias")),
        ),
    ),
    Case("grouped experts", lambda index: Grouped(), EVERY_MODE),
    *(
        Case(
            name,
            lambda index, of=(multiply, products): Ragged(*of).float(),  # type: ignore[misc]
            modes,
            0.05 if modes in (EVERY_MODE, ONLY_COMPILED) else 1e-4,
            batch=rows_in(torch.float32),
            schedules=ONE_BY_ONE if "buffer" in name else None,
            most_ranks=1 if "buffer" in name else 4,
            samples=3,
        )
        for name, multiply, products, modes in (
            ("ends of groups in a buffer", in_buffer, None, ONLY_EAGER),
            ("ends of groups in a buffer, declared without", in_buffer_by_position, OWN, ONLY_EAGER),
            ("ends of groups in a buffer, compiled", in_half(in_buffer), None, ONLY_COMPILED),
            ("grouped_mm by keywords", public_by_keyword, None, Case.modes),
            ("grouped_mm in half precision, by keywords", in_half(private_by_keyword), None, EVERY_MODE),
        )
    ),
    one_by_one("tensors in a list, in buffers", lambda index: Gathered(), modes=ONLY_EAGER),
    Case("nested, strided", stage(nested(torch.strided)), modes=ONLY_EAGER),
    Case("nested, jagged", stage(nested(torch.jagged)), modes=ONLY_EAGER),
    Case("sparse x", stage(sparse_input, c=linear()), modes=ONLY_EAGER),
    Case("sparse x with a gradient", stage(sparse_with_grad, c=linear(bias=False)), modes=ONLY_EAGER),
)
