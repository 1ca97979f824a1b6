"""Models that differentiate within their forward, or within a backward of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

from zoo.case import ONLY_CHECKPOINTED, ONLY_EAGER, WIDTH, Case, linear, stage


def energy(s: Any, x: Tensor) -> Tensor:
    return torch.tanh(s.b(torch.tanh(s.a(x)))).square().sum()


def forces(s: Any, x: Tensor) -> Tensor:
    """The gradient of an energy: what is trained is the gradient's gradient."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(energy(s, x), x, create_graph=True)
    return x + s.c(force)


def energy_and_forces(s: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        e = energy(s, x)
        force, missing = torch.autograd.grad(e, [x, s.unused], create_graph=True, allow_unused=True)
    assert missing is None
    return x + force + e


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


class Recomputed(torch.autograd.Function):
    """Keeps x alone; its backward runs the layers again, and asks for the gradient of x and of named weights."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.weights = run, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gradients = torch.autograd.grad(ctx.run(x), [x, *ctx.weights], dy)
        return None, *gradients


class RecomputedForInputs(torch.autograd.Function):
    """Gives the gradient of x alone, though the layers have weights."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, torch.autograd.grad(ctx.run(x), x, dy)[0]


class RunsBackward(torch.autograd.Function):
    """Its backward runs the layers again, and a backward that adds to `.grad`, as Megatron's checkpoints do."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(x), dy)
        return None, x.grad, *(None for _ in ctx.needs_input_grad[2:])


class Reversible(torch.autograd.Function):
    """y1 = x1 + a(x2), y2 = x2 + b(y1): the backward computes x from y, and the layers once more."""

    @staticmethod
    def forward(ctx: Any, s: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.s = s
        with torch.no_grad():
            x1, x2 = x.chunk(2, -1)
            y1 = x1 + torch.tanh(s.f(x2))
            y2 = x2 + torch.tanh(s.g(y1))
            y = torch.cat([y1, y2], -1)
        ctx.save_for_backward(y.clone())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        s = ctx.s
        y1, y2 = ctx.saved_tensors[0].chunk(2, -1)
        dy1, dy2 = dy.chunk(2, -1)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            gy = torch.tanh(s.g(y1))
            gy.backward(dy2)
        x2 = (y2 - gy).detach().requires_grad_()
        dx1 = dy1 + y1.grad  # type: ignore[operator]
        with torch.enable_grad():
            torch.tanh(s.f(x2)).backward(dx1)
        return None, torch.cat([dx1, dy2 + x2.grad], -1), *(None for _ in ctx.needs_input_grad[2:])  # type: ignore[operator]


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


def pulled_back(s: Any, x: Tensor) -> Tensor:
    y, back = vjp(lambda x: s.b(torch.tanh(s.a(x))), x)  # type: ignore[misc]
    return y + back(torch.ones_like(y))[0]


def pushed_forward(s: Any, x: Tensor) -> Tensor:
    y, dy = jvp(lambda x: s.b(torch.tanh(s.a(x))), (x,), (torch.ones_like(x),))  # type: ignore[misc]
    return y + dy


def with_dual_numbers(s: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        y, dy = forward_ad.unpack_dual(s.b(torch.tanh(s.a(dual))))
    return y + dy


def jacobian(s: Any, x: Tensor) -> Tensor:
    by_row = vmap(jacrev(lambda row: torch.tanh(s.a(row))))(x.flatten(0, 1))
    return s.b(x) + by_row.sum(1).view_as(x)


def ensemble(s: Any, x: Tensor) -> Tensor:
    """Layers stacked, and run as one."""
    weights, buffers = stack_module_state(list(s.members))
    stacked = {name: torch.stack([dict(m.named_parameters())[name] for m in s.members]) for name in weights}
    ys = vmap(lambda w: functional_call(s.members[0], (w, buffers), (x,)))(stacked)
    return s.b(torch.tanh(ys.mean(0)))


def both(s: Any) -> tuple[Tensor, ...]:
    return tuple(each for layer in (s.a, s.b) for each in layer.parameters())


def layers(s: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: s.b(torch.tanh(s.a(x)))


CASES = (
    Case("forces", stage(forces, c=linear(bias=False)), no_gradient=("b.bias",)),
    Case(
        "energy and forces",
        stage(energy_and_forces, unused=lambda: nn.Parameter(torch.ones(3))),
        no_gradient=("unused",),
    ),
    Case("a gradient used as a number", stage(sensitivities)),
    Case("deep equilibrium", stage(solved)),
    Case("recomputed by autograd.grad", stage(lambda s, x: Recomputed.apply(layers(s), x, *both(s))), modes=ONLY_EAGER),
    Case(
        "recomputed for inputs",
        stage(lambda s, x: s.a(x) + RecomputedForInputs.apply(layers(s), s.c(x)), c=linear()),
        modes=ONLY_EAGER,
        no_gradient=("b.weight", "b.bias"),
    ),
    Case(
        "recomputed by backward",
        stage(lambda s, x: s.c(RunsBackward.apply(layers(s), x, *both(s))), c=linear()),
        modes=ONLY_EAGER,
        shapes="given",
    ),
    Case(
        "reversible",
        stage(lambda s, x: s.b(Reversible.apply(s, s.a(x), *s.f.parameters())), f=linear(4, 4), g=linear(4, 4)),
        modes=ONLY_EAGER,
        shapes="given",
    ),
    Case(
        "reversible, checkpointed",
        stage(lambda s, x: Reversible.apply(s, s.b(s.a(x)), *s.f.parameters()), f=linear(4, 4), g=linear(4, 4)),
        modes=ONLY_CHECKPOINTED,
        shapes="given",
    ),
    Case("an inner loop", stage(inner_loop)),
    Case("vmap", stage(lambda s, x: s.b(torch.tanh(vmap(s.a)(x))))),
    Case("vmap twice", stage(lambda s, x: s.b(torch.tanh(vmap(vmap(s.a))(x))))),
    Case("func.grad", stage(gradient_by_func, c=linear(bias=False)), modes=ONLY_EAGER, no_gradient=("b.bias",)),
    Case("vjp", stage(pulled_back), modes=ONLY_EAGER),
    Case("jvp", stage(pushed_forward)),
    Case("forward-mode AD", stage(with_dual_numbers)),
    Case("a Jacobian", stage(jacobian), modes=ONLY_EAGER),
    Case(
        "an ensemble",
        stage(ensemble, members=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))),
        no_gradient=("a.weight", "a.bias"),
    ),
)
