"""Hooks, what keeps or changes tensors, checkpoints, and models that differentiate within a forward or a backward.

Backwards of other kinds are generated (`programs`), and checkpoints of products and of layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from zoo.case import (
    EVERY_MODE,
    NOT_REPEATED,
    ONLY_EAGER,
    TOKENS,
    WIDTH,
    Case,
    bare,
    buffer,
    function,
    linear,
    one_by_one,
    parameter,
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


def reused_input(s: Any, x: Tensor) -> Tensor:
    """x of one layer is overwritten when nobody needs it for autograd: the layer's weight is frozen."""
    h = s.a(x)
    y = s.c(h)
    h.mul_(0)
    return s.b(y)


def double(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


DoublesInPlace = function(lambda ctx, dy: 2 * dy, double)


def energy(s: Any, x: Tensor) -> Tensor:
    return torch.tanh(s.b(torch.tanh(s.a(x)))).square().sum()


def forces(s: Any, x: Tensor) -> Tensor:
    """The gradient of an energy: what is trained is the gradient's gradient."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(energy(s, x), x, create_graph=True)
    return x + s.c(force)


def run_without_graph(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], *weights: Tensor) -> Tensor:
    """Keeps x alone: the backward runs the layers again."""
    ctx.run, ctx.weights = run, weights
    ctx.save_for_backward(x)
    with torch.no_grad():
        return run(x)


@torch.enable_grad()
def run_again(ctx: Any) -> tuple[Tensor, Tensor]:
    x = ctx.saved_tensors[0].detach().requires_grad_()
    return x, ctx.run(x)


def of_named_weights(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, y = run_again(ctx)
    dx, *of_weights = torch.autograd.grad(y, [x, *ctx.weights], dy)
    return dx, None, *of_weights


def of_input_alone(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    """Though the layers have weights."""
    x, y = run_again(ctx)
    return torch.autograd.grad(y, x, dy)[0], None


Recomputed, RecomputedForInputs = (function(each, run_without_graph) for each in (of_named_weights, of_input_alone))


def inner_loop(s: Any, x: Tensor) -> Tensor:
    """MAML: a step of gradient descent within the forward, and the weights after it."""
    weights = dict(s.a.named_parameters())
    with torch.enable_grad():
        loss = functional_call(s.a, weights, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: each - 0.1 * slope for (name, each), slope in zip(weights.items(), slopes, strict=True)}
    return s.b(torch.tanh(functional_call(s.a, moved, (x,))))


def gradient_by_func(s: Any, x: Tensor) -> Tensor:
    return x + s.c(grad(lambda x: energy(s, x))(x))


def pushed_forward(s: Any, x: Tensor) -> Tensor:
    y, dy = jvp(lambda x: s.b(torch.tanh(s.a(x))), (x,), (torch.ones_like(x),))  # type: ignore[misc]
    return y + dy


def with_dual_numbers(s: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        y, dy = forward_ad.unpack_dual(s.b(torch.tanh(s.a(dual))))
    return y + dy


def both(s: Any) -> tuple[Tensor, ...]:
    return tuple(each for layer in (s.a, s.b) for each in layer.parameters())


def layers(s: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: s.b(torch.tanh(s.a(x)))


again = partial(checkpoint, use_reentrant=False)


def overwritten_in_numpy(s: Any, x: Tensor) -> Tensor:
    """x of one layer is in memory of NumPy's, x of the other is lent to it. The next microbatch overwrites both."""
    s.kept[...] = x.detach().tanh().numpy()
    if s.lent is not None:
        s.lent[...] = 0
    h = x.detach().sin()
    s.lent = h.numpy()
    return s.b(torch.tanh(s.a(torch.from_numpy(s.kept)))) + s.c(h) + x


of_its_child = bare(lambda s, x: F.linear(x, s.child.weight, s.child.bias * 2), child=linear())


CASES = (
    Case(
        "a forward hook in place",
        with_hooks(lambda s: s.a.register_forward_hook(lambda m, args, y: y.mul_(2))),
        EVERY_MODE,
    ),
    Case("full backward hooks", with_hooks(around_layer, lambda s, x: s.b(s.a(torch.tanh(s.c(x)))), c=linear())),
    Case("retained gradients", stage(retained)),
    Case("a hook on the weight", with_hooks(on_parameters), EVERY_MODE),
    Case("a hook that counts", with_hooks(counts_gradients), ONLY_EAGER),
    Case("a hook on several", with_hooks(several_at_once)),
    Case("a node hook", with_hooks(on_node)),
    Case("a node pre-hook", with_hooks(before_node)),
    Case("saved as others", stage(saved_as_others), ONLY_EAGER),
    one_by_one(
        "a backward that keeps a part of its gradient",
        with_hooks(keeping, lambda s, x: s.b(x) + Keeps.apply(F.pad(s.a(x[:, :2]), (0, 0, 0, TOKENS - 2)), s.kept)),
        on_two_ranks=True,
    ),
    one_by_one("a hook that keeps y's gradient", with_hooks(keeping, hook_that_keeps), on_two_ranks=True),
    one_by_one(
        "memory of NumPy's",
        stage(overwritten_in_numpy, c=linear(), lent=lambda: None, kept=lambda: torch.zeros(1, TOKENS, WIDTH).numpy()),
        modes=ONLY_EAGER,
    ),
    Case("a part of y in place", stage(part_of_y), modes=EVERY_MODE),
    one_by_one("a workspace", stage(workspace, work=buffer(1, TOKENS, WIDTH)), modes=NOT_REPEATED),
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
    Case("forces", stage(forces, c=linear(bias=False)), no_gradient=("b.bias",)),
    Case("recomputed by autograd.grad", stage(lambda s, x: Recomputed.apply(x, layers(s), *both(s))), ONLY_EAGER),
    Case(
        "recomputed for inputs",
        stage(lambda s, x: s.a(x) + RecomputedForInputs.apply(s.c(x), layers(s)), c=linear()),
        ONLY_EAGER,
        no_gradient=("b.weight", "b.bias"),
    ),
    Case("an inner loop", stage(inner_loop)),
    Case("vmap", stage(lambda s, x: s.b(torch.tanh(vmap(s.a)(x))))),
    Case("func.grad", stage(gradient_by_func, c=linear(bias=False)), ONLY_EAGER, no_gradient=("b.bias",)),
    Case("jvp", stage(pushed_forward)),
    Case("forward-mode AD", stage(with_dual_numbers)),
    Case("checkpoint with dropout", stage(lambda s, x: again(lambda x: s.b(F.dropout(s.a(x), 0.3)), x))),
    Case(
        "checkpoint that moves to the CPU",
        stage(lambda s, x: s.b(s.c(s.a(x))), c=lambda: offload_wrapper(nn.Sequential(linear()(), nn.Tanh()))),
    ),
    Case(
        "checkpoint of a block that multiplies with its child's weight, in a stage with a parameter",
        stage(lambda s, x: again(s.c, x * s.scale), c=partial(of_its_child, 0), scale=parameter(TOKENS, WIDTH)),
        no_gradient=("a.weight", "a.bias", "b.weight", "b.bias"),
    ),
)
