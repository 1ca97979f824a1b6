"""`zbpipe measure`: the stages of a TorchTitan job, one after the other on this machine's one device.

Each stage is built as the job would build it (checkpointing, compiler, mixed precision). It trains a few steps as a
pipeline of one rank and one stage, and is freed. Its input and the gradient of its output are synthetic. So the times
exclude contention with neighbours on the same machine, and no links are measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs.job import JobCosts
from zbpipe.costs.layers import Split
from zbpipe.estimation.workload import Degrees
from zbpipe.frameworks.titan import cpu
from zbpipe.frameworks.titan.workload import parse, read_config
from zbpipe.runtime.build import build_pipeline_schedule
from zbpipe.runtime.measure.profiler import RankTable, average_by_kind, combine, find_overhead
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.schedule.registry import resolve

if TYPE_CHECKING:  # what imports torchtitan comes later: it chooses its device at import
    from zbpipe.frameworks.titan.models import StageUnderTest

logger = logging.getLogger(__name__)

_MICROBATCHES = 4
"""Microbatches per step."""
_WARM_UP = 2
_SCHEDULES = ("ZBH1", "1F1B")
"""Schedules with I and W apart, and with I and W together."""


def measure(arguments: Sequence[str], steps: int = 3) -> JobCosts:
    """Costs of all stages of a job's schedule, measured here without any other rank.

    Args:
        arguments: TorchTitan's arguments. Tensor parallelism and data parallelism are ignored.
        steps: number of steps to time, per stage and schedule.

    Raises:
        ImportError: TorchTitan is not installed, or it is 0.2.
        ValueError: TorchTitan or zbpipe refuses the job.
    """
    found = parse(arguments)
    from zbpipe.frameworks.titan import models, plug  # imported here, because TorchTitan chooses its device at import

    if plug.HAS_JOB_CONFIG:
        raise ImportError("zbpipe builds single stages with torchtitan 0.3, and this is 0.2")
    ranks = found.parallelism.pipeline_parallel_degree
    algorithm = resolve(found.parallelism.pipeline_parallel_schedule)
    placement = algorithm.place(ranks)
    if cpu.is_needed():
        plug.adapt_to_cpu(found)
    workload = read_config(found, Degrees(ranks), "")
    split = workload.split(placement, algorithm)
    if encoders := workload.layers[0].modules[1:]:
        logger.warning("%s get no images here: add their costs to stage 0", ", ".join(encoders))
    names = [[name for layer in stage for name in workload.layers[layer].modules] for stage in split]
    with _process_group() as device:
        tables = [_table(models.stage_under_test(found, each, device), n, split, steps) for n, each in enumerate(names)]
    return combine(tables, placement)


@contextmanager
def _process_group() -> Iterator[torch.device]:
    """A process group with this process alone, and its device."""
    device = torch.device("cpu") if cpu.is_needed() else torch.accelerator.current_accelerator()
    assert device is not None, "there is one, or the CPU is needed"
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _table(built: StageUnderTest, stage: int, split: Split, steps: int) -> RankTable:
    """Costs of one stage."""
    is_first, is_last = stage == 0, stage == len(split) - 1
    logger.info("measuring stage %d of %d", stage, len(split))
    records = [_records(built, name, is_first, is_last, steps) for name in _SCHEDULES]
    timed = [record for each in records for record in each[1:]]
    memory = [each[0] for each in records]

    def add_stage(values: Mapping[Any, int]) -> dict[tuple[int, str], int]:
        return {(stage, str(op.kind)): size for op, size in values.items()}

    width, dtype = built.hidden
    # The mean, because the time of a step with many ops includes the slow ones.
    seconds = average_by_kind(timed, fmean)
    return RankTable(
        seconds={(stage, kind): each for (_, kind), each in seconds.items()},
        kept={key: size for each in reversed(memory) for key, size in add_stage(each.kept).items()},
        most={key: size for each in reversed(memory) for key, size in add_stage(each.most).items()},
        links={},
        message_bytes=0 if is_last else prod(built.tokens) * width * dtype.itemsize,
        overhead=find_overhead(timed, num_stages=1),
    )


def _records(built: StageUnderTest, name: str, is_first: bool, is_last: bool, steps: int) -> list[StepRecord]:
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


def _input(built: StageUnderTest, is_first: bool) -> Tensor:
    if is_first:
        return _tokens(built)
    width, dtype = built.hidden
    return torch.randn(*built.tokens, width, dtype=dtype, device=built.device, requires_grad=True)


def _tokens(built: StageUnderTest) -> Tensor:
    return torch.randint(built.vocabulary, built.tokens, device=built.device)


class _Given(torch.autograd.Function):
    """A loss without cost, whose gradient stands in for the next stage's."""

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
