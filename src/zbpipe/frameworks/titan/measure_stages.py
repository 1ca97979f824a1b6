"""`zbpipe measure`: the stages of a TorchTitan job, one after the other on this machine's one device.

Each stage is built as in the job (checkpointing, compiler, mixed precision). It trains a few steps as a pipeline of one
rank and one stage, on synthetic inputs and gradients. So the times exclude contention with neighbours on the same
machine. No links are measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as titan_utils

from zbpipe.costs.job import JobCosts, MemoryLimit, MemoryLimitLike
from zbpipe.costs.layers import Split
from zbpipe.estimation.cut import WorkloadCut
from zbpipe.estimation.estimate import choose_own
from zbpipe.frameworks.titan import batches, cpu, models
from zbpipe.frameworks.titan.command_line import shared_degrees
from zbpipe.frameworks.titan.models import workload_of
from zbpipe.runtime.build import build_pipeline_schedule
from zbpipe.runtime.measure.profiler import RankTable, average_by_kind, combine, find_overhead
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect

logger = logging.getLogger(__name__)

_MICROBATCHES = 4
_WARM_UP = 2
_SCHEDULES = ("ZBH1", "1F1B")
"""Schedules with I and W apart, and with I and W together."""


def measure_stages(config: Any, steps: int, memory_limit: MemoryLimitLike | None) -> JobCosts:
    """Costs of all stages of a job's schedule, measured on this device only.

    Tensor parallelism and data parallelism are ignored. `steps` are timed per stage and schedule. By the `memory_limit`
    ZB chooses its stages.

    Raises:
        ImportError: TorchTitan is version 0.2.
        ValueError: TorchTitan or zbpipe refuses the job.
    """
    if models.HAS_JOB_CONFIG:
        raise ImportError("zbpipe builds single stages with torchtitan 0.3, and this is 0.2")
    if cpu.is_needed():
        cpu.adapt(config)
    limit = MemoryLimit.parse(memory_limit)
    workload = replace(workload_of(config, shared_degrees(config.parallelism), ""), memory_limit=limit)
    cut = WorkloadCut(workload)
    algorithm, placement = choose_own(workload, cut, on_cpu=cpu.is_needed())
    split = cut.split(placement, algorithm)
    if encoders := workload.layers[0].modules[1:]:
        logger.warning("%s get no images here: add their costs to stage 0", ", ".join(encoders))
    names = [[name for layer in stage for name in workload.layers[layer].modules] for stage in split]
    with _process_group() as device:
        tables = [_table(_build(config, each, device), n, split, steps) for n, each in enumerate(names)]
    return combine(tables, placement)


@contextmanager
def _process_group() -> Iterator[torch.device]:
    device = torch.device("cpu") if cpu.is_needed() else torch.accelerator.current_accelerator()
    assert device is not None, "there is one, or the CPU is needed"
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _table(built: _Stage, stage: int, split: Split, steps: int) -> RankTable:
    is_first, is_last = stage == 0, stage == len(split) - 1
    logger.info("measuring stage %d of %d", stage, len(split))
    records = [_records(built, name, is_first, is_last, steps) for name in _SCHEDULES]
    timed = [record for each in records for record in each[1:]]
    memory = [each[0] for each in records]

    def add_stage(values: Mapping[Any, int]) -> dict[tuple[int, str], int]:
        return {(stage, str(op.kind)): size for op, size in values.items()}

    width, dtype = built.hidden
    # The mean includes an op's slow runs, as a step with many ops does.
    seconds = average_by_kind(timed, fmean)
    return RankTable(
        seconds={(stage, kind): each for (_, kind), each in seconds.items()},
        kept={key: size for each in reversed(memory) for key, size in add_stage(each.kept).items()},
        most={key: size for each in reversed(memory) for key, size in add_stage(each.most).items()},
        links={},
        message_bytes=0 if is_last else prod(built.tokens) * width * dtype.itemsize,
        overhead=find_overhead(timed, num_stages=1),
    )


def _records(built: _Stage, name: str, is_first: bool, is_last: bool, steps: int) -> list[StepRecord]:
    """The record of one step for memory, and of several for times."""
    made: list[StepRecord] = []
    schedule = build_pipeline_schedule(
        name,
        PipelineStage(built.module, 0, 1, built.device),
        _MICROBATCHES,
        built.loss if is_last else _make_gradient,
        scale_grads=False,
    )
    wanted = [*[Wanted.NOTHING] * _WARM_UP, Wanted.MEMORY, *[Wanted.TIMES] * steps]
    collect(schedule, wanted, made.extend)
    for _ in wanted:
        schedule.step(
            arg_mbs=[(_input(built, is_first),) for _ in range(_MICROBATCHES)],
            kwarg_mbs=[dict(built.keywords) for _ in range(_MICROBATCHES)],
            target_mbs=[_tokens(built) for _ in range(_MICROBATCHES)],
            return_outputs=False,  # as in TorchTitan: logits would stay
        )
    return made


def _input(built: _Stage, is_first: bool) -> Tensor:
    if is_first:
        return _tokens(built)
    width, dtype = built.hidden
    return torch.randn(*built.tokens, width, dtype=dtype, device=built.device, requires_grad=True)


def _tokens(built: _Stage) -> Tensor:
    return torch.randint(built.vocabulary, built.tokens, device=built.device)


class _Given(torch.autograd.Function):
    """A loss without cost. Its gradient replaces the next stage's."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(ctx.like, 1e-3)


