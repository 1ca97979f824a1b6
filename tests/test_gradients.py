"""Every schedule gives the losses and gradients of the same model without a pipeline, in real processes over gloo."""

from pathlib import Path
from typing import Any

import pytest
from models import Checkpointing, batch, build_stage, reference
from pipelines import Pipeline, Result, assert_like
from ranks import run_ranks
from searching import searching_little

from zbpipe.schedule import registry

MICROBATCHES = (1, 2, 3, 8)
FEW = (1, 3)


def train(schedule: str, microbatches: tuple[int, ...], checkpointing: Checkpointing, **options: Any) -> list[Result]:
    """Two steps for each number of microbatches on this rank; the second step's losses and gradients."""
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
    for name in per_rank[0]:
        num_stages = registry.resolve(name).place(len(per_rank)).num_stages
        assert_like_reference([results[name] for results in per_rank], num_stages, microbatches)


Sizes = dict[Checkpointing, tuple[int, ...]]
CHECKPOINTED: Sizes = {"none": MICROBATCHES, "full": FEW, "selective": FEW}
IN_SHORT: Sizes = {"none": (1, 8), "full": (3,), "selective": (3,)}


def train_with_checkpointing(sizes: Sizes) -> dict[str, list[Result]]:
    return {kind: train("ZBV", microbatches, kind) for kind, microbatches in sizes.items()}


@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(4, IN_SHORT), *(pytest.param(p, CHECKPOINTED, marks=pytest.mark.long) for p in (2, 4))]
)
def test_zbv(num_ranks: int, sizes: Sizes) -> None:
    per_rank = run_ranks(num_ranks, train_with_checkpointing, sizes)
    for kind, microbatches in sizes.items():
        assert_like_reference([results[kind] for results in per_rank], 2 * num_ranks, microbatches)


OTHERS = tuple(
    algorithm.name
    for algorithm in registry.schedules().values()
    if algorithm.source == "zbpipe" and algorithm.name != "ZBV"
)
"""Of zbpipe's own schedules."""
TORCHS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


ADAPTIVE = ("ZB", "ZBLoop", "Auto")
"""Those that ask the modules for their checkpointing."""


def train_all(
    names: tuple[str, ...], microbatches: tuple[int, ...], checkpointing: Checkpointing = "none"
) -> dict[str, list[Result]]:
    with searching_little():
        return {name: train(name, microbatches, checkpointing) for name in names}


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


@pytest.mark.parametrize("checkpointing", ["selective", pytest.param("full", marks=pytest.mark.long)])
def test_schedules_that_adapt_to_the_checkpointing(checkpointing: Checkpointing) -> None:
    assert_all_like_reference(run_ranks(2, train_all, ADAPTIVE, FEW, checkpointing), FEW)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_torchs_own_classes_under_their_names(num_ranks: int) -> None:
    assert_all_like_reference(run_ranks(num_ranks, train_all, TORCHS, MICROBATCHES[-1:]), MICROBATCHES[-1:])


def train_from_file(table: str, microbatches: int) -> list[Result]:
    return train(table, (microbatches,), "none")


def test_a_csv_file_is_a_schedule(tmp_path: Path) -> None:
    """An order and a placement of its own: three stages on two ranks, two of them on rank 1."""
    rows = [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "2F0", "2B0", "1B0", "1F1", "2F1", "2B1", "1I1", "1W1"]]
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(",".join(row) for row in rows))
    per_rank = run_ranks(2, train_from_file, str(table), 2)
    assert_like_reference(per_rank, 3, (2,))
