"""A framework on torch's pipelining that knows no schedule but torch's; as a script it trains one step."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from models import build_stage, loss_fn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

MICROBATCHES = 4


def build(name: str, stages_per_rank: int | None = None, **given: Any) -> tuple[Any, list[PipelineStage]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule_class = get_schedule_class(name)
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    per_rank = stages_per_rank or (1 if is_single else 2)
    style = "v" if schedule_class in (ScheduleZBVZeroBubble, ScheduleDualPipeV) else "loop"
    indices = (rank, 2 * size - 1 - rank) if style == "v" else tuple(range(rank, per_rank * size, size))
    parts = [build_stage(index, per_rank * size) for index in indices]
    stages = [
        PipelineStage(part, index, per_rank * size, torch.device("cpu"))
        for part, index in zip(parts, indices, strict=True)
    ]
    schedule = schedule_class(
        stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
        n_microbatches=MICROBATCHES,
        loss_fn=loss_fn,
        scale_grads=given.pop("scale_grads", False),
        **given,
    )
    return schedule, stages


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, 16, (MICROBATCHES, 4), generator=generator) for _ in range(2))  # type: ignore[return-value]


def train(name: str, **given: Any) -> tuple[str, tuple[int, ...], dict[str, torch.Tensor], list[float]]:
    schedule, stages = build(name, **given)
    tokens, targets = batch()
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
    losses: list[torch.Tensor] = []
    schedule.step(*([tokens] if first else []), target=targets if last else None, losses=losses)
    gradients = {
        f"{stage.stage_index}.{name}": parameter.grad
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
        if parameter.grad is not None
    }
    indices = tuple(stage.stage_index for stage in stages)
    return type(schedule).__name__, indices, gradients, [loss.item() for loss in losses]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    # In one write: the ranks share the output.
    sys.stdout.write(f"{dist.get_rank()} {train(sys.argv[1])[:2]} {sys.argv[2:]} {__name__}\n")
    dist.destroy_process_group()
