"""Other numbers than float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zoo.case import EVERY_MODE, TOKENS, WIDTH, Batch, Case, Modes, linear, parameter, plain, stage

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


CASES = (
    in_float32("x scaled between two casts", with_shared_cast, c=linear()),
    Case(
        "bfloat16",
        lambda index: stage(plain)(index).bfloat16(),
        EVERY_MODE,
        LOW,
        batch=rows_in(torch.bfloat16),
        loss=lambda y, target: mse_loss(y.double(), target.double()),
    ),
    in_float32("autocast to bfloat16", autocast, EVERY_MODE),
    in_float32(
        "autocast of an einsum that sums nothing",
        elements_under_autocast,
        tolerance=1e-5,
        scale=parameter(TOKENS, WIDTH),
    ),
    Case("layers of two dtypes", mixed, tolerance=LOW, batch=rows_in(torch.float32)),
    Case(
        "complex inside",
        stage(lambda s, x: s.b(torch.tanh(s.c(torch.complex(x, s.a(x))).abs())), c=complex_linear),
    ),
)
