"""TorchTitan jobs with a pipeline that have to train as the same job without one, for any version of TorchTitan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from compatibility import Row, Table, by_checkpointing
from titan_jobs import LLAMA, STEPS, Job, Titan, assert_trains_alike, flavor, pipeline

from zbpipe.frameworks.titan.versions import find_installed

COMPILING = ("eager", "compiled")


@dataclass(frozen=True)
class Cell:
    """A job that has to train as it does without a pipeline."""

    feature: str = ""
    """In words for the page; those of the matrix have a table of their own."""
    schedule: str = "ZBV"
    checkpointing: str = "selective"
    compiled: bool = False
    settings: tuple[str, ...] = ()
    """Further ones, which the job without a pipeline has, too."""
    ranks_per_stage: int = 1
    alone: tuple[str, ...] = ()
    """Settings that only the job without a pipeline has."""
    options: tuple[str, ...] = ()
    """Settings that only the pipeline has."""
    says: tuple[str, ...] = ()
    """Patterns of what the pipeline logs."""
    pipeline_ranks: int = 2
    microbatches: int = 4
    model: str = LLAMA
    tolerances: dict[str, float] = field(default_factory=dict)
    recompilations: int = 0
    """In all ranks together."""
    steps: int = STEPS


MATRIX = {
    f"ZBV {checkpointing} {COMPILING[compiled]}": Cell(checkpointing=checkpointing, compiled=compiled)
    for checkpointing in ("none", "selective", "full")
    for compiled in (False, True)
}
"""ZBV with every kind of checkpointing, with and without the compiler."""


def table_of_matrix(seen: Mapping[str, str]) -> Table:
    """The page's table of `MATRIX`, from what became of each cell."""
    outcomes = {
        (cell.schedule, cell.checkpointing, COMPILING[cell.compiled]): seen[name] for name, cell in MATRIX.items()
    }
    return by_checkpointing(
        "Schedule, activation checkpointing, torch.compile",
        'Llama 3. "Compiled" means TorchTitan\'s `--compile.enable`: every block, by Inductor, and the loss.',
        outcomes,
        ["ZBV"],
    )


def train_as_without_a_pipeline(titan: Titan, cell: Cell) -> Job:
    """Run the job of `cell`, and compare it."""
    longer = () if cell.steps == STEPS else ("--training.steps", str(cell.steps))
    settings = (*longer, *cell.settings)
    expected = titan.without_pipeline(*settings, *cell.alone, num_ranks=cell.ranks_per_stage, model=cell.model)
    job = titan.train(
        *settings,
        *pipeline(cell.schedule, cell.pipeline_ranks),
        *cell.options,
        *(["--compile.enable"] if cell.compiled else []),
        *find_installed().checkpoint(cell.checkpointing),
        num_ranks=cell.pipeline_ranks * cell.ranks_per_stage,
        model=cell.model,
    )
    print(job.log)
    assert_trains_alike(job, expected, **cell.tolerances, steps=cell.steps)
    applied = flavor().applied.get(cell.checkpointing)
    assert re.search(
        rf"pipeline schedule {re.escape(cell.schedule)}(Loop)? with {cell.microbatches} microbatches", job.log
    )
    assert ("Compiling each TransformerBlock" in job.log) == cell.compiled
    assert (f"Applied {applied} activation checkpointing" in job.log) == (applied is not None)
    assert ("activation checkpointing to the model" in job.log) == (applied is not None)
    # The blocks are compiled with fullgraph=True, so a graph break would have been an error.
    assert job.log.count("Recompiling function") == cell.recompilations
    assert "recompile_limit" not in job.log
    # All ranks have the loss, those without the last stage, too.
    assert "loss is not visible" not in job.log
    assert "loss: -" not in job.log
    assert "FLOPs to W; in I:" not in job.log
    for pattern in cell.says:
        assert re.search(pattern, job.log), pattern
    return job


def row(cell: Cell, outcome: str) -> Row:
    """A line of the page for a cell outside of the matrix: its ranks, and the other degrees of parallelism."""
    degrees = [_SHORT[name] + degree for name, degree in pairwise(cell.settings) if name in _SHORT]
    num_ranks = cell.pipeline_ranks * cell.ranks_per_stage
    how = f"{num_ranks} ranks: {' x '.join([f'pp={cell.pipeline_ranks}', *degrees])}"
    return Row(cell.feature, how, outcome)


_SHORT = {
    "--parallelism.data_parallel_shard_degree": "dp_shard=",
    "--parallelism.data_parallel_replicate_degree": "dp_replicate=",
    "--parallelism.tensor_parallel_degree": "tp=",
}
