"""`check_gradients`: check of the split for a model without a job, in this process only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zbpipe.runtime import checks
from zbpipe.runtime._torch import autograd, checkpoints, fsdp2
from zbpipe.runtime.build import build_pipeline_schedule
from zbpipe.runtime.module_state import ModuleState
from zbpipe.runtime.split.deferring_layers import deferrals
from zbpipe.runtime.verify.gradient_check import GradientCheck
from zbpipe.runtime.verify.gradient_report import GradientReport
from zbpipe.schedule.ir import Op, OpKind, Schedule, require_whole

_STEPS = 2
"""Number of steps. In the first one, the first microbatch leaves nothing to W."""
_NO_GRADIENT = (
    "no parameter gets a gradient, so there is nothing to check: all are frozen, or behind a reentrant checkpoint whose"
    " inputs need no gradient. For such a checkpoint call batch.requires_grad_(), or set use_reentrant to False"
)


def check_gradients(
    parts: nn.Module | PipelineStage | Sequence[nn.Module | PipelineStage],
    batch: Tensor | tuple[Any, ...],
    target: Tensor | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    microbatches: int = 2,
    tolerance: float | None = None,
) -> GradientReport:
    """Check the split's gradients for a model, in this process only: two steps, with the parts as stages.

    >>> import zbpipe
    >>> parts = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)]
    >>> zbpipe.check_gradients(parts, torch.ones(6, 4), torch.zeros(6, 2), torch.nn.functional.mse_loss).passed
    True

    All W run at the end of a step, so that every x and dY is exposed to changes as long as possible. There are two
    steps because the first I leaves nothing to W. `GradientCheck` checks a running job with its own schedule.

    Args:
        parts: the model, or its parts in order, as modules or as stages, on one device. Weights, gradients, buffers and
            random numbers are restored.
        batch: the argument of the first part, or a tuple of its arguments. The first dimension is the samples'.
        target: target for `loss_fn`.
        loss_fn: `(output, target) -> loss`. Default: the mean of the squares of all outputs.
        microbatches: number of equal parts of the batch. From 2 on, one waits while another runs.
        tolerance: as in `GradientCheck`.

    Returns:
        The report, if all gradients pass.

    Raises:
        PipelineError: the gradients differ. The cause (`GradientMismatchError`) has the report.
        ValueError: the batch cannot be cut into equal parts, only one of target and loss function is given, no
            parameter gets a gradient, or this process belongs to a job of several ranks.
    """
    modules = _list_modules(parts)
    (microbatches,) = require_whole(1, microbatches=microbatches)
    checks.require_above_0("tolerance", tolerance)
    args = batch if isinstance(batch, tuple) else (batch,)
    size = next((each.shape[0] for each in args if isinstance(each, Tensor) and each.dim()), 0)
    if not size or size % microbatches:
        raise ValueError(
            f"{size} samples do not make {microbatches} microbatches of equal size: give a tensor, or a tuple with one,"
            f" whose first dimension is a multiple of {microbatches}, or another number of microbatches"
        )
    if loss_fn is not None:
        checks.require_callable(loss_fn=loss_fn)
    if (target is None) != (loss_fn is None):
        raise ValueError("target and loss_fn go together: give both, or none for the mean of the squares of the output")
    if target is None:
        loss_fn, target = _mean_of_squares, torch.zeros(size)
    device = next((each.device for module in modules for each in module.parameters()), torch.device("cpu"))
    with _alone(), _followed_as_before(modules):
        stages = [PipelineStage(module, n, len(modules), device) for n, module in enumerate(modules)]
        schedule = build_pipeline_schedule(schedule_w_last(len(stages), microbatches), stages, microbatches, loss_fn)
        check = GradientCheck(schedule, _STEPS, tolerance=tolerance)
        with ExitStack() as kept:
            for stage in stages:
                kept.callback(ModuleState(stage.submod, device).restore)
                kept.enter_context(fsdp2.without_gradients(stage.submod))
                kept.enter_context(checkpoints.infer_through_checkpoints(stage))
            for _ in range(_STEPS):
                schedule.step(*args, target=target)
    assert check.report is not None, "a step that returns was checked"
    if not check.report.errors and not check.report.not_compared:
        raise ValueError(_NO_GRADIENT)
    return check.report


def _list_modules(parts: nn.Module | PipelineStage | Sequence[nn.Module | PipelineStage]) -> list[nn.Module]:
    kinds = (nn.Module, PipelineStage)
    listed = [parts] if isinstance(parts, kinds) else list(parts) if isinstance(parts, Iterable) else [parts]
    wrong = [each for each in listed if not isinstance(each, kinds)]
    if wrong or not listed:
        raise ValueError(
            "check_gradients takes a model or the parts of one, each an nn.Module or a PipelineStage, got"
            f" {wrong[0] if wrong else listed!r}"
        )
    return [each.submod if isinstance(each, PipelineStage) else each for each in listed]


def schedule_w_last(num_stages: int, microbatches: int, orders: Sequence[str] = ("F", "I", "W")) -> Schedule:
    """A schedule on one rank: all ops of the kinds in the first of `orders`, then those of the next. With all F, all I
    and all W, activations and deferred gradients stay as long as possible."""
    stages = range(num_stages)
    ops = [
        Op(stage, OpKind(kind), microbatch)
        for order, microbatch in product(orders, range(microbatches))
        for stage in (stages[::-1] if "I" in order else stages)
        for kind in order
    ]
    return Schedule.from_rows([ops], "all W last")


def _mean_of_squares(output: Any, target: Tensor) -> Tensor:
    outputs = [each for each in autograd.tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    if not outputs:
        raise ValueError(_NO_GRADIENT)
    return sum((each.abs().square().mean() for each in outputs), torch.zeros((), device=outputs[0].device))


@contextmanager
def _alone() -> Iterator[None]:
    """Context with a process group of one rank, which torch's stages need."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise ValueError(
                f"check_gradients runs in one process, but this one belongs to a job of {dist.get_world_size()} ranks:"
                " call it outside of the job, or check the job's own steps with zbpipe.GradientCheck(schedule)"
            )
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _followed_as_before(modules: list[nn.Module]) -> Iterator[None]:
    """Context after which modules of another schedule defer to that schedule again."""
    followed = {each: each.gradients for module in modules for each in deferrals(module).values()}
    try:
        yield
    finally:
        for deferral, gradients in followed.items():
            deferral.gradients = gradients
