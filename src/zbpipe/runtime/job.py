"""A schedule as a job asks for it: by name, with the options that stand beside the job's own config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe import costs_file
from zbpipe.costs_file import JobCosts
from zbpipe.registry import Traits
from zbpipe.runtime import _torch
from zbpipe.runtime.auto import AutoSchedule
from zbpipe.runtime.build import build_pipeline_schedule
from zbpipe.runtime.gradient_check import GradientCheck
from zbpipe.runtime.options import Options
from zbpipe.runtime.profiler import Profiler
from zbpipe.runtime.trace import trace
from zbpipe.views import report

logger = logging.getLogger(__name__)


def build(
    traits: Traits,
    stages: PipelineStage | Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Tensor] | None,
    options: Options,
    **more: Any,
) -> _torch.PipelineSchedule:
    """The schedule with what `options` say of it; the job's own arguments, `more`, go before them.

    Raises:
        ValueError: see `zbpipe.build_pipeline_schedule`.
    """
    own = {} if traits.source == "torch" else options.for_zbpipe()
    if traits.name == AutoSchedule.schedule_name:
        own |= options.for_auto()
        own["measured"] = lambda costs: write_costs(costs, options.costs_out)
    return build_pipeline_schedule(
        traits.name, stages, n_microbatches, loss_fn, **options.for_torch.given() | own | more
    )


def attach(schedule: _torch.PipelineSchedule, options: Options) -> None:
    """Measure and check what `options` ask for; `AutoSchedule` profiles by itself."""
    if options.check_gradients:
        GradientCheck(schedule, options.check_gradients)
    if options.profile_steps and not isinstance(schedule, AutoSchedule):
        Profiler(schedule, options.profile_steps, done=lambda costs: write_costs(costs, options.costs_out))
    if options.trace:
        trace(schedule, options.trace, options.trace_step, done=logger.info)


def write_costs(costs: JobCosts, file: str | None) -> None:
    """Show what was measured in the log of the first rank, and write it as a cost file if there is to be one.

    A file that cannot be written is a warning, for the job has nothing to do with it.
    """
    if dist.get_rank() != 0:
        return
    logger.info("measured costs:\n%s", report.costs(costs))
    if not file:
        return
    try:
        costs_file.dump(costs, file)
    except OSError as error:
        logger.warning("they cannot be written: %s", error)
    else:
        logger.info("wrote them to %s; `zbpipe plan --costs-file` takes it", file)
