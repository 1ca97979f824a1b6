"""Weights in layers of every kind, other numbers than float64, tensors that are not plain, and experts."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zbpipe.runtime.split import GROUPED_MM
from zoo.case import (
    EVERY_MODE,
    ONE_BY_ONE,
    ONLY_COMPILED,
    ONLY_EAGER,
    TOKENS,
    WIDTH,
    Batch,
    Case,
    Modes,
    bare,
    buffer,
    linear,
    one_by_one,
    parameter,
    plain,
    stage,
)


def between(name: str, make: Any, *more: Any, **options: Any) -> Case:
    return Case(name, stage(lambda s, x: s.b(s.layer(s.a(x))), layer=make), *more, **options)


def channels(name: str, make: Any, *more: Any, **options: Any) -> Case:
    return Case(name, stage(lambda s, x: s.b(s.layer(s.a(x).mT).mT), layer=make), *more, **options)


def half_frozen(name: str) -> Any:
    def make() -> nn.Linear:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.get_parameter(name).requires_grad_(False)
        return layer

    return make


def without_grad(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = s.a(x)
    return s.b(h) + x


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized(by: type[nn.Module] = Symmetric) -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", by())


def _refuse(self: Any) -> Any:
    raise RuntimeError("nobody but the user may read this")


class Refuses(nn.Module):
    """Properties that somebody might look for raise, and so does whatever it does not have, and a new forward."""

    microbatch, last, _is_replica = 0, "bias", False  # zero_grad asks for the last
    config = gradient_checkpointing = top_k = num_experts = dynamo_ctx = property(_refuse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.last not in self.__dict__.get("_parameters", {}):  # it is being built
                raise
            raise LookupError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise LookupError(name)
        super().__setattr__(name, value)


class RefusingLinear(Refuses, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(torch.tanh(input), self.weight, self.bias)


class RefusingStage(Refuses):
    last = "own"
    weight = in_features = out_features = property(_refuse)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = RefusingLinear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) @ self.own))


class DropConnect(nn.Module):
    """Another mask at each reading of the weight, of its own numbers, and it counts the readings."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.numbers = nn.Buffer(torch.zeros(())), torch.Generator().manual_seed(7)

    def forward(self, weight: Tensor) -> Tensor:
        self.reads.add_(1)
        return weight * torch.rand(weight.shape, generator=self.numbers, dtype=weight.dtype) * (1 + self.reads)


LOW = 0.05
"""A few units of the last place in bfloat16, over four microbatches."""


def rows_in(dtype: torch.dtype) -> Callable[[int], Batch]:
    def make(samples: int) -> Batch:
        x, target = (torch.randn(samples, TOKENS, WIDTH).to(dtype) for _ in range(2))
        return (x,), target

    return make


def in_float32(name: str, forward: Any, modes: Modes = Case.modes, tolerance: float = LOW, **parts: Any) -> Case:
    build = stage(forward, **parts)
    return Case(name, lambda index: build(index).float(), modes, tolerance, batch=rows_in(torch.float32))


def autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(s, x).to(x.dtype)


def elements_under_autocast(s: Any, x: Tensor) -> Tensor:
    """Autocast casts matrix products, and leaves this one in float32."""
    x = s.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.einsum("bti,ti->bti", x, s.scale)
    return s.b(x)  # type: ignore[no-any-return]


def mixed(index: int) -> nn.Module:
    """Activations in bfloat16, one layer in float32."""
    module = stage(lambda s, x: s.b(torch.tanh(s.a(x.bfloat16())).float()))(index).float()
    module.a.bfloat16()
    return module


def complex_linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)


def with_shared_cast(s: Any, x: Tensor) -> Tensor:
    """Layers with one x, which something writes past the version counter in between, in one microbatch."""
    h = x.tanh()
    with torch.autocast("cpu", torch.bfloat16):
        y = s.a(h)
        if s.microbatch == 2:
            h.data.mul_(3)
        y = y + s.b(h) + s.c(h)
    return y.to(x.dtype)


EXPERTS = 5


def sum_over_experts(s: Any, x: Tensor) -> Tensor:
    return x.expand(2, -1, -1).bmm(s.w).sum(0) + torch.einsum("btw,ewo->bto", x, s.w)


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
    """Experts in groups whose sizes depend on the numbers, multiplied by a function that declares its products."""

    weight_products: ClassVar[Any] = {F.grouped_mm: GROUPED_MM}

    def __init__(self, multiply: Any) -> None:
        super().__init__()
        self.multiply = multiply
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.ends = nn.Buffer(torch.zeros(EXPERTS, dtype=torch.int32))

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


def in_half(multiply: Any) -> Any:
    """The compiler refuses grouped_mm in float32 on the CPU."""
    return lambda s, x, weight, ends: multiply(s, x.bfloat16(), weight.bfloat16(), ends).type_as(x)


