"""Cuts models, as TorchTitan's main branch names and calls it."""

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    _PipelineSchedule,
    get_schedule_class,
)

from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims

logger = logging.getLogger(__name__)


def pipeline_llm(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    parallelism: ParallelismConfig,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., Any],
    **unused: Any,
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    names = parallelism.module_fqns_per_model_part or _cut(parallelism, model_config)
    mesh = parallel_dims.get_mesh("pp")
    stages, parts = _pipeline_module_split(model, mesh, parallelism.pipeline_parallel_schedule, device, names)
    for stage, part in zip(stages, parts, strict=True):
        stage.submod = parallelize_fn(part)
    schedule = _build_pipeline_schedule(
        parallelism=parallelism, num_microbatches=parallelism.num_pp_microbatches, stages=stages, loss_fn=loss_fn
    )
    return schedule, parts, any(each.is_first for each in stages), any(each.is_last for each in stages)


def pipeline_vlm(
    model: nn.Module, *, parallelism: ParallelismConfig, model_config: Any, **kwargs: Any
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    names = _cut(parallelism, model_config)
    names[0].insert(0, "vision_encoder")
    parallelism = replace(parallelism, module_fqns_per_model_part=names)
    return pipeline_llm(model, parallelism=parallelism, model_config=model_config, **kwargs)


def _cut(parallelism: ParallelismConfig, model_config: Any) -> list[list[str]]:
    is_single = issubclass(get_schedule_class(parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    stages = parallelism.pipeline_parallel_degree * (1 if is_single else 2)
    return _generate_llm_fqn_per_model_part(stages, len(model_config.layers), 1, 1)


def _build_pipeline_schedule(
    *,
    parallelism: ParallelismConfig,
    num_microbatches: int,
    stages: list[PipelineStage],
    loss_fn: Callable[..., Any],
    backward_requires_autograd: bool = True,
) -> _PipelineSchedule:
    found: Any = get_schedule_class(parallelism.pipeline_parallel_schedule)
    is_multi = issubclass(found, PipelineScheduleMulti)
    more = {"backward_requires_autograd": backward_requires_autograd} if is_multi else {}
    given = stages if is_multi else stages[0]
    return found(given, n_microbatches=num_microbatches, loss_fn=loss_fn, scale_grads=False, **more)


def _generate_llm_fqn_per_model_part(
    num_stages: int, num_layers: int, input_weight: int = 1, output_weight: int = 1
) -> list[list[str]]:
    names = ["tok_embeddings", *(f"layers.{number}" for number in range(num_layers)), "norm", "lm_head"]
    ends = [len(names) * stage // num_stages for stage in range(num_stages + 1)]
    return [names[first:last] for first, last in pairwise(ends)]


def _pipeline_module_split(
    whole_model: nn.Module,
    pp_mesh: DeviceMesh,
    pp_schedule: str,
    device: torch.device,
    module_names_per_stage: list[list[str]],
    get_mesh: Callable[..., Any] | None = None,
) -> tuple[list[PipelineStage], list[nn.Module]]:
    rank, ranks, count = pp_mesh.get_local_rank(), pp_mesh.size(), len(module_names_per_stage)
    is_v = get_schedule_class(pp_schedule) == ScheduleZBVZeroBubble
    indices = [rank, count - 1 - rank] if is_v else list(range(rank, count, ranks))
    parts = [_keep(deepcopy(whole_model), module_names_per_stage[index]) for index in indices]
    stages = [
        PipelineStage(part, index, count, device, group=pp_mesh.get_group("pp"))
        for index, part in zip(indices, parts, strict=True)
    ]
    return stages, parts


def _keep(model: nn.Module, names: list[str]) -> nn.Module:
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleDict):
            for block in [each for each in child if f"{name}.{each}" not in names]:
                del child[block]
        elif name not in names:
            setattr(model, name, None)
    return model
