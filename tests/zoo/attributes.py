"""Modules that run code when one reads their attributes, and modules that count outside of buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as new
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zoo.case import ONLY_EAGER, WIDTH, Case, plain, stage


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
    Case("properties that raise", lambda index: Guarded()),
    Case("counts what it is asked for", lambda index: Asked()),
    Case("refuses what it is asked for", stage(plain, a=lambda: AskedLinear(WIDTH, WIDTH))),
    given("spectral norm of a weight", stage(plain, a=lambda: new.spectral_norm(nn.Linear(WIDTH, WIDTH)))),
    given("DropConnect", stage(plain, a=dropping, b=dropping)),
    given("a weight that is a property", stage(plain, b=Computed)),
    given("counts in a dict", lambda index: Counting()),
)
