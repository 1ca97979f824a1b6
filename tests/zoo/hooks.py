"""Hooks, and backwards that keep or change the gradients that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu, saved_tensors_hooks

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Case, Stage, linear, one_by_one, parameter, plain, stage

POSITIONS = parameter(TOKENS, WIDTH)


def at_position(s: Any, x: Tensor) -> Tensor:
    return s.b(s.a(x) + s.pos[None])


def forked(s: Any, x: Tensor) -> Tensor:
    """Both layers get the very same tensor as gradient, the one that runs later in the backward may see it changed."""
    return s.a(x) + s.b(torch.tanh(x))


def beside_a_residual(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """`function` gets the gradient that the last layer gets as well."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        return function(h * 1) + s.b(h)

    return forward


def with_hooks(
    hook: Callable[[Any], Any], forward: Callable[..., Any] = plain, **parts: Any
) -> Callable[[int], nn.Module]:
    def build(index: int) -> nn.Module:
        module = stage(forward, **parts)(index)
        hook(module)
        return module

    return build


def doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


def doubled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


def hooked(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


def clipped(weight: Tensor) -> None:
    """As an optimizer in the backward: acts on `.grad` after every microbatch, not linear in it."""
    weight.grad.clamp_(-1e-2, 1e-2)  # type: ignore[union-attr]


def on_node(weight: Tensor, hook: Callable[..., Any], *, before: bool = False) -> None:
    """On the node that adds to `.grad`."""
    node = get_gradient_edge(weight).node
    weight.node = node  # type: ignore[attr-defined]  # else it is gone, with its hook
    if before:
        node.register_prehook(hook)
    else:
        node.register_hook(hook)


def halves_after_accumulation(weight: Tensor) -> Callable[..., None]:
    def hook(gradients: Any, inputs: Any) -> None:
        weight.grad.mul_(0.5)  # type: ignore[union-attr]

    return hook


def doubles_what_comes(gradients: Any) -> None:
    gradients[0].mul_(2)


def counts_gradients(s: Any) -> None:
    """How often a gradient arrives, and how large it was at last, is to be the same."""
    s.seen = nn.Buffer(torch.zeros(2))

    def hook(weight: Tensor) -> None:
        s.seen[0] += 1
        s.seen[1] = weight.grad.norm()  # type: ignore[union-attr]

    s.a.weight.register_post_accumulate_grad_hook(hook)


def several_at_once(s: Any) -> None:
    def double(gradients: Any) -> None:
        s.a.bias.shown = [None if each is None else each.clone() for each in gradients]

    torch.autograd.graph.register_multi_grad_hook([s.a.weight, s.a.bias], double)


def removed_after_one(s: Any) -> None:
    def hook(gradient: Tensor) -> Tensor:
        handle.remove()
        return 3 * gradient

    handle = s.a.weight.register_hook(hook)


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


class Overwrites(torch.autograd.Function):
    """Doubles its gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.mul_(2)


class Keeps(torch.autograd.Function):
    """Keeps its gradient and changes it at its next backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        for old in ctx.kept:
            old.zero_()
        ctx.kept[:] = [dy]
        return dy, None


class OneBuffer(torch.autograd.Function):
    """Gives its gradient in the same memory every time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        ctx.memory = memory
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.memory.copy_(dy).mul_(2)
        return ctx.memory, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return -0.1 * dy


class OwnLinear(torch.autograd.Function):
    """A product with a backward of its own that adds to `.grad` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)


class GradientPerSample(OwnLinear):
    """The same with a gradient for each sample, which autograd sums."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.mT @ x


def memory() -> nn.Buffer:
    return nn.Buffer(torch.zeros(1, TOKENS, WIDTH), persistent=False)


def saved_as_copies(s: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return plain(s, x)


def saved_on_cpu(s: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return plain(s, x)


def saved_half(s: Any, x: Tensor) -> Tensor:
    """Saved activations lose digits: dW has to be that of the numbers that come back."""

    def pack(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.numel() == TOKENS * WIDTH else tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor.double()):
        return plain(s, x)


class Scales(nn.Module):
    """A module whose full backward hook is tested."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


def replaced_gradients(module: nn.Module, dx: Any, dy: Any) -> Any:
    return tuple(None if each is None else 0.5 * each for each in dx)


def changed_gradients(module: nn.Module, dx: Any, dy: Any) -> None:
    for each in dx:
        if each is not None:
            each.mul_(0.5)


def retained(s: Stage, x: Tensor) -> Tensor:
    """`.grad` of an activation, which is read afterwards."""
    h = s.a(x)
    if h.requires_grad:
        h.retain_grad()
    return s.b(h) + h


