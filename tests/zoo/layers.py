"""Weights in layers of every kind, and modules that run code when somebody reads their attributes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as new
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Case, bare, buffer, linear, parameter, plain, stage

POSITIONS = parameter(TOKENS, WIDTH)


def between(name: str, make: Any, *more: Any, **options: Any) -> Case:
    """A layer between two linear ones."""
    return Case(name, stage(lambda s, x: s.b(s.layer(s.a(x))), layer=make), *more, **options)


def channels(name: str, make: Any, *more: Any, **options: Any) -> Case:
    """The same for layers that want (samples, channels, length)."""
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


def mha(**options: Any) -> Any:
    return lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Symmetric())


def cached_weight(s: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return s.b(s.layer(torch.tanh(s.layer(s.a(x)))))


def _refuse(self: Any) -> Any:
    raise RuntimeError("nobody but the user may read this")


class GuardedLinear(nn.Linear):
    """Every attribute that somebody might look for is a property that raises."""

    config = gradient_checkpointing = top_k = num_experts = dynamo_ctx = property(_refuse)


class Guarded(nn.Module):
    """The same for a stage."""

    config = weight = bias = property(_refuse)
    gradient_checkpointing = top_k = num_experts = in_features = out_features = dynamo_ctx = property(_refuse)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = GuardedLinear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) @ self.own))


class Asked(nn.Module):
    """Counts what it is asked for and does not have."""

    microbatch = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.asked = nn.Buffer(torch.zeros(()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "asked" in self.__dict__.get("_buffers", {}):
                self.asked.add_(1)
            raise

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * (1 + self.asked)


class AskedLinear(nn.Linear):
    """A layer with a forward of its own that refuses all it does not have, and to be changed."""

    microbatch = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "bias" not in self.__dict__.get("_parameters", {}):
                raise
            raise LookupError(name) from None

    def finish_step(self) -> None:
        """The runner of the zoo asks for it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise LookupError(name)
        super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(torch.tanh(input), self.weight, self.bias)


class DropConnect(nn.Module):
    """Another mask at each reading of the weight, of its own numbers, and it counts the readings."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.numbers = nn.Buffer(torch.zeros(())), torch.Generator().manual_seed(7)

    def forward(self, weight: Tensor) -> Tensor:
        self.reads.add_(1)
        return weight * torch.rand(weight.shape, generator=self.numbers, dtype=weight.dtype) * (1 + self.reads)


def dropping() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", DropConnect())


class Computed(nn.Linear):
    """Its weight is a property that advances with each reading."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach())  # type: ignore[union-attr]
        self.reads = nn.Buffer(torch.zeros(()))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        self.reads.add_(1)
        return self.raw * (1 + self.reads)

    @weight.setter
    def weight(self, value: Any) -> None:
        self._parameters["weight"] = value


class Counting(nn.Module):
    """Alternates between two paths, by a counter in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = {"n": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["n"][0] += 1
        return self.b(self.a(x)) if self.kept["n"][0] % 2 else self.b(torch.tanh(self.a(x)))


def given(name: str, build: Any) -> Case:
    """torch infers shapes by one more forward, which counts."""
    return Case(name, build, ONLY_EAGER, shapes="given")


CASES = (
    Case("plain", stage(plain), EVERY_MODE),
    Case("the stage is a linear layer", lambda index: nn.Linear(WIDTH, WIDTH), EVERY_MODE),
    Case(
        "a part of the weight",
        stage(lambda s, x: s.b(torch.cat([F.linear(x, s.a.weight[:3], s.a.bias[:3]), x[..., 3:]], -1))),
        EVERY_MODE,
    ),
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
        stage(lambda s, x: s.b(x + s.a(s.p) + s.c(s.q)), c=linear(), p=POSITIONS, q=buffer(TOKENS, WIDTH)),
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
    # The gradient of a parameter that is added through a view is a view of another one.
    Case(
        "pos.unsqueeze(0)", stage(lambda s, x: s.b(torch.tanh(s.a(x) + s.pos.unsqueeze(0))), pos=POSITIONS), EVERY_MODE
    ),
    Case("nn.MultiheadAttention", bare(lambda s, x: s.mha(x, x, x)[0], mha=mha()), EVERY_MODE),
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
    Case("parametrized and cached", stage(cached_weight, layer=parametrized), ONLY_EAGER),
    Case(
        "merged LoRA",
        stage(
            lambda s, x: s.b(torch.tanh(F.linear(x, s.a.weight + s.up @ s.down, s.a.bias))),
            up=parameter(WIDTH, 2),
            down=parameter(2, WIDTH),
        ),
    ),
    Case("folded weights", stage(lambda s, x: F.linear(x, s.a.weight @ s.b.weight, s.a.bias)), no_gradient=("b.bias",)),
    Case(
        "a hypernetwork",
        stage(
            lambda s, x: s.b(F.linear(torch.tanh(s.a(x)), s.maker(s.code).view(WIDTH, WIDTH))),
            maker=linear(3, WIDTH * WIDTH),
            code=parameter(3),
        ),
    ),
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
    Case("properties that raise", lambda index: Guarded()),
    Case("counts what it is asked for", lambda index: Asked()),
    Case("refuses what it is asked for", stage(plain, a=lambda: AskedLinear(WIDTH, WIDTH))),
    given("spectral norm of a weight", stage(plain, a=lambda: new.spectral_norm(nn.Linear(WIDTH, WIDTH)))),
    given("DropConnect", stage(plain, a=dropping, b=dropping)),
    given("a weight that is a property", stage(plain, b=Computed)),
    given("counts in a dict", lambda index: Counting()),
)
