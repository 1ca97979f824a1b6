"""Steps with another number of microbatches, or another shape, than the first: like the model without pipeline."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import batch, build_stage, gradients, loss_fn, without_pipeline
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
NAMES = ("ZBV", "ZBH1", "ZBVLean", "ZB2P", "Table", "Plan", "Auto")

Step = tuple[list[float], dict[str, Tensor]]


def data(rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens, targets = batch(MICROBATCHES * 2)
    return tokens[:rows, :length], targets[:rows, :length]


def build(name: str, num_ranks: int, rank: int) -> tuple[Any, dict[int, torch.nn.Module], int]:
    schedule: Any = name
    if name == "Table":
        schedule = zbpipe.generate("1F1B", num_ranks, USUAL)
    if name == "Plan":
        schedule = zbpipe.plan(
            num_ranks, USUAL, CostModel.uniform(Placement.v(num_ranks)), budget=1e4, placements=["v"]
        )
    table = getattr(schedule, "schedule", schedule)
    indices = zbpipe.stage_indices(table, rank=rank, num_ranks=num_ranks)
    num_stages = registry.resolve(table).place(num_ranks).num_stages
    modules = {index: build_stage(index, num_stages) for index in indices}
    stages = [PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in modules.items()]
    runtime: Any = zbpipe.build_pipeline_schedule(schedule, stages, USUAL, loss_fn)
    if name == "Table":  # a table: other numbers have to be adopted
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


def expected_of(num_stages: int, number: int, rows: int, length: int) -> Step:
    return without_pipeline(num_stages, number, *data(rows, length))


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, ("ZBV",)),
        (2, ("ZBV", "ZBH1", "Table", "Plan")),
        (3, ("ZBVLean", "Auto")),
        pytest.param(1, NAMES, marks=pytest.mark.zoo),
        pytest.param(2, NAMES, marks=pytest.mark.zoo),
        pytest.param(3, NAMES, marks=pytest.mark.zoo),
    ],
)
def test_gradients_of_steps_of_other_sizes(num_ranks: int, names: tuple[str, ...]) -> None:
    per_rank = run_ranks(num_ranks, train, names, timeout=300)
    for name in names:
        num_stages = num_ranks * (1 if name in ("ZBH1", "ZB2P", "Table") else 2)
        for step, size in enumerate(STEPS):
            expected_losses, expected = expected_of(num_stages, *size)
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


def step(job: Job, rows: int, length: int = 6, **given: Any) -> None:
    tokens, targets = data(rows, length)
    first, last = 0 in job.modules, job.num_stages - 1 in job.modules
    job.schedule.step(*([tokens] if first else []), target=targets if last else None, **given)


def refused(job: Job, rows: int, **given: Any) -> str:
    try:
        step(job, rows, **given)
    except (ValueError, zbpipe.PipelineError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(folder: Path) -> dict[str, str]:
    """What this rank, of two, says to steps that the ranks are not given alike."""
    rank = dist.get_rank()
    renew_group(folder / "alike", 60.0)
    job = Job("ZBH1")
    step(job, 6)
    found = {str(wrong): refused(job, 6, microbatches=wrong) for wrong in (0, True, "3", 2.0)}
    found["different"] = refused(job, 6, microbatches=2 + rank)
    # Rank 1 has the target, and nothing to refuse by itself.
    found["uneven"] = refused(job, 7 - rank, microbatches=3)
    step(job, 6, microbatches=3)
    found["without"] = refused(job, 12, microbatches=None)
    renew_group(folder / "table", 60.0)
    table: Any = zbpipe.generate("1F1B", 2, MICROBATCHES)
    found["table"] = refused(Job(table), 6, microbatches=3)
    renew_group(folder / "forgotten", 4.0)
    job = Job("ZBH1")
    step(job, 6)
    began = time.monotonic()
    found["forgotten"] = refused(job, 6, **({} if rank else {"microbatches": 3}))
    assert time.monotonic() - began < 30
    found["next"] = refused(job, 6)
    renew_group(folder / "end", 60.0)
    return found


def test_what_ranks_are_not_given_alike_is_refused_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, refusals, tmp_path)
    for found in (first, second):
        for wrong in ("0", "True", "'3'", "2.0"):
            words = f"ValueError: microbatches has to be a whole number from 1 on, got {wrong}"
            assert found[wrong.strip("'")] == words
        assert found["different"].startswith(
            "RefusedStepError: the ranks were given different microbatches=: 2 on rank 0, 3 on rank 1. Give the same"
        )
        assert "is a table for 6 microbatches, but the job has 3: name a schedule" in found["table"]
    assert first["uneven"].startswith("ValueError: microbatch 1 has inputs of the shapes (2, 6), but microbatch 0")
    assert second["uneven"] == f"RefusedStepError: rank 0 refuses this step: {first['uneven']}"
    assert "the microbatches have inputs of the shapes (2, 6), but those of the first step" in first["without"]
    assert "or give step(microbatches=) on all ranks" in first["without"]
    assert "3 on rank 0, none on rank 1" in first["forgotten"]
    assert first["forgotten"] in second["forgotten"]
    assert first["next"] == second["next"] == ""


def evaluate() -> list[float]:
    """Eval and step in turn, each with another number of microbatches."""
    job = Job("ZBV")
    found: list[Tensor] = []
    results = []
    for number, run in ((6, "step"), (3, "eval"), (2, "step"), (3, "eval"), (6, "step")):
        tokens, targets = data(2 * number, 6)
        getattr(job.schedule, run)(
            *([tokens] if 0 in job.modules else []),
            target=targets if job.num_stages - 1 in job.modules else None,
            losses=found,
            microbatches=number,
        )
        results += [each.item() for each in found]
    return results


def test_eval_and_steps_in_turn() -> None:
    found = [loss for losses in run_ranks(2, evaluate) for loss in losses]
    expected = [loss for number in (6, 3, 2, 3, 6) for loss in expected_of(4, number, 2 * number, 6)[0]]
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_lists_of_a_size_are_made_once(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile Python looks for no garbage, which takes longer than the lists; afterwards as before."""
    indices = zbpipe.stage_indices("ZBV", rank=0, num_ranks=1)
    stages = [PipelineStage(torch.nn.Linear(2, 2), index, 2, torch.device("cpu")) for index in indices]
    schedule: Any = zbpipe.build_pipeline_schedule("ZBV", stages, 4, F.mse_loss)
    made: list[tuple[str, bool]] = []
    lower = schedule._lower

    def recorded(table: zbpipe.Schedule) -> Any:
        made.append((str(table), gc.isenabled()))
        return lower(table)

    monkeypatch.setattr(schedule, "_lower", recorded)
    x = torch.ones(6, 2)
    schedule.prepare(2)
    assert made.pop() == (str(zbpipe.generate("ZBV", 1, 2)), False)
    assert _torch.num_microbatches(schedule) == 4
    assert schedule.schedule == zbpipe.generate("ZBV", 1, 4)
    with pytest.raises(ValueError, match="microbatches has to be a whole number"):
        schedule.prepare(2, 0)
    assert _torch.num_microbatches(schedule) == 4
    for number in (3, None, 3, 6, 3, 6, 2):
        schedule.step(x if number else x[:4], target=x if number else x[:4], microbatches=number)
    assert made == [(str(zbpipe.generate("ZBV", 1, number)), False) for number in (3, 6)]
    assert gc.isenabled()
    gc.disable()
    try:
        schedule.step(x[:5], target=x[:5], microbatches=5)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="microbatches has to be a whole number"):
        schedule.step(x, target=x, microbatches=0)
    assert gc.isenabled()
