"""Every schedule gives the losses and gradients of the same model without a pipeline, in real processes over gloo."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import Checkpointing, batch, build_stage, reference
from pipelines import Pipeline, Result, assert_like
from ranks import run_ranks
from searching import searching_little

from zbpipe.runtime.split.products import PendingGradient
from zbpipe.schedule import registry

MICROBATCHES = (1, 2, 3, 8)
FEW = (1, 3)


def train(
    schedule: str,
    microbatches: tuple[int, ...],
    checkpointing: Checkpointing,
    broken: bool = False,
    **options: Any,
) -> list[Result]:
    """Two steps for each number of microbatches on this rank; the second step's losses and gradients."""
    if broken:
        accumulate = PendingGradient.accumulate
        PendingGradient.accumulate = lambda self: accumulate(replace(self, dy=1.001 * self.dy))
    results = []
    for count in microbatches:
        pipeline = Pipeline(
            schedule, count, lambda index, num_stages: build_stage(index, num_stages, checkpointing), **options
        )
        tokens, targets = batch(count)
        for _ in range(2):
            pipeline.zero_grad()
            losses = pipeline.run(tokens, target=targets)
        results.append((losses, pipeline.gradients()))
    return results


def assert_like_reference(
    per_rank: list[list[Result]], num_stages: int, microbatches: tuple[int, ...] = MICROBATCHES
) -> None:
    for position, count in enumerate(microbatches):
        assert_like([results[position] for results in per_rank], reference(num_stages, count), f"m={count}")


def assert_all_like_reference(per_rank: list[dict[str, list[Result]]], microbatches: tuple[int, ...]) -> None:
    """The same by schedule."""
    for name in per_rank[0]:
        num_stages = registry.resolve(name).place(len(per_rank)).num_stages
        assert_like_reference([results[name] for results in per_rank], num_stages, microbatches)


CHECKPOINTED: dict[Checkpointing, tuple[int, ...]] = {"none": MICROBATCHES, "full": FEW, "selective": FEW}


def train_with_checkpointing() -> dict[str, list[Result]]:
    return {kind: train("ZBV", microbatches, kind) for kind, microbatches in CHECKPOINTED.items()}


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_zbv(num_ranks: int) -> None:
    per_rank = run_ranks(num_ranks, train_with_checkpointing)
    for kind, microbatches in CHECKPOINTED.items():
        assert_like_reference([results[kind] for results in per_rank], 2 * num_ranks, microbatches)


def train_with_late_receives() -> dict[str, list[Result]]:
    return {name: train(name, FEW, "none", receives="late") for name in ("ZBV", "VHalf", "ZBH1")}


@pytest.mark.long
def test_late_receives() -> None:
    """With torch's own way to do so, ZBV takes activations for gradients."""
    assert_all_like_reference(run_ranks(4, train_with_late_receives), FEW)


OTHERS = tuple(
    algorithm.name
    for algorithm in registry.schedules().values()
    if algorithm.source == "zbpipe" and algorithm.name != "ZBV"
)
"""Of zbpipe's own schedules."""
TORCHS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def train_all(names: tuple[str, ...], microbatches: tuple[int, ...]) -> dict[str, list[Result]]:
    with searching_little():
        return {name: train(name, microbatches, "none") for name in names}


@pytest.mark.parametrize(
    ("num_ranks", "microbatches"),
    [
        pytest.param(2, FEW, marks=pytest.mark.long),
        pytest.param(4, FEW, marks=pytest.mark.long),
        (4, MICROBATCHES[-1:]),
    ],
)
def test_every_schedule_class(num_ranks: int, microbatches: tuple[int, ...]) -> None:
    assert_all_like_reference(run_ranks(num_ranks, train_all, OTHERS, microbatches), microbatches)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_torchs_own_classes_under_their_names(num_ranks: int) -> None:
    assert_all_like_reference(run_ranks(num_ranks, train_all, TORCHS, MICROBATCHES[-1:]), MICROBATCHES[-1:])


def evaluate_and_accumulate(names: tuple[str, ...], microbatches: int) -> dict[str, Result]:
    """Eval, step, eval, step: the losses of all four, and what the two steps have summed up."""
    results = {}
    for name in names:
        # With scale_grads, torch would divide what the first step left once more.
        pipeline = Pipeline(name, microbatches, scale_grads=False)
        losses: list[float] = []
        for seed, how in enumerate(("eval", "step", "eval", "step")):
            tokens, targets = batch(microbatches, seed)
            losses += pipeline.run(tokens, target=targets, how=how)
        results[name] = losses, pipeline.gradients()
    return results


@pytest.mark.long  # test_modes has such sequences, too
def test_validation_and_gradient_accumulation() -> None:
    num_ranks, names, microbatches = 3, ("ZBV", "ZBH1", "ZB"), 4
    per_rank = run_ranks(num_ranks, evaluate_and_accumulate, names, microbatches)
    for name in names:
        num_stages = registry.resolve(name).place(num_ranks).num_stages
        expected = [reference(num_stages, microbatches, seed) for seed in range(4)]
        summed = {key: microbatches * (expected[1][1][key] + expected[3][1][key]) for key in expected[0][1]}
        assert_like(
            [results[name] for results in per_rank], ([loss for losses, _ in expected for loss in losses], summed), name
        )


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
        assert_like_reference(run_ranks(2, train, "ZBV", (1,), "none", True), 4, (1,))
