"""Activation checkpointing within a stage. Checkpoints of products, of layers and with hooks are generated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zoo.case import ONLY_EAGER, TOKENS, WIDTH, Case, linear, parameter, stage
from zoo.precision import in_float32

again = partial(checkpoint, use_reentrant=False)


def block(s: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: s.b(torch.tanh(s.a(x)))


def nested(s: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.tanh(again(s.a, x))

    return again(lambda x: s.b(again(inner, x)), x)


class OfItsChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.child.weight, self.child.bias * 2)


def dropped(s: Any, x: Tensor, use_reentrant: bool = False) -> Tensor:
    return checkpoint(lambda x: s.b(F.dropout(s.a(x), 0.3)), x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]


def under_autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return again(block(s), x).to(x.dtype)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def compiled_block() -> nn.Module:
    module = two_layers()
    module.compile(backend="aot_eager")
    return module


CASES = (
    Case("nested checkpoints", stage(nested)),
    Case("checkpoint with dropout", stage(dropped)),
    in_float32("checkpoint under autocast", under_autocast),
    Case(
        "checkpoint that moves to the CPU",
        stage(lambda s, x: s.b(s.c(s.a(x))), c=lambda: offload_wrapper(two_layers())),
    ),
    *(
        Case(
            f"reentrant checkpoint, shapes {shapes}",
            stage(
                lambda s, x: checkpoint(lambda x: s.b(F.dropout(s.a(x), 0.3)), s.c(x), use_reentrant=True), c=linear()
            ),
            ONLY_EAGER,
            shapes=shapes,  # type: ignore[arg-type]
            refused=refused,
            most_ranks=1 if refused else 4,
        )
        for shapes, refused in (("given", None), ("inferred", "reentrant|use_reentrant|autograd.grad"))
    ),
    Case(
        "checkpoint of a block that multiplies with its child's weight, in a stage with a parameter",
        stage(lambda s, x: again(s.c, x * s.scale), c=OfItsChild, scale=parameter(TOKENS, WIDTH)),
        no_gradient=("a.weight", "a.bias", "b.weight", "b.bias"),
    ),
    *(
        Case(
            f"checkpoint of a compiled block{words}",
            stage(lambda s, x, options=options: again(s.c, s.a(x), **options), c=compiled_block),  # type: ignore[misc]
            ONLY_EAGER,
            no_gradient=("b.weight", "b.bias"),
        )
        for words, options in {
            "": {},
            ", selective": {"context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])},
        }.items()
    ),
)
