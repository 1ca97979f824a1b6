"""Compilation of the stages on all ranks at the same time, before the first message.

Otherwise each stage compiles when the previous stage's first output arrives. The compile times of all stages add up,
and a deep pipeline exceeds the process group's timeout. So each rank first runs one forward and one backward of each
compiled stage, on zeros in torch's inferred shapes. Gradients, buffers, attributes and random states are restored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zbpipe.runtime._torch import autograd, compiler, fsdp2, pipelining
from zbpipe.runtime.module_state import ModuleState

logger = logging.getLogger(__name__)


def warm_up(
    schedule: pipelining.ScheduleRuntime,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    target: Any = None,
    loss_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Run the forward and backward of every stage of this rank that has compiled modules."""
    # It sends nothing along the pipeline. Ranks that share a stage (FSDP, TP, experts) run it alike. Stages with
    # unknown inputs are omitted, as is the last stage if torch (before 2.13) has no target yet. The arguments are the
    # first microbatch's, as torch passes them to the stage and to the loss.
    for stage in pipelining.stages_of(schedule):
        if not any(map(compiler.is_compiled, stage.submod.modules())):
            continue
        inputs = autograd.copy_leaves(args) if stage.is_first else pipelining.zeros_for(stage)
        if inputs is None or (stage.is_last and target is None):
            continue
        state = ModuleState(stage.submod, pipelining.device_of(stage), weights=False)
        try:
            with fsdp2.unshard(stage.submod), fsdp2.without_gradients(stage.submod):
                _run(schedule, stage, inputs, autograd.copy_leaves(kwargs or {}), target, loss_kwargs)
        finally:
            with torch.no_grad():
                state.restore()
        logger.info("Stage %d is compiled", stage.stage_index)


def _run(
    schedule: pipelining.ScheduleRuntime,
    stage: pipelining.Stage,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss_kwargs: Mapping[str, Any] | None,
) -> None:
    with torch.enable_grad():
        outputs = pipelining.run_forward(stage, 0, inputs, kwargs)
        gradients = None
        if stage.is_last:
            outputs = pipelining.loss_of(schedule, outputs, target, loss_kwargs)
        else:
            leaves = autograd.tree_leaves(outputs)
            gradients = tuple(torch.zeros_like(each) if each.requires_grad else None for each in leaves)
        tensors = [each for each in autograd.tree_leaves((inputs, kwargs)) if isinstance(each, Tensor)]
        pipelining.run_backward(stage, outputs, gradients, tensors)
