"""This rank's part of a pipeline, as a job builds and runs it, and what all ranks have together."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build_stage, gradients, loss_fn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

import zbpipe
from zbpipe.runtime.verify import GradientReport
from zbpipe.schedule import registry

# Both runs do the same float32 arithmetic but for the order in which the microbatches' weight gradients are added (a
# fused multiply-add into .grad here, product and then sum there). Over 8 microbatches that moves the last bits only.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}

Result = tuple[list[float], dict[str, Tensor]]
"""Losses, and gradients by stage and name."""


class Pipeline:
    """The stages of this rank and their schedule; `build` makes a stage of its index and the number of stages."""

    def __init__(
        self,
        schedule: Any,
        microbatches: int,
        build: Callable[[int, int], nn.Module] = build_stage,
        loss: Any = loss_fn,
        *,
        group: dist.ProcessGroup | None = None,
        make: Callable[..., Any] = zbpipe.build_pipeline_schedule,
        stages_per_rank: int | None = None,
        of_stages: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        table = getattr(schedule, "schedule", schedule)  # of a plan
        placement = registry.resolve(table).place(num_ranks, stages_per_rank)
        self.indices, self.num_stages = placement.stages_on(rank), placement.num_stages
        self.has_first, self.has_last = 0 in self.indices, self.num_stages - 1 in self.indices
        self.modules = {index: build(index, self.num_stages) for index in self.indices}
        self.stages = [
            PipelineStage(module, index, self.num_stages, torch.device("cpu"), group=group, **of_stages)
            for index, module in self.modules.items()
        ]
        self.schedule: Any = make(schedule, self.stages, microbatches, loss, **options)

    def run(self, *inputs: Tensor, target: Any, how: str = "step", **given: Any) -> list[float]:
        losses: list[Tensor] = []
        run = getattr(self.schedule, how)
        run(*(inputs if self.has_first else ()), target=target if self.has_last else None, losses=losses, **given)
        return [loss.item() for loss in losses]

    def parameters(self) -> list[nn.Parameter]:
        return [each for module in self.modules.values() for each in module.parameters()]

    def zero_grad(self) -> None:
        for module in self.modules.values():
            module.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        return gradients(self.modules)


def on_one_rank(
    modules: Sequence[nn.Module], microbatches: int, name: Any = "ZBV", loss: Any = loss_fn, **options: Any
) -> Any:
    stages = [PipelineStage(each, n, len(modules), torch.device("cpu")) for n, each in enumerate(modules)]
    return zbpipe.build_pipeline_schedule(name, stages, microbatches, loss, **options)


@contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """Context of this rank in a group whose other ranks are not there: nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(module: Any, mesh: DeviceMesh | None = None, by: Any = fully_shard, **how: Any) -> Any:
    """`fully_shard` over gloo, which has no reduction that scales; without a mesh on this rank alone."""
    by(module, mesh=mesh or init_device_mesh("cpu", (1,)), **how)
    for each in module if isinstance(module, list) else [module]:
        each.set_force_sum_reduction_for_comms(True)
    return module


def check_steps(module: nn.Module, *size: int, microbatches: int = 2, **shapes: Any) -> GradientReport:
    """Of two checked steps on random batches of this size, on this process."""
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), **shapes)
    schedule: Any = zbpipe.build_pipeline_schedule("ZBH1", stage, microbatches, squared_error)
    check = zbpipe.GradientCheck(schedule, 2)
    for _ in range(2):
        schedule.step(torch.randn(size), target=torch.randn(size))
    assert check.report is not None
    return check.report


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def assert_like(per_rank: Iterable[Result], expected: Result, about: object = "", **tolerance: float) -> None:
    """What the ranks found is, taken together, what the model in one piece gives."""
    losses: list[float] = []
    found: dict[str, Tensor] = {}
    for own_losses, own in per_rank:
        losses += own_losses
        found |= own
    assert losses == pytest.approx(expected[0], rel=1e-6), about
    assert found.keys() == expected[1].keys(), about
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[name],
            gradient,
            **(tolerance or TOLERANCE),
            msg=lambda m, n=name: f"{about} {n}: {m}",  # type: ignore[misc]
        )
