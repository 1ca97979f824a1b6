"""What the plugs for all versions of TorchTitan share: how zbpipe's schedules are placed, built and watched.

TorchTitan looks up schedules in a table inside of torch, places stages by comparing classes, and finds the rank with
the loss by the string "ZBVZeroBubble". The plug for a version replaces these three. Imports no torchtitan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.registry import Algorithm
from zbpipe.runtime import _torch, agreement, checks, job
from zbpipe.runtime.build import require_splittable
from zbpipe.runtime.options import Options
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.titan import monitor
from zbpipe.titan.check import NAMES_FOR_TITANS_CSV, look_up
from zbpipe.transformer import Checkpointing

PipeliningFunction = Callable[..., tuple[_torch.PipelineSchedule, list[Any], bool, bool]]
"""Cuts a model. Returns the schedule, the model parts, and whether this rank has the first stage, and the last."""

logger = logging.getLogger(__name__)


def known(schedule: str) -> Algorithm | None:
    """The schedule of that name; None for the names that TorchTitan uses with its own CSV field."""
    return None if schedule in NAMES_FOR_TITANS_CSV else look_up(schedule)


def num_stages(algorithm: Algorithm, parallelism: Any, num_layers: int) -> int:
    """The number of stages into which a model with `num_layers` is cut.

    Raises:
        ValueError: TorchTitan's `pipeline_parallel_layers_per_stage` gives another number.
    """
    placement = algorithm.place(parallelism.pipeline_parallel_degree)
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    # TorchTitan counts embedding and head as so many further layers.
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    cut = None if per_stage is None else math.ceil((num_layers + first + last) / per_stage)
    checks.require_cut(algorithm.name, placement, num_layers, cut, f"pipeline_parallel_layers_per_stage={per_stage}")
    return placement.num_stages


def stages_on(algorithm: Algorithm, pp_rank: int, pp_degree: int, num_parts: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, when the model is cut into `num_parts`.

    Raises:
        ValueError: the schedule has another number of stages.
    """
    placement = algorithm.place(pp_degree)
    checks.require_parts(algorithm.name, placement, num_parts)
    return placement.stages_on(pp_rank)


def build(
    algorithm: Algorithm,
    stages: list[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Tensor],
    options: Options,
    checkpointing: Checkpointing,
    **more: Any,
) -> _torch.PipelineSchedule:
    """The schedule on this rank's stages. It does not scale gradients, because TorchTitan does.

    TorchTitan compares the ranks' schedules before a first step could: so the config says the checkpointing, not what
    each rank sees in its own modules.
    """
    if algorithm.by_checkpointing:
        more["checkpointing"] = checkpointing
    logger.info(
        "Using %s's pipeline schedule %s with %d microbatches", algorithm.source, algorithm.name, n_microbatches
    )
    if n_microbatches < stages[0].num_stages:
        logger.warning(
            "%d microbatches are fewer than the %d stages, so the pipeline never fills: raise"
            " training.local_batch_size, or lower parallelism.pipeline_parallel_microbatch_size",
            n_microbatches,
            stages[0].num_stages,
        )
    built = job.build(algorithm, stages, n_microbatches, loss_fn, options, scale_grads=False, **more)
    if algorithm.by_checkpointing:
        logger.info("%s is made for %s activation checkpointing", algorithm.name, checkpointing)
    if isinstance(built, RegisteredSchedule):
        built.sizes.keywords_are_alike = True  # TorchTitan gives the positions of all tokens to all ranks
        logger.info("Messages: %s receives, for the transport %r", built.receives, str(built.transport))
    return built


def complete(
    schedule: _torch.PipelineSchedule,
    name: str,
    options: Options,
    device: torch.device,
    processor: type,
    rank_with_loss: Callable[[Any, str], int],
    *,
    asks_ahead: bool,
) -> None:
    """Compare the schedules of all ranks, and attach what `options` and TorchTitan's metrics ask for.

    Args:
        schedule: of this rank.
        name: the value of TorchTitan's schedule field.
        options: zbpipe's.
        device: of the tensors that the job's backend sends.
        processor: TorchTitan's `MetricsProcessor`.
        rank_with_loss: by TorchTitan's `ParallelDims` and the name, the rank that reports.
        asks_ahead: whether TorchTitan calls `should_log` before a step runs, not after it.

    Raises:
        PipelineError: on all ranks of the job, if their schedules differ.
    """
    algorithm = known(name)
    if algorithm is None or algorithm.source == "torch":
        require_splittable(schedule, name)
    # Also with torch's schedules: a rank with ZBV would wait for messages of a rank with torch's 1F1B.
    agreement.require_same(schedule, name, None, device)
    job.attach(schedule, options)
    pipeline = monitor.PipelineMetrics(schedule, armed=not asks_ahead)
    monitor.report(pipeline, processor, lambda dims: rank_with_loss(dims, name), 0 if asks_ahead else 1)


def first_rank_of_last_stage(algorithm: Algorithm, parallel_dims: Any) -> int:
    """The first of all ranks with the last stage, by TorchTitan's `ParallelDims`."""
    # The pipeline is the outermost dimension of TorchTitan's mesh.
    ranks_per_stage = parallel_dims.world_size // parallel_dims.pp
    return int(ranks_per_stage * algorithm.place(parallel_dims.pp).rank_of[-1])
