"""Other numbers than float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zoo.case import EVERY_MODE, TOKENS, WIDTH, Batch, Case, Modes, parameter, plain, stage

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""A few units of the last place, over four microbatches."""


def of(dtype: torch.dtype) -> Callable[[int], Batch]:
    def make(samples: int) -> Batch:
        return (torch.randn(samples, TOKENS, WIDTH).to(dtype),), torch.randn(samples, TOKENS, WIDTH).to(dtype)

    return make


def loss_in_double(y: Tensor, target: Tensor) -> Tensor:
    return mse_loss(y.double(), target.double())


def all_in(dtype: torch.dtype, name: str, forward: Any = plain, modes: Modes = Case.modes, **parts: Any) -> Case:
    return Case(
        name,
        lambda index: stage(forward, **parts)(index).to(dtype),
        batch=of(dtype),
        loss=loss_in_double,
        tolerance=TOLERANCES[dtype],
        modes=modes,
    )


def autocast(dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return plain(s, x).to(x.dtype)

    return forward


def partly_autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = s.a(x)
        with torch.autocast("cpu", enabled=False):
            h = s.b(torch.tanh(h.float()))
    return h


def elements_under_autocast(s: Any, x: Tensor) -> Tensor:
    """Autocast casts matrix products, and leaves this one in float32."""
    x = s.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.einsum("bti,ti->bti", x, s.scale)
    return s.b(x)  # type: ignore[no-any-return]


def wide_middle(s: Any, x: Tensor) -> Tensor:
    """Activations in bfloat16, one layer in float32."""
    return s.b(torch.tanh(s.a(x.bfloat16())).float())


def mixed(index: int) -> nn.Module:
    module = stage(wide_middle)(index).float()
    module.a.bfloat16()
    return module


def complex_rows(samples: int) -> Batch:
    shape = (samples, TOKENS, WIDTH)
    return (torch.randn(shape, dtype=torch.complex128),), torch.randn(shape, dtype=torch.complex128)


def complex_loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).abs().square().mean()


def complex_linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)


def complex_inside(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.tanh(s.c(torch.complex(x, s.a(x))).abs()))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = complex_linear(), complex_linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def with_shared_cast(write: Any) -> Any:
    """Two layers with one x, which something writes past the version counter in between."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = x.tanh()
        with torch.autocast("cpu", torch.bfloat16):
            y = s.a(h)
            write(s, h)
            y = y + s.b(h) + s.c(h)
        return y.to(x.dtype)

    return lambda index: stage(forward, c=lambda: nn.Linear(WIDTH, WIDTH))(index).float()


def by_numpy(s: Any, h: Tensor) -> None:
    h.detach().numpy()[...] *= 3


def later(s: Any, h: Tensor) -> None:
    if s.microbatch == 2:
        h.data.mul_(3)


_SHARED_CASTS = (
    ("x scaled through .data between two casts", lambda s, h: h.data.mul_(3)),
    ("x scaled by NumPy between two casts", by_numpy),
    ("x scaled through .data between two casts, later", later),
    ("x with two casts", lambda s, h: None),
)

CASES = (
    *(Case(name, with_shared_cast(write), batch=of(torch.float32), tolerance=0.05) for name, write in _SHARED_CASTS),
    all_in(torch.float32, "float32"),
    all_in(torch.bfloat16, "bfloat16", modes=EVERY_MODE),
    all_in(torch.float16, "float16"),
    all_in(
        torch.float32,
        "float32 with pos",
        lambda s, x: s.b(torch.tanh(s.a(x) + s.pos[None])),
        pos=parameter(TOKENS, WIDTH),
    ),
    Case(
        "autocast to bfloat16",
        lambda index: stage(autocast(torch.bfloat16))(index).float(),
        batch=of(torch.float32),
        tolerance=0.05,
        modes=EVERY_MODE,
    ),
    Case(
        "autocast to float16",
        lambda index: stage(autocast(torch.float16))(index).float(),
        batch=of(torch.float32),
        tolerance=0.01,
    ),
    Case("autocast of float64", stage(autocast(torch.bfloat16)), tolerance=0.05),
    Case(
        "autocast of a part",
        lambda index: stage(partly_autocast)(index).float(),
        batch=of(torch.float32),
        tolerance=0.05,
        modes=EVERY_MODE,
    ),
    Case(
        "autocast of an einsum that sums nothing",
        lambda index: stage(elements_under_autocast, scale=parameter(TOKENS, WIDTH))(index).float(),
        batch=of(torch.float32),
        tolerance=1e-5,
    ),
    Case("layers of two dtypes", mixed, batch=of(torch.float32), tolerance=0.05),
    Case("complex", lambda index: Complex(), batch=complex_rows, loss=complex_loss, shapes="given", modes=EVERY_MODE),
    Case("complex inside", stage(complex_inside, c=complex_linear)),
)
