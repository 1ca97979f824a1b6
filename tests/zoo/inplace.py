"""Tensors that are changed in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.case import (
    EVERY_MODE,
    NOT_REPEATED,
    ONLY_EAGER,
    TOKENS,
    WIDTH,
    Case,
    buffer,
    function,
    linear,
    one_by_one,
    stage,
)


def part_of_y(s: Any, x: Tensor) -> Tensor:
    y = s.a(x)
    y[:, 0] = 0
    y[..., :4] *= 2
    return s.b(y)


def workspace(s: Any, x: Tensor) -> Tensor:
    """x of the layer lies in a buffer that the next microbatch overwrites."""
    with torch.no_grad():
        s.work.copy_(x.tanh())
    return s.b(s.a(s.work)) + x


def moved_average(s: Any, x: Tensor) -> Tensor:
    """A buffer that is changed in F after it was used, as batch norm's."""
    y = s.b(s.a(x) + s.average)
    with torch.no_grad():
        s.average.lerp_(x.mean((0, 1)), 0.1)
    return y


def reused_input(s: Any, x: Tensor) -> Tensor:
    """x of one layer is overwritten when nobody needs it for autograd: the layer's weight is frozen."""
    h = s.a(x)
    y = s.c(h)
    h.mul_(0)
    return s.b(y)


def gated(y: Tensor) -> Tensor:
    """Halves of y, one of them changed in place."""
    gate, up = y.narrow(-1, 0, WIDTH), y.narrow(-1, WIDTH, WIDTH)
    return up.mul_(gate.sigmoid())


def double(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


DoublesInPlace = function(lambda ctx, dy: 2 * dy, double)


def write_and_pass(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Writes past the version counter, as kernels in Triton or C++ do."""
    returned, (write, *tensors) = 1 * dy, ctx.given
    write(dy, *tensors)
    return returned, *(None for _ in ctx.given)


WritesInBackward = function(write_and_pass)


def x_written(s: Any, x: Tensor) -> Tensor:
    """A backward reuses the memory of an activation that it takes for done with."""
    h = torch.tanh(x)
    return WritesInBackward.apply(s.b(x), lambda dy, h: h.data.mul_(3), h) + s.a(h)


def two_uses(s: Any, x: Tensor) -> Tensor:
    """Several layers with one dY, of which only the first was multiplied before."""
    y = WritesInBackward.apply(s.b(x), lambda dy: dy.data.mul_(2))
    return y + s.a(x.tanh()) + s.a(x.sin())


def numpy_workspace(s: Any, x: Tensor) -> Tensor:
    """x of the layer lies in memory that NumPy has lent, and that the next microbatch overwrites."""
    work = s.memory.array
    work[...] = x.detach().tanh().numpy()
    return s.b(torch.tanh(s.a(torch.from_numpy(work)))) + x


def numpy_view(s: Any, x: Tensor) -> Tensor:
    """The module keeps a NumPy view of x, and empties it in the next microbatch."""
    if s.memory.array is not None:
        s.memory.array[...] = 0
    h = x.detach().tanh()
    s.memory.array = h.numpy()
    return s.b(torch.tanh(s.a(h))) + x


class Memory:
    def __init__(self, *shape: int) -> None:
        self.array = torch.zeros(shape).numpy() if shape else None


CASES = (
    Case("x scaled through .data in a backward", stage(x_written), modes=ONLY_EAGER),
    Case("dY of two scaled through .data", stage(two_uses)),
    one_by_one(
        "a workspace of NumPy's", stage(numpy_workspace, memory=lambda: Memory(1, TOKENS, WIDTH)), modes=ONLY_EAGER
    ),
    one_by_one("a NumPy view of x", stage(numpy_view, memory=Memory), modes=ONLY_EAGER),
    Case("a part of y in place", stage(part_of_y), modes=EVERY_MODE),
    Case(
        "chunks of y in place",
        stage(lambda s, x: s.b(gated(s.c(x))), c=linear(WIDTH, 2 * WIDTH)),
        no_gradient=("a.weight", "a.bias"),
    ),
    one_by_one("a workspace", stage(workspace, work=buffer(1, TOKENS, WIDTH)), modes=NOT_REPEATED),
    Case("a moved average", stage(moved_average, average=buffer(WIDTH)), modes=NOT_REPEATED),
    Case(
        "an input that is overwritten",
        stage(reused_input, c=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
        no_gradient=("c.weight", "c.bias"),
        modes=EVERY_MODE,
    ),
    Case(
        "an input marked dirty, of a fork",
        stage(lambda s, x: DoublesInPlace.apply(s.a(x)) + s.b(torch.tanh(x))),
        modes=EVERY_MODE,
    ),
)
