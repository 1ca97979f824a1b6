"""Every schedule gives the losses and gradients of the same model without a pipeline, in real processes over gloo."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Checkpointing, batch, build_stage, gradients, loss_fn, reference
from ranks import run_ranks
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import registry
from zbpipe.runtime.split.products import PendingGradient

# Both runs do the same float32 arithmetic but for the order in which the microbatches' weight gradients are added (a
# fused multiply-add into .grad here, product and then sum there). Over 8 microbatches that moves the last bits only.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
MICROBATCHES = (1, 2, 3, 8)

Result = tuple[list[float], dict[str, torch.Tensor]]


def train(
    schedule: str,
    microbatches: tuple[int, ...],
    checkpointing: Checkpointing,
    broken: bool = False,
    **options: object,
) -> list[Result]:
    """Two steps for each number of microbatches on this rank; the second step's losses and gradients."""
    if broken:
        accumulate = PendingGradient.accumulate
        PendingGradient.accumulate = lambda self: accumulate(replace(self, dy=1.001 * self.dy))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for count in microbatches:
        num_stages = registry.resolve(schedule).place(num_ranks).num_stages
        modules = {
            index: build_stage(index, num_stages, checkpointing)
            for index in zbpipe.stage_indices(schedule, rank=rank, num_ranks=num_ranks)
        }
        stages = [PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in modules.items()]
        runtime = zbpipe.build_pipeline_schedule(
            schedule=schedule, stages=stages, n_microbatches=count, loss_fn=loss_fn, **options
        )
        tokens, targets = batch(count)
        losses: list[torch.Tensor] = []
        for _ in range(2):
            for module in modules.values():
                module.zero_grad()
            runtime.step(
                *([tokens] if 0 in modules else []),
                target=targets if num_stages - 1 in modules else None,
                losses=losses,
            )
        results.append(([loss.item() for loss in losses], gradients(modules)))
    return results


def assert_like_reference(
    per_rank: list[list[Result]], num_stages: int, microbatches: tuple[int, ...] = MICROBATCHES
) -> None:
    for position, count in enumerate(microbatches):
        expected_losses, expected = reference(num_stages, count)
        losses = [loss for results in per_rank for loss in results[position][0]]
        found = {name: grad for results in per_rank for name, grad in results[position][1].items()}
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(
                found[name],
                grad,
                **TOLERANCE,
                msg=lambda m, n=name, c=count: f"{n}, m={c}: {m}",  # type: ignore[misc]
            )


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zbv(num_ranks: int, checkpointing: Checkpointing) -> None:
    assert_like_reference(run_ranks(num_ranks, train, "ZBV", MICROBATCHES, checkpointing), 2 * num_ranks)


def train_with_late_receives() -> dict[str, list[Result]]:
    return {name: train(name, MICROBATCHES, "none", receives="late") for name in ("ZBV", "VHalf", "ZBH1")}


def test_late_receives() -> None:
    """With torch's own way to do so, ZBV takes activations for gradients."""
    per_rank = run_ranks(4, train_with_late_receives, timeout=240)
    for name in per_rank[0]:
        num_stages = registry.resolve(name).place(4).num_stages
        assert_like_reference([results[name] for results in per_rank], num_stages)


OTHERS = tuple(
    algorithm.name
    for algorithm in registry.schedules().values()
    if algorithm.source == "zbpipe" and algorithm.name != "ZBV"
)
"""Of zbpipe's own schedules."""
TORCHS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def train_all(names: tuple[str, ...], microbatches: tuple[int, ...]) -> dict[str, list[Result]]:
    return {name: train(name, microbatches, "none") for name in names}


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.zoo), 4])
def test_every_schedule_class(num_ranks: int) -> None:
    per_rank = run_ranks(num_ranks, train_all, OTHERS, MICROBATCHES, timeout=240)
    for name in OTHERS:
        num_stages = registry.resolve(name).place(num_ranks).num_stages
        assert_like_reference([results[name] for results in per_rank], num_stages)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_torchs_own_classes_under_their_names(num_ranks: int) -> None:
    per_rank = run_ranks(num_ranks, train_all, TORCHS, MICROBATCHES[-1:], timeout=240)
    for name in TORCHS:
        num_stages = registry.resolve(name).place(num_ranks).num_stages
        assert_like_reference([results[name] for results in per_rank], num_stages, MICROBATCHES[-1:])


def evaluate_and_accumulate(names: tuple[str, ...], microbatches: int) -> dict[str, Result]:
    """Eval, step, eval, step: the losses of all four, and what the two steps have summed up."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for name in names:
        num_stages = registry.resolve(name).place(num_ranks).num_stages
        modules = {
            index: build_stage(index, num_stages)
            for index in zbpipe.stage_indices(name, rank=rank, num_ranks=num_ranks)
        }
        stages = [PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in modules.items()]
        # With scale_grads, torch would divide what the first step left once more.
        runtime = zbpipe.build_pipeline_schedule(name, stages, microbatches, loss_fn, scale_grads=False)
        losses: list[float] = []
        for seed, run in enumerate((runtime.eval, runtime.step, runtime.eval, runtime.step)):
            tokens, targets = batch(microbatches, seed)
            found: list[torch.Tensor] = []
            run(
                *([tokens] if 0 in modules else []),
                target=targets if num_stages - 1 in modules else None,
                losses=found,
            )
            losses += [loss.item() for loss in found]
        results[name] = losses, gradients(modules)
    return results


def test_validation_and_gradient_accumulation() -> None:
    num_ranks, names, microbatches = 3, ("ZBV", *OTHERS), 4
    per_rank = run_ranks(num_ranks, evaluate_and_accumulate, names, microbatches)
    for name in names:
        num_stages = registry.resolve(name).place(num_ranks).num_stages
        expected = [reference(num_stages, microbatches, seed) for seed in range(4)]
        found_losses = [loss for results in per_rank for loss in results[name][0]]
        assert found_losses == pytest.approx([loss for losses, _ in expected for loss in losses], rel=1e-6)
        found = {key: grad for results in per_rank for key, grad in results[name][1].items()}
        assert found.keys() == expected[0][1].keys()
        for key, grad in found.items():
            summed = microbatches * (expected[1][1][key] + expected[3][1][key])
            torch.testing.assert_close(grad, summed, **TOLERANCE, msg=lambda m, n=f"{name}, {key}": f"{n}: {m}")  # type: ignore[misc]


def train_from_file(table: str, microbatches: int) -> list[Result]:
    return train(table, (microbatches,), "none")


def test_a_csv_file_is_a_schedule(tmp_path: Path) -> None:
    """An order and a placement of its own: three stages on two ranks, two of them on rank 1."""
    rows = [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "2F0", "2B0", "1B0", "1F1", "2F1", "2B1", "1I1", "1W1"]]
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(",".join(row) for row in rows))
    per_rank = run_ranks(2, train_from_file, str(table), 2)
    assert_like_reference(per_rank, 3, (2,))


def test_the_comparison_sees_a_broken_weight_gradient() -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_like_reference(run_ranks(2, train, "ZBV", MICROBATCHES, "none", True), 4)
