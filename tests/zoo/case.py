"""What a model of the zoo is: a stage factory, and what a pipeline of such stages is fed with and has to give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mode = Literal["eager", "checkpointed", "compiled"]
Modes = tuple[Mode, ...]
EVERY_MODE: Modes = ("eager", "checkpointed", "compiled")
ONLY_EAGER: Modes = ("eager",)
ONLY_COMPILED: Modes = ("compiled",)
NOT_REPEATED: Modes = ("eager", "compiled")
WIDTH, TOKENS = 8, 4

Batch = tuple[tuple[Tensor, ...], Tensor]
"""Inputs of the first stage and the target, with all samples of a step."""


def rows_of_numbers(samples: int) -> Batch:
    """x and target of shape (samples, TOKENS, WIDTH)."""
    return (torch.randn(samples, TOKENS, WIDTH),), torch.randn(samples, TOKENS, WIDTH)


@dataclass(frozen=True, eq=False)
class Case:
    """A model, cut into stages of one kind. Expected are the gradients of plain autograd."""

    name: str
    build: Callable[[int], nn.Module]
    """Makes the stage of that index, with the seed and the default dtype (float64) that are set."""
    modes: Modes = ("eager", "checkpointed")
    """Not compiled unless the case says so: that takes twenty times as long as running."""
    tolerance: float = 1e-9
    """Error over the largest number of the expected gradient."""
    samples: int = 1
    """In a microbatch. One is where a gradient is most easily a view of another."""
    batch: Callable[[int], Batch] = rows_of_numbers
    loss: Callable[[Any, Tensor], Tensor] = F.mse_loss
    scale_grads: bool = True
    no_gradient: tuple[str, ...] = ()
    """Ends of the names of parameters that get no gradient, or zeros."""
    schedules: tuple[str, ...] | None = None
    """Only with these."""
    on_two_ranks: bool = False
    """Whether it is also run on two ranks, as what stages send and receive matters."""
    share: Callable[[Mapping[int, nn.Module]], None] = lambda stages: None
    """Ties stages, by index, that are on one rank; in a V these are the first and the last one."""
    prepared: Callable[[nn.Module], object] = lambda stage: None
    """What is done with each stage once a schedule is built on it."""
    between: Callable[[nn.Module], object] = lambda stage: None
    """What is done with each stage between the first and the second step, in the reference as well."""
    accumulates: bool = False
    """Whether the gradients of the first step stay for the second one, with `scale_grads`, too."""
    second_schedule: str | None = None
    """Runs the second step, on the same stages."""


ONE_BY_ONE = ("WeightsLast", "ZBH1")
"""On one rank they finish F and I of a microbatch before the next: what is changed in F is needed by the I before."""


def one_by_one(name: str, build: Callable[[int], nn.Module], **options: Any) -> Case:
    """A model that keeps something from one microbatch to the next."""
    return Case(name, build, schedules=ONE_BY_ONE, **options)


class Stage(nn.Module):
    """Parts, and a function that uses them as its forward."""

    microbatch = 0
    """The one that is in F, or recomputed in I: whatever is to change from one to the next depends on it."""

    def __init__(self, forward: Callable[..., Any], parts: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__()
        self.function = forward
        for name, make in parts.items():
            setattr(self, name, make())

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def stage(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[int], nn.Module]:
    """Builds `Stage`s, which have two linear layers `a` and `b` beside `parts`."""
    return lambda index: Stage(forward, {"a": linear(), "b": linear(), **parts})


def function(backward: Callable[..., Any], forward: Callable[..., Any] | None = None) -> Any:
    """An autograd Function: the identity of its first argument, which keeps the others in `ctx.given`, or `forward`."""

    def identity(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        ctx.given = given
        return x.view_as(x)

    methods = {"forward": staticmethod(forward or identity), "backward": staticmethod(backward)}
    return type("Own", (torch.autograd.Function,), methods)


def plain(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.tanh(s.a(x)))  # type: ignore[no-any-return]


def bare(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[int], nn.Module]:
    """Builds `Stage`s of `parts` alone."""
    return lambda index: Stage(forward, parts)


def linear(inputs: int = WIDTH, outputs: int = WIDTH, bias: bool = True) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(inputs, outputs, bias=bias)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape))


def buffer(*shape: int) -> Callable[[], nn.Buffer]:
    return lambda: nn.Buffer(torch.randn(shape))