CASES = (
    Case("a forward pre-hook", with_hooks(lambda s: s.b.register_forward_pre_hook(lambda m, args: (args[0] * 2,)))),
    Case("a forward hook", with_hooks(lambda s: s.a.register_forward_hook(lambda m, args, y: y.sin()))),
    Case(
        "a forward hook with keywords",
        with_hooks(lambda s: s.a.register_forward_hook(lambda m, args, kwargs, y: y * 2, with_kwargs=True)),
    ),
    Case(
        "a forward hook in place",
        with_hooks(lambda s: s.a.register_forward_hook(lambda m, args, y: y.mul_(2))),
        modes=EVERY_MODE,
    ),
    Case(
        "a forward hook that keeps activations",
        with_hooks(lambda s: s.a.register_forward_hook(lambda m, args, y: setattr(m, "kept", y.detach())), forked),
    ),
    Case(
        "a full backward hook",
        with_hooks(
            lambda s: s.a.register_full_backward_hook(replaced_gradients),
            lambda s, x: s.b(s.a(torch.tanh(s.c(x)))),
            c=linear(),
        ),
    ),
    Case(
        "a full backward hook in place",
        with_hooks(
            lambda s: s.a.register_full_backward_hook(changed_gradients),
            lambda s, x: s.b(s.a(torch.tanh(s.c(x)))),
            c=linear(),
        ),
    ),
    Case(
        "a full backward pre-hook",
        with_hooks(
            lambda s: s.a.register_full_backward_pre_hook(lambda m, dy: (2 * dy[0],)),
            lambda s, x: s.b(s.a(torch.tanh(s.c(x)))),
            c=linear(),
        ),
    ),
    Case(
        "a full backward hook on a block",
        with_hooks(
            lambda s: s.c.register_full_backward_hook(replaced_gradients), lambda s, x: s.b(s.c(s.a(x))), c=Scales
        ),
    ),
    Case("a tensor hook on y", stage(lambda s, x: s.b(hooked(s.a(x), doubled)))),
    Case("a tensor hook in place on y", stage(lambda s, x: s.b(hooked(s.a(x), doubled_in_place)))),
    Case("a tensor hook in place on a fork", stage(lambda s, x: hooked(s.a(x), doubled_in_place) + s.b(torch.tanh(x)))),
    Case("a hook that clips", stage(lambda s, x: s.b(hooked(s.a(x), lambda g: g.clamp(-1e-2, 1e-2))))),
    Case("retained gradients", stage(retained)),
    Case("a hook on the weight", with_hooks(lambda s: s.a.weight.register_hook(doubled)), modes=EVERY_MODE),
    Case("a hook on the bias in place", with_hooks(lambda s: s.a.bias.register_hook(doubled_in_place))),
    Case(
        "a hook on pos in place",
        with_hooks(lambda s: s.pos.register_hook(doubled_in_place), at_position, pos=POSITIONS),
    ),
    one_by_one("a hook that removes itself", with_hooks(removed_after_one)),
    Case(
        "a hook after accumulation",
        with_hooks(lambda s: s.a.weight.register_post_accumulate_grad_hook(clipped)),
        modes=EVERY_MODE,
    ),
    Case(
        "a hook after accumulation on pos",
        with_hooks(lambda s: s.pos.register_post_accumulate_grad_hook(clipped), at_position, pos=POSITIONS),
    ),
    Case("a hook that counts", with_hooks(counts_gradients), modes=ONLY_EAGER),
    Case("a hook on several", with_hooks(several_at_once)),
    Case("a node hook", with_hooks(lambda s: on_node(s.a.weight, halves_after_accumulation(s.a.weight)))),
    Case("a node pre-hook", with_hooks(lambda s: on_node(s.a.weight, lambda grads: (2 * grads[0],), before=True))),
    Case(
        "a node pre-hook in place on pos",
        with_hooks(lambda s: on_node(s.pos, doubles_what_comes, before=True), at_position, pos=POSITIONS),
    ),
    Case("saved as copies", stage(saved_as_copies), modes=ONLY_EAGER),
    Case("saved on the CPU", stage(saved_on_cpu), modes=ONLY_EAGER),
    Case("saved with fewer digits", stage(saved_half), modes=ONLY_EAGER),
    Case("a backward that overwrites, on a fork", stage(lambda s, x: Overwrites.apply(s.a(x)) + s.b(torch.tanh(x)))),
    Case("a backward that overwrites, before a residual", stage(beside_a_residual(Overwrites.apply))),
    one_by_one(
        "a backward that keeps",
        with_hooks(lambda s: setattr(s, "kept", []), lambda s, x: Keeps.apply(s.a(x), s.kept) + s.b(torch.tanh(x))),
        most_ranks=2,
    ),
    one_by_one(
        "a backward that keeps a part of its gradient",
        with_hooks(
            lambda s: setattr(s, "kept", []),
            lambda s, x: s.b(x) + Keeps.apply(F.pad(s.a(x[:, :2]), (0, 0, 0, TOKENS - 2)), s.kept),
        ),
        most_ranks=2,
    ),
    one_by_one("an input that is kept", with_hooks(lambda s: setattr(s, "kept", []), keeps_input), modes=ONLY_EAGER),
    one_by_one(
        "a hook that keeps y's gradient", with_hooks(lambda s: setattr(s, "kept", []), hook_that_keeps), most_ranks=2
    ),
    Case("a backward with one buffer", stage(lambda s, x: s.b(OneBuffer.apply(s.a(x), s.memory)), memory=memory)),
    Case("a reversed gradient", stage(lambda s, x: s.b(torch.tanh(Reversed.apply(s.a(x)))))),
    Case(
        "a product with its own backward",
        stage(lambda s, x: s.b(torch.tanh(OwnLinear.apply(x, s.a.weight)))),
        no_gradient=("a.bias",),
        modes=EVERY_MODE,
    ),
    Case(
        "a product whose backward leaves a sum to autograd",
        stage(lambda s, x: s.b(torch.tanh(GradientPerSample.apply(x, s.a.weight)))),
        no_gradient=("a.bias",),
        samples=2,
    ),
)