def _make_gradient(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = _Given.apply(output)
    return loss


class _Stage(NamedTuple):
    module: nn.Module
    device: torch.device
    tokens: tuple[int, ...]
    """The shape of a microbatch's token ids."""
    vocabulary: int
    hidden: tuple[int, torch.dtype]
    """Width and dtype of the stages' outputs."""
    keywords: Mapping[str, Any]
    loss: Callable[[Tensor, Tensor], Tensor]
    """The model's loss, on its last stage."""


def _build(config: Any, names: list[str], device: torch.device) -> _Stage:
    """One stage with these modules, as the `Trainer` of a `Trainer.Config` builds it for one GPU."""
    from torchtitan.components.loss import ChunkedLossWrapper

    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=1,
        tensor_parallel_degree=1,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=1,
        fsdp_reshard_after_forward="never",  # as in a pipeline
    )
    dims, training = ParallelDims.from_config(parallelism, 1), config.training
    dims.build_mesh()
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = config.model_spec.model.build()
    _prune(model, names)
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss = config.loss.build(compile_config=config.compile)
    if isinstance(loss, ChunkedLossWrapper) and model.lm_head is not None:
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    sizes = batches.shape(config)
    tokens = torch.tensor(float(prod(sizes)), device=device)
    return _Stage(
        model,
        device,
        sizes,
        config.model_spec.model.vocab_size,
        (config.model_spec.model.dim, TORCH_DTYPE_MAP[training.mixed_precision_param]),
        _keywords(model, sizes, batches.length(training), device),
        lambda output, target: loss(output, target, tokens)[0],
    )


def _prune(model: Any, names: list[str]) -> None:
    """Keep only these modules, as in TorchTitan's cut of a model."""
    for name, child in list(model.named_children()):
        if isinstance(child, torch.nn.ModuleDict):
            for block in [each for each in child if f"{name}.{each}" not in names]:
                del child[block]
        elif name not in names:
            setattr(model, name, None)


def _keywords(model: Any, sizes: tuple[int, ...], length: int, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model: positions, and a mask if the attention needs one."""
    positions = torch.arange(prod(sizes), device=device).remainder(length).reshape(sizes)
    try:
        masks = model.get_attention_masks(positions)
    except TypeError:
        masks = None
    return {"positions": positions, "attention_masks": masks}
