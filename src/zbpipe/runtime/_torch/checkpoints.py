"""Activation checkpointing that a model was wrapped with."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

__all__ = ["checkpointed_parts"]


def checkpointed_parts(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """What `checkpoint_wrapper` has wrapped, at any depth, and whether a policy (`context_fn`) keeps some of it."""
    wrappers = [each for each in module.modules() if isinstance(each, CheckpointWrapper)]
    return [
        (each._checkpoint_wrapped_module, "context_fn" in getattr(each.checkpoint_fn, "keywords", {}))
        for each in wrappers
    ]
