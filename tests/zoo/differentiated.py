"""Models that differentiate within their forward, or within a backward of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from zoo.case import ONLY_EAGER, Case, function, linear, stage


def energy(s: Any, x: Tensor) -> Tensor:
    return torch.tanh(s.b(torch.tanh(s.a(x)))).square().sum()


def forces(s: Any, x: Tensor) -> Tensor:
    """The gradient of an energy: what is trained is the gradient's gradient."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(energy(s, x), x, create_graph=True)
    return x + s.c(force)


def sensitivities(s: Any, x: Tensor) -> Tensor:
    """A gradient that is used as a number only."""
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(energy(s, inner), inner)
    return s.b(torch.tanh(s.a(x))) * slope.detach()


def solved(s: Any, x: Tensor) -> Tensor:
    """A deep equilibrium layer: a fixed point without a graph, whose backward solves for the gradient by a hook."""
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(8):
            z = torch.tanh(0.3 * s.a(z) + x)
    z = torch.tanh(0.3 * s.a(z) + x)
    if z.requires_grad:
        z0 = z.detach().requires_grad_()
        f0 = torch.tanh(0.3 * s.a(z0) + x.detach())

        def solve(gradient: Tensor) -> Tensor:
            solution = gradient
            for _ in range(8):
                solution = gradient + torch.autograd.grad(f0, z0, solution, retain_graph=True)[0]
            return solution

        z.register_hook(solve)
    return s.b(z)


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


def by_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Adds to `.grad`, as Megatron's checkpoints do."""
    x, y = run_again(ctx)
    torch.autograd.backward(y, dy)
    return x.grad, None, *(None for _ in ctx.weights)


Recomputed, RecomputedForInputs, RunsBackward = (
    function(each, run_without_graph) for each in (of_named_weights, of_input_alone, by_backward)
)


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


CASES = (
    Case("forces", stage(forces, c=linear(bias=False)), no_gradient=("b.bias",)),
    Case("a gradient used as a number", stage(sensitivities)),
    Case("deep equilibrium", stage(solved)),
    Case("recomputed by autograd.grad", stage(lambda s, x: Recomputed.apply(x, layers(s), *both(s))), ONLY_EAGER),
    Case(
        "recomputed for inputs",
        stage(lambda s, x: s.a(x) + RecomputedForInputs.apply(s.c(x), layers(s)), c=linear()),
        ONLY_EAGER,
        no_gradient=("b.weight", "b.bias"),
    ),
    Case(
        "recomputed by backward",
        stage(lambda s, x: s.c(RunsBackward.apply(x, layers(s), *both(s))), c=linear()),
        ONLY_EAGER,
        shapes="given",
    ),
    Case("an inner loop", stage(inner_loop)),
    Case("vmap", stage(lambda s, x: s.b(torch.tanh(vmap(s.a)(x))))),
    Case("func.grad", stage(gradient_by_func, c=linear(bias=False)), ONLY_EAGER, no_gradient=("b.bias",)),
    Case("jvp", stage(pushed_forward)),
    Case("forward-mode AD", stage(with_dual_numbers)),
)
