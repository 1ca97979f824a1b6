"""TorchTitan's dry run in one process, `--comm.mode fake_backend`, with a pipeline.

torch infers the shapes of messages from other stages' messages, which a fake process group never delivers. So shapes
come from the job's config. Imports no torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from zbpipe.frameworks.titan import batches
from zbpipe.runtime._torch.pipelining import StageOfKnownShapes


def is_running() -> bool:
    """Whether all other ranks of this job are fake."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def make_stages(job: Any, dtype: torch.dtype) -> Callable[..., PipelineStage]:
    """A replacement of `PipelineStage` for a job's `parallelism`, `training` and `model_config`. Its stages pass plain
    hidden states in this `dtype`. Hidden states from other ranks are zero."""
    parallelism = job.parallelism
    backend = getattr(parallelism, "spmd_backend", "spmd_types")
    if backend == "full_dtensor" or (backend != "spmd_types" and parallelism.tensor_parallel_degree > 1):
        raise ValueError(
            f"spmd_backend={backend} passes DTensors from stage to stage, which a dry run cannot make up: set"
            " --parallelism.spmd_backend spmd_types, or --parallelism.pipeline_parallel_degree 1"
        )
    *sequences, length = batches.shape(job)
    length //= parallelism.context_parallel_degree
    shards = parallelism.tensor_parallel_degree if getattr(parallelism, "enable_sequence_parallel", True) else 1

    ids = torch.empty(*sequences, length, dtype=torch.long, device="meta")
    size = (*sequences, length // shards, job.model_config.dim)
    hidden = torch.empty(size, dtype=dtype, device="meta", requires_grad=True)

    def make(module: nn.Module, index: int, number: int, device: torch.device, **more: Any) -> PipelineStage:
        # Nobody receives the output of the last stage, so its shape is never used.
        return StageOfKnownShapes(
            module, index, number, device, input_args=hidden if index else ids, output_args=hidden, **more
        )

    return make
