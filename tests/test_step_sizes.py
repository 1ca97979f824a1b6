"""Steps with another number of microbatches, or of another shape, than the first one: like the model without pipeline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import batch, build_stage, gradients, loss_fn
from ranks import run_ranks
from test_faults import MICROBATCHES, Job, renew_group
from test_gradients import TOLERANCE
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import registry
from zbpipe.costs import CostModel
from zbpipe.ir import Placement
from zbpipe.runtime import _torch

USUAL = 4
# (microbatches, rows, length); the first step is as the schedule was built, without `microbatches=`.
STEPS = ((4, 8, 6), (2, 4, 6), (7, 14, 6), (4, 8, 6), (2, 8, 6), (1, 2, 5), (4, 8, 5), (2, 8, 6), (3, 6, 6))
NAMES = ("ZBV", "ZBH1", "ZBVLean", "ZB2P", "1F1B-like", "Plan", "Auto")

Step = tuple[list[float], dict[str, Tensor]]


def data(rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens, targets = batch(MICROBATCHES * 2)
    return tokens[:rows, :length], targets[:rows, :length]


def build(name: str, num_ranks: int, rank: int) -> tuple[Any, dict[int, torch.nn.Module], int]:
    schedule: Any = name
    if name == "1F1B-like":
        schedule = zbpipe.generate("1F1B", num_ranks, USUAL)
    if name == "Plan":
        schedule = zbpipe.plan(
            num_ranks, USUAL, CostModel.uniform(Placement.v(num_ranks)), budget=1e4, placements=["v"]
        )
    table = getattr(schedule, "schedule", schedule)
    indices = zbpipe.stage_indices(table, rank=rank, num_ranks=num_ranks)
    num_stages = registry.lookup(table).place(num_ranks).num_stages
    modules = {index: build_stage(index, num_stages) for index in indices}
    stages = [PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in modules.items()]
    runtime: Any = zbpipe.build_pipeline_schedule(schedule, stages, USUAL, loss_fn)
    if name == "1F1B-like":  # a table: other numbers have to be adopted
        for number in {number for number, *_ in STEPS} - {USUAL}:
            runtime.adopt(zbpipe.generate("1F1B", num_ranks, number))
    return runtime, modules, num_stages


def train(names: tuple[str, ...]) -> dict[str, list[Step]]:
    """By schedule what each of `STEPS` gives on this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    results: dict[str, list[Step]] = {}
    for name in names:
        runtime, modules, num_stages = build(name, num_ranks, rank)
        results[name] = []
        for number, rows, length in STEPS:
            tokens, targets = data(rows, length)
            for module in modules.values():
                module.zero_grad()
            losses: list[Tensor] = []
            given = {} if (number, rows, length) == STEPS[0] else {"microbatches": number}
            runtime.step(
                *([tokens] if 0 in modules else []),
                target=targets if num_stages - 1 in modules else None,
                losses=losses,
                **given,
            )
            assert _torch.num_microbatches(runtime) == USUAL
            results[name].append(([each.item() for each in losses], gradients(modules)))
    return results


def without_pipeline(num_stages: int, number: int, rows: int, length: int) -> Step:
    stages = {index: build_stage(index, num_stages) for index in range(num_stages)}
    losses = []
    for x, target in zip(*(each.chunk(number) for each in data(rows, length)), strict=True):
        for stage in stages.values():
            x = stage(x)  # noqa: PLW2901
        loss = loss_fn(x, target)
        (loss / number).backward()
        losses.append(loss.item())
    return losses, gradients(stages)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_of_steps_of_other_sizes(num_ranks: int) -> None:
    per_rank = run_ranks(num_ranks, train, NAMES)
    for name in NAMES:
        num_stages = num_ranks * (1 if name in ("ZBH1", "ZB2P", "1F1B-like") else 2)
        for step, size in enumerate(STEPS):
            expected_losses, expected = without_pipeline(num_stages, *size)
            losses = [loss for results in per_rank for loss in results[name][step][0]]
            found = {key: grad for results in per_rank for key, grad in results[name][step][1].items()}
            assert losses == pytest.approx(expected_losses, rel=1e-6), (name, size)
            assert found.keys() == expected.keys()
            for key, grad in expected.items():
                torch.testing.assert_close(
                    found[key],
                    grad,
                    **TOLERANCE,
                    msg=lambda m, n=(name, step, key): f"{n}: {m}",  # type: ignore[misc]
                )
