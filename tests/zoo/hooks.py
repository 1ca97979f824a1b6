"""Hooks, and what keeps the gradients that it is given. Backwards of other kinds are generated (`programs`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Case, function, linear, one_by_one, plain, stage


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
)
