"""Hooks, and what keeps or changes tensors. Backwards of other kinds are generated (`programs`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

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
    plain,
    stage,
)


def with_hooks(hook: Callable[[Any], Any], forward: Any = plain, **parts: Any) -> Callable[[int], nn.Module]:
    def build(index: int) -> nn.Module:
        module = stage(forward, **parts)(index)
        hook(module)
        return module

    return build


def doubled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


def hooked(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


def on_parameters(s: Any) -> None:
    s.a.weight.register_hook(lambda gradient: 2 * gradient)
    s.a.bias.register_hook(doubled_in_place)


def removed_after_one(s: Any) -> None:
    def hook(gradient: Tensor) -> Tensor:
        handle.remove()
        return 3 * gradient

    handle = s.a.weight.register_hook(hook)


def counts_gradients(s: Any) -> None:
    """How often a gradient arrives, and how large it was at last, is to be the same."""
    s.seen = nn.Buffer(torch.zeros(2))

    def hook(weight: Tensor) -> None:
        s.seen[0] += 1
        s.seen[1] = weight.grad.norm()  # type: ignore[union-attr]

    s.a.weight.register_post_accumulate_grad_hook(hook)


def several_at_once(s: Any) -> None:
    def show(gradients: Any) -> None:
        s.a.bias.shown = [None if each is None else each.clone() for each in gradients]

    torch.autograd.graph.register_multi_grad_hook([s.a.weight, s.a.bias], show)


def on_node(s: Any) -> None:
    """On the node that adds to `.grad`."""

    def halve(*gradients: Any) -> None:
        s.a.weight.grad.mul_(0.5)

    s.node = get_gradient_edge(s.a.weight).node  # else it is gone, with its hook
    s.node.register_hook(halve)


def before_node(s: Any) -> None:
    s.node = get_gradient_edge(s.a.weight).node
    s.node.register_prehook(lambda gradients: (2 * gradients[0],))


def around_layer(s: Any) -> None:
    def change(module: nn.Module, dx: Any, dy: Any) -> None:
        for each in filter(torch.is_tensor, dx):
            each.mul_(0.5)

    s.a.register_full_backward_pre_hook(lambda module, dy: (2 * dy[0],))
    s.a.register_full_backward_hook(change)


def keeping(s: Any) -> None:
    s.kept = []


def zeroed(kept: list[Tensor], new: Tensor) -> None:
    """What is kept of the microbatch before is changed when the next one comes."""
    with torch.no_grad():
        for old in kept:
            old.zero_()
    kept[:] = [new]


def keeps_input(s: Any, x: Tensor) -> Tensor:
    """Keeps what the stage received."""
    zeroed(s.kept, x)
    return s.a(x) + s.b(torch.tanh(x))


def hook_that_keeps(s: Any, x: Tensor) -> Tensor:
    """On the stage's output, whose gradient the next stage sent."""
    return hooked(s.a(x) + s.b(torch.tanh(x)), lambda gradient: zeroed(s.kept, gradient))


def keep_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    zeroed(ctx.given[0], dy)
    return dy, None


Keeps = function(keep_gradient)


def saved_as_others(s: Any, x: Tensor) -> Tensor:
    """Saved tensors are copies, and activations lose digits: dW has to be that of the numbers that come back."""

    def pack(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.numel() == TOKENS * WIDTH else tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor.double()):
        return plain(s, x)


def retained(s: Any, x: Tensor) -> Tensor:
    """`.grad` of an activation, which is read afterwards."""
    h = s.a(x)
    if h.requires_grad:
        h.retain_grad()
    return s.b(h) + h


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
    Case(
        "a forward hook in place",
        with_hooks(lambda s: s.a.register_forward_hook(lambda m, args, y: y.mul_(2))),
        EVERY_MODE,
    ),
    Case("full backward hooks", with_hooks(around_layer, lambda s, x: s.b(s.a(torch.tanh(s.c(x)))), c=linear())),
    Case("a tensor hook in place on a fork", stage(lambda s, x: hooked(s.a(x), doubled_in_place) + s.b(torch.tanh(x)))),
    Case("retained gradients", stage(retained)),
    Case("a hook on the weight", with_hooks(on_parameters), EVERY_MODE),
    one_by_one("a hook that removes itself", with_hooks(removed_after_one)),
    Case("a hook that counts", with_hooks(counts_gradients), ONLY_EAGER),
    Case("a hook on several", with_hooks(several_at_once)),
    Case("a node hook", with_hooks(on_node)),
    Case("a node pre-hook", with_hooks(before_node)),
    Case("saved as others", stage(saved_as_others), ONLY_EAGER),
    one_by_one(
        "a backward that keeps a part of its gradient",
        with_hooks(keeping, lambda s, x: s.b(x) + Keeps.apply(F.pad(s.a(x[:, :2]), (0, 0, 0, TOKENS - 2)), s.kept)),
        most_ranks=2,
    ),
    one_by_one("an input that is kept", with_hooks(keeping, keeps_input), modes=ONLY_EAGER),
    one_by_one("a hook that keeps y's gradient", with_hooks(keeping, hook_that_keeps), most_ranks=2),
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
