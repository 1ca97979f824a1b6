"""Activation checkpointing: wrappers of a model, and checkpoints that run their own backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.pipelining.stage import _PipelineStageBase

from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.autograd import find_nodes, sort_nodes
from zbpipe.runtime._torch.fsdp2 import without_gradients


def find_checkpointed(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Modules under `checkpoint_wrapper`, at any depth, each with whether a policy (`context_fn`) keeps activations."""
    wrappers = [each for each in module.modules() if isinstance(each, CheckpointWrapper)]
    return [
        (each._checkpoint_wrapped_module, "context_fn" in getattr(each.checkpoint_fn, "keywords", {}))
        for each in wrappers
    ]


def infer_through_checkpoints(stage: _PipelineStageBase) -> AbstractContextManager[None]:
    """Context in which torch can infer outputs of a `stage` with `use_reentrant=True` checkpoints."""
    # torch (from 2.13 on) infers by `torch.autograd.grad`, which these checkpoints refuse.
    infer = getattr(stage, "_compute_input_grads", None)
    if infer is None:
        return nullcontext()
    return replaced(stage, _compute_input_grads=partial(_infer_input_gradients, stage.submod, infer))


def _infer_input_gradients(
    module: nn.Module,
    infer: Callable[..., tuple[Tensor | None, ...]],
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    *output_gradients: Any,
) -> tuple[Tensor | None, ...]:
    if all(node.name() != "CheckpointFunctionBackward" for node in sort_nodes(find_nodes(outputs))):
        return infer(outputs, inputs, *output_gradients)
    with without_gradients(module):
        torch.autograd.backward(outputs, *output_gradients)
    tensors = [each if isinstance(each, Tensor) and each.is_leaf else None for each in inputs]
    return tuple(None if each is None else each.grad for each in tensors)
