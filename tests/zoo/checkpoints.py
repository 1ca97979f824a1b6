"""Activation checkpointing of every kind, within a stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from zoo.case import EVERY_MODE, ONLY_EAGER, TOKENS, WIDTH, Case, linear, parameter, stage
from zoo.precision import of as rows_in

again = partial(checkpoint, use_reentrant=False)


def block(s: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: s.b(torch.tanh(s.a(x)))


def without_early_stop(s: Any, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return again(block(s), x)


def selective(keep: Callable[[Any], bool]) -> Callable[[Any, Tensor], Tensor]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keep(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(s: Any, x: Tensor) -> Tensor:
        return again(block(s), x, context_fn=lambda: create_selective_checkpoint_contexts(policy))

    return forward


def nested(s: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.tanh(again(s.a, x))

    return again(lambda x: s.b(again(inner, x)), x)


def two_that_share(s: Any, x: Tensor) -> Tensor:
    return again(block(s), again(block(s), x))


def with_own_checkpoint(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A square x: torch's check of recomputed tensors, by shapes, does not tell x, dY and the weight apart."""

    def forward(s: Any, x: Tensor) -> Tensor:
        rows = s.a(x).flatten(0, -2).repeat(WIDTH // TOKENS, 1)
        y: Tensor = again(lambda rows: product(rows, s.w), rows)
        return s.b(y[: len(y) * TOKENS // WIDTH].unflatten(0, x.shape[:-1]))  # type: ignore[no-any-return]

    return forward


square = parameter(WIDTH, WIDTH)


class OfItsChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.child.weight, self.child.bias * 2)


def same_input(s: Any, x: Tensor) -> Tensor:
    return again(s.a, x) + again(s.b, x)


def with_parameter(s: Any, x: Tensor) -> Tensor:
    return again(lambda x, pos: s.b(torch.tanh(s.a(x) + pos[None])), x, s.pos)


def dropped(s: Any, x: Tensor) -> Tensor:
    return again(lambda x: s.b(F.dropout(s.a(x), 0.3)), x)


def dropped_reentrant(s: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: s.b(F.dropout(s.a(x), 0.3)), s.c(x), use_reentrant=True)


def hooked(s: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        y = s.a(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return s.b(torch.tanh(y))

    return again(inner, x)


def in_place(s: Any, x: Tensor) -> Tensor:
    return again(lambda x: s.b(s.a(x).relu_()).add_(x), x)


def under_autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return again(block(s), x).to(x.dtype)


def counted(s: Any, x: Tensor) -> Tensor:
    """The number of repetitions goes in as an argument, so that it is the same again."""

    def repeated(x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch.tanh(s.b(s.a(x)))
        return x

    return again(repeated, x, 1 + s.microbatch)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def compiled_block() -> nn.Module:
    module = two_layers()
    module.compile(backend="aot_eager")
    return module


def wrapped(**options: Any) -> Callable[[], nn.Module]:
    return lambda: checkpoint_wrapper(two_layers(), **options)


CASES = (
    Case("checkpointed block", stage(lambda s, x: again(block(s), x)), modes=EVERY_MODE),
    Case("checkpoint without early stop", stage(without_early_stop)),
    Case(
        "checkpoint that keeps products",
        stage(selective(lambda op: op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default))),
    ),
    Case("checkpoint that keeps the rest", stage(selective(lambda op: op is torch.ops.aten.tanh.default))),
    Case("nested checkpoints", stage(nested)),
    Case("two checkpoints of the same layers", stage(two_that_share), modes=EVERY_MODE),
    Case("two checkpoints of the same x", stage(same_input)),
    Case("checkpoint with a parameter", stage(with_parameter, pos=parameter(TOKENS, WIDTH)), modes=EVERY_MODE),
    Case("checkpoint with dropout", stage(dropped)),
    Case("checkpoint with a hook", stage(hooked)),
    Case("checkpoint with changes in place", stage(in_place), modes=EVERY_MODE),
    Case(
        "checkpoint under autocast",
        lambda index: stage(under_autocast)(index).float(),
        batch=rows_in(torch.float32),
        tolerance=0.05,
    ),
    Case("checkpoint of a changing number", stage(counted), modes=EVERY_MODE),
    Case(
        "checkpoint of a sequence",
        stage(lambda s, x: checkpoint_sequential([s.a, nn.Tanh(), s.b], 2, x, use_reentrant=False)),
    ),
    Case("checkpoint wrapper", stage(lambda s, x: s.b(s.c(s.a(x))), c=wrapped()), modes=EVERY_MODE),
    Case(
        "checkpoint that moves to the CPU",
        stage(lambda s, x: s.b(s.c(s.a(x))), c=lambda: offload_wrapper(two_layers())),
    ),
    Case(
        "reentrant checkpoint",
        stage(lambda s, x: checkpoint(block(s), s.c(x), use_reentrant=True), c=linear()),
        modes=ONLY_EAGER,
        shapes="given",
    ),
    Case("reentrant checkpoint with dropout", stage(dropped_reentrant, c=linear()), modes=ONLY_EAGER, shapes="given"),
    Case(
        "reentrant checkpoint, shapes inferred",
        stage(lambda s, x: checkpoint(block(s), s.c(x), use_reentrant=True), c=linear()),
        modes=ONLY_EAGER,
        shapes="inferred",
        refused="reentrant|use_reentrant|autograd.grad",
    ),
    *(
        Case(f"checkpoint of {name} in the layer's own forward", stage(with_own_checkpoint(product), w=square))
        for name, product in {
            "F.linear": F.linear,
            "two F.linear": lambda x, w: F.linear(torch.tanh(F.linear(x, w)), w),
            "a weight to the left": lambda x, w: w @ x,
            "addmm": lambda x, w: torch.addmm(x[0], x, w),
        }.items()
    ),
    Case(
        "checkpoint of a block that multiplies with its child's weight, in a stage with a parameter",
        stage(lambda s, x: again(s.c, x * s.scale), c=OfItsChild, scale=parameter(TOKENS, WIDTH)),
        no_gradient=("a.weight", "a.bias", "b.weight", "b.bias"),
    ),
    Case(
        "checkpoint of a compiled block",
        stage(lambda s, x: again(s.c, s.a(x)), c=compiled_block),
        modes=ONLY_EAGER,
        no_gradient=("b.weight", "b.bias"),
    ),
    Case(
        "checkpoint of a compiled block, selective",
        stage(
            lambda s, x: again(
                s.c, s.a(x), context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])
            ),
            c=compiled_block,
        ),
        modes=ONLY_EAGER,
        no_gradient=("b.weight", "b.bias"),
    ),
)