def by_keyword(s: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(mat_b=weight, mat_a=x, offs=ends, bias=None, out_dtype=None)


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


CASES = (
    Case("plain", stage(plain), EVERY_MODE),
    Case("the stage is a linear layer", lambda index: nn.Linear(WIDTH, WIDTH), EVERY_MODE),
    Case("bilinear", stage(lambda s, x: s.b(s.c(s.a(x), x)), c=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    Case(
        "no output features",
        stage(lambda s, x: s.b(torch.cat([s.a(x), s.c(x)], -1)), c=linear(WIDTH, 0)),
        EVERY_MODE,
        no_gradient=("c.weight", "c.bias"),
    ),
    Case("no tokens", stage(lambda s, x: s.b(x) + s.a(x[:, :0]).sum()), EVERY_MODE, no_gradient=("a.weight", "a.bias")),
    Case(
        "x is a parameter or a buffer",
        stage(
            lambda s, x: s.b(x + s.a(s.p) + s.c(s.q)), c=linear(), p=parameter(TOKENS, WIDTH), q=buffer(TOKENS, WIDTH)
        ),
    ),
    Case("x without grad", stage(without_grad), no_gradient=("a.weight", "a.bias")),
    Case(
        "frozen weight, frozen bias",
        stage(lambda s, x: s.b(s.a(x)), a=half_frozen("bias"), b=half_frozen("weight")),
        EVERY_MODE,
        no_gradient=("a.bias", "b.weight"),
    ),
    Case(
        "unused parameters",
        stage(lambda s, x: s.a(x), c=linear(), p=parameter(3)),
        EVERY_MODE,
        no_gradient=("b.weight", "b.bias", "c.weight", "c.bias", "p"),
    ),
    Case(
        "nn.MultiheadAttention",
        bare(lambda s, x: s.mha(x, x, x)[0], mha=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
        EVERY_MODE,
    ),
    # It counts a recomputed microbatch twice, whatever the schedule.
    channels("batch norm", lambda: nn.BatchNorm1d(WIDTH), ONLY_EAGER, samples=2),
    channels("convolution", lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), EVERY_MODE),
    channels("transposed convolution", lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    *(
        Case(name, stage(lambda s, x: s.b(s.layer(s.a(x))[0]), layer=make))
        for name, make in {
            "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
            "GRU": lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True),
        }.items()
    ),
    between("weight norm", lambda: torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))),
    between("parametrized", parametrized, EVERY_MODE),
    Case(
        "dropout of activations and weights",
        stage(lambda s, x: s.b(F.linear(F.dropout(x, 0.2), F.dropout(s.a.weight, 0.2)))),
        no_gradient=("a.bias",),
    ),
    Case(
        "an embedding and a bag",
        stage(
            lambda s, x: s.b(s.a(x) + s.e((x > 0).long().sum(-1)) + s.g((x[:, 0] > 0).long())[:, None]),
            e=lambda: nn.Embedding(WIDTH + 1, WIDTH),
            g=lambda: nn.EmbeddingBag(2, WIDTH),
        ),
    ),
    Case("refuses what it is asked for", lambda index: RefusingStage()),
    # torch infers shapes by one more forward, which counts.
    one_by_one(
        "DropConnect",
        stage(plain, **dict.fromkeys("ab", lambda: parametrized(DropConnect))),
        modes=ONLY_EAGER,
        between=lambda stage: stage.b.requires_grad_(False),
    ),
    in_float32("x scaled between two casts", with_shared_cast, c=linear()),
    Case(
        "bfloat16",
        lambda index: stage(plain)(index).bfloat16(),
        EVERY_MODE,
        LOW,
        batch=rows_in(torch.bfloat16),
        loss=lambda y, target: F.mse_loss(y.double(), target.double()),
        on_two_ranks=True,
    ),
    in_float32("autocast to bfloat16", autocast, EVERY_MODE),
    in_float32(
        "autocast of an einsum that sums nothing",
        elements_under_autocast,
        tolerance=1e-5,
        scale=parameter(TOKENS, WIDTH),
    ),
    Case("layers of two dtypes", mixed, tolerance=LOW, batch=rows_in(torch.float32)),
    Case("complex inside", stage(lambda s, x: s.b(torch.tanh(s.c(torch.complex(x, s.a(x))).abs())), c=complex_linear)),
    Case("sums over experts", bare(sum_over_experts, w=parameter(2, WIDTH, WIDTH)), EVERY_MODE),
    Case("grouped experts", lambda index: Grouped(), EVERY_MODE),
    *(
        Case(
            name,
            lambda index, multiply=multiply: Ragged(multiply).float(),  # type: ignore[misc]
            modes,
            0.05 if modes in (EVERY_MODE, ONLY_COMPILED) else 1e-4,
            batch=rows_in(torch.float32),
            schedules=ONE_BY_ONE if "buffer" in name else None,
            samples=3,
        )
        for name, multiply, modes in (
            ("ends of groups in a buffer", in_buffer, ONLY_EAGER),
            ("ends of groups in a buffer, compiled", in_half(in_buffer), ONLY_COMPILED),
            ("grouped_mm by keywords", by_keyword, Case.modes),
            ("grouped_mm by keywords, in half precision", in_half(by_keyword), EVERY_MODE),
        )
    ),
    one_by_one("tensors in a list, in buffers", lambda index: Gathered(), modes=ONLY_EAGER),
    Case("nested, strided", stage(nested(torch.strided)), modes=ONLY_EAGER),
    Case("nested, jagged", stage(nested(torch.jagged)), modes=ONLY_EAGER),
    Case("sparse x", stage(sparse_input, c=linear()), modes=ONLY_EAGER),
)
