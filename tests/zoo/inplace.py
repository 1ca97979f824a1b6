"""Tensors that are changed in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import (
    EVERY_MODE,
    NOT_REPEATED,
    ONLY_EAGER,
    TOKENS,
    WIDTH,
    Case,
    buffer,
    linear,
    one_by_one,
    parameter,
    stage,
)


def residual(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    h += s.b(torch.tanh(h))
    return h


def residual_twice(s: Any, x: Tensor) -> Tensor:
    h = 1 * x
    h += s.a(F.layer_norm(h.clone(), (WIDTH,)))
    h += s.b(F.layer_norm(h.clone(), (WIDTH,)))
    return h


def part_of_y(s: Any, x: Tensor) -> Tensor:
    y = s.a(x)
    y[:, 0] = 0
    y[..., :4] *= 2
    return s.b(y)


def view_in_place(s: Any, x: Tensor) -> Tensor:
    y = s.a(x)
    y.view(-1).mul_(2)
    return s.b(y)


def transposed_in_place(s: Any, x: Tensor) -> Tensor:
    y = s.a(x)
    y.mT.add_(1)
    return s.b(y)


def written_into_zeros(s: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, ::2] = s.a(x)[:, ::2]
    y[:, 1::2] = s.b(x)[:, 1::2]
    return y


def workspace(s: Any, x: Tensor) -> Tensor:
    """x of the layer lies in a buffer that the next microbatch overwrites."""
    with torch.no_grad():
        s.work.copy_(x.tanh())
    return s.b(s.a(s.work)) + x


def workspace_with_grad(s: Any, x: Tensor) -> Tensor:
    """The same without no_grad."""
    s.work.copy_(x.detach())
    y = s.a(s.work)
    return s.b(torch.tanh(y)) + x


def moved_average(s: Any, x: Tensor) -> Tensor:
    """A buffer that is changed in F after it was used, as batch norm's."""
    y = s.b(s.a(x) + s.average)
    with torch.no_grad():
        s.average.lerp_(x.mean((0, 1)), 0.1)
    return y


def queue(s: Any, x: Tensor) -> Tensor:
    """A buffer of old activations, one of which is replaced each time, before the layer reads them (MoCo)."""
    with torch.no_grad():
        s.queue[s.microbatch % 4] = x[0, 0]
    return x + s.b(torch.tanh(s.a(s.queue))).mean(0)


def reused_input(s: Any, x: Tensor) -> Tensor:
    """x of one layer is overwritten when nobody needs it for autograd: the layer's weight is frozen."""
    h = s.a(x)
    y = s.c(h)
    h.mul_(0)
    return s.b(y)


def frozen_linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def gated(y: Tensor) -> Tensor:
    """Halves of y, one of them changed in place."""
    gate, up = y.narrow(-1, 0, WIDTH), y.narrow(-1, WIDTH, WIDTH)
    return up.mul_(gate.sigmoid())


class DoublesInPlace(torch.autograd.Function):
    """Marks its input dirty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


def data_changed(s: Any, x: Tensor) -> Tensor:
    """`.data` escapes the version counter; it is the activation after y was used."""
    h = s.a(x)
    y = s.b(torch.tanh(h))
    h.data.mul_(3)
    return y


class WritesInBackward(torch.autograd.Function):
    """The identity, whose backward writes past the version counter, as kernels in Triton or C++ do."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, write: Any, *tensors: Tensor) -> Tensor:
        ctx.write, ctx.tensors, ctx.more = write, [each.detach() for each in tensors], len(tensors)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        given = 1 * dy
        ctx.write(dy, *ctx.tensors)
        return given, None, *[None] * ctx.more


def written(write: Any) -> Any:
    """The backward of b, which comes after that of a, writes into the dY that both have."""
    return stage(lambda s, x: WritesInBackward.apply(s.b(torch.tanh(x)), write) + s.a(x))


def scaled_by_numpy(dy: Tensor) -> None:
    dy.detach().numpy()[...] *= 0.5


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
    Case("dY negated through .data", written(lambda dy: dy.data.neg_())),
    Case("dY turned round through .data", written(lambda dy: dy.data.copy_(dy.flip(-2)))),
    Case("dY full of NaN through .data", written(lambda dy: dy.data.fill_(torch.nan))),
    Case("dY scaled by NumPy", written(scaled_by_numpy)),
    Case("x scaled through .data in a backward", stage(x_written), modes=ONLY_EAGER),
    Case("dY of two scaled through .data", stage(two_uses)),
    one_by_one(
        "a workspace of NumPy's", stage(numpy_workspace, memory=lambda: Memory(1, TOKENS, WIDTH)), modes=ONLY_EAGER
    ),
    one_by_one("a NumPy view of x", stage(numpy_view, memory=Memory), modes=ONLY_EAGER),
    Case("ReLU in place", stage(lambda s, x: s.b(s.act(s.a(x))), act=lambda: nn.ReLU(inplace=True))),
    Case("dropout in place", stage(lambda s, x: s.b(F.dropout(s.a(x), 0.2, inplace=True)))),
    Case("two residuals in place", stage(residual_twice), modes=EVERY_MODE),
    Case("y plus x in place", stage(lambda s, x: s.b(s.a(x).add_(x)))),
    Case(
        "y plus pos.unsqueeze(0) in place",
        stage(lambda s, x: s.b(s.a(x).add_(s.pos.unsqueeze(0))), pos=parameter(TOKENS, WIDTH)),
        modes=EVERY_MODE,
    ),
    Case("the last y in place", stage(lambda s, x: s.b(torch.tanh(s.a(x))).add_(x))),
    Case("a part of y in place", stage(part_of_y), modes=EVERY_MODE),
    Case("written into zeros", stage(written_into_zeros)),
    Case("indices added in place", stage(lambda s, x: s.b((1 * x).index_add_(1, torch.tensor([0, 1, 1, 3]), s.a(x))))),
    Case("a view of y in place", stage(view_in_place)),
    Case("a transposed y in place", stage(transposed_in_place), modes=EVERY_MODE),
    Case(
        "chunks of y in place",
        stage(lambda s, x: s.b(gated(s.c(x))), c=linear(WIDTH, 2 * WIDTH)),
        no_gradient=("a.weight", "a.bias"),
    ),
    one_by_one("a workspace", stage(workspace, work=buffer(1, TOKENS, WIDTH)), modes=NOT_REPEATED),
    one_by_one(
        "a workspace with gradients", stage(workspace_with_grad, work=buffer(1, TOKENS, WIDTH)), modes=ONLY_EAGER
    ),
    Case("a moved average", stage(moved_average, average=buffer(WIDTH)), modes=NOT_REPEATED),
    one_by_one("a queue", stage(queue, queue=buffer(4, WIDTH)), modes=ONLY_EAGER),
    Case(
        "an input that is overwritten",
        stage(reused_input, c=frozen_linear),
        no_gradient=("c.weight", "c.bias"),
        modes=EVERY_MODE,
    ),
    Case(
        "an input marked dirty, of a fork",
        stage(lambda s, x: DoublesInPlace.apply(s.a(x)) + s.b(torch.tanh(x))),
        modes=EVERY_MODE,
    ),
    Case("data behind autograd's back", stage(data_changed)),
)
