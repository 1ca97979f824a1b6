"""What works together: TorchTitan jobs with a pipeline against the same jobs without one.

`make everything` runs it and holds docs/compatibility.md against what it saw, `make compatibility` writes that page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compatibility
import pytest
import torch
import torch.distributed as dist
from cells import MATRIX, Cell, row, table_of_matrix, train_as_without_a_pipeline
from compatibility import Row, Section
from models import build_stage, loss_fn
from rows import ABOUT, ROWS
from titan_jobs import DEEPSEEK, Job, Titan, flavor, pipeline, require_titan
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import zbpipe

require_titan("0.3.0")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

_SHARDED = ("--parallelism.data_parallel_shard_degree", "2")
_REPLICATED = (
    *("--parallelism.data_parallel_replicate_degree", "2"),
    *("--parallelism.data_parallel_shard_degree", "1"),
)
_TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2")
_BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
COMBINATIONS = {
    **{name: Cell(name, name) for name in ("ZBH1", "ZBH2", "ZB1P", "ZB2P", "VMin")},
    **{f"{name} p=4": Cell(name, name, pipeline_ranks=4) for name in ("ZBV", "VHalf")},
    "lean dp_shard": Cell("ZBVLean, FSDP2 (`fully_shard`)", "ZBVLean", settings=_SHARDED, ranks_per_stage=2),
    "lean tp": Cell("ZBVLean, tensor parallelism", "ZBVLean", settings=_TENSOR_PARALLEL, ranks_per_stage=2),
    "dp_shard compiled": Cell("ZBV, FSDP2, torch.compile", settings=_SHARDED, ranks_per_stage=2, compiled=True),
    # Products round to 8 bits, and without a pipeline they go over the whole batch at once.
    "bfloat16": Cell(
        "ZBV, FSDP2, bfloat16 parameters and float32 reduction (loss within 3e-4, norm within 1e-3)",
        settings=(*_SHARDED, *_BFLOAT16),
        ranks_per_stage=2,
        tolerances={"losses": 3e-4, "norms": 1e-3},
    ),
    "dp_replicate": Cell("ZBV, replicated data parallelism by FSDP2", settings=_REPLICATED, ranks_per_stage=2),
    "tp compiled": Cell(
        "ZBV, tensor parallelism, torch.compile", settings=_TENSOR_PARALLEL, ranks_per_stage=2, compiled=True
    ),
    # The first of six blocks has no experts, so its rank compiles for both kinds. The other three stages have some.
    "moe compiled": Cell(
        "ZBV, mixture of experts (DeepSeek V3), torch.compile",
        model=DEEPSEEK,
        compiled=True,
        recompilations=1,
    ),
    "validation": Cell("ZBV, TorchTitan's validation after each step", settings=flavor().validation),
}
CELLS = MATRIX | COMBINATIONS

seen: dict[str, str] = {}
"""What became of each cell and each refusal, in words for the page."""
rows: dict[str, Row] = {}
"""Those of other models and features that were as they should be."""


@pytest.mark.parametrize("name", CELLS)
def test_trains_as_without_a_pipeline(titan: Titan, name: str) -> None:
    train_as_without_a_pipeline(titan, CELLS[name])
    seen[name] = "works"


def torch_refuses_compiled(titan: Titan, **functorch: Any) -> str:
    """With every rank refusing in the same words before anything runs; the words of the first."""
    job = titan.train(*pipeline("ZBVZeroBubble"), "--compile.enable", num_ranks=2, functorch=functorch)
    assert_all_ranks_end(job)
    assert not job.began, job.log
    assert "donated_buffer=False" in job.errors[0]
    assert all(error.startswith("ValueError: torch's own ZBVZeroBubble cannot split") for error in job.errors)
    return f"refused: {job.errors[0].removeprefix('ValueError: ')}"


def torch_compiled(titan: Titan) -> str:
    return torch_refuses_compiled(titan)


def torch_compiled_without_donation(titan: Titan) -> str:
    return torch_refuses_compiled(titan, donated_buffer=False)


def torch_selective(titan: Titan) -> str:
    job = titan.train(*pipeline("ZBVZeroBubble"), "activation-checkpoint:selective", num_ranks=2)
    assert_all_ranks_end(job)
    assert job.began
    assert "Trying to backward an extra time" in job.errors[0]
    return f"fails in torch, in the first step: {job.errors[0].partition('. ')[0]}"


def assert_all_ranks_end(job: Job) -> None:
    assert len(job.errors) == 2, job.log
    assert all(code > 0 for code in job.exit_codes), job.log
    assert job.steps == ()


def distributed_data_parallel(titan: Titan) -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return refusal(lambda index, total: DistributedDataParallel(build_stage(index, total)), num_ranks=1)


def late_receives(titan: Titan) -> str:
    # Nothing is sent, so the other ranks need not be there.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    return refusal(build_stage, num_ranks=4, schedule="ZBVZeroBubble", defer_pp_recv=True)


def refusal(build: Callable[[int, int], Any], num_ranks: int, schedule: str = "ZBV", **options: Any) -> str:
    """What zbpipe says to a V on rank 0, whose stages are the first and the last."""
    total = 2 * num_ranks
    try:
        stages = [PipelineStage(build(index, total), index, total, torch.device("cpu")) for index in (0, total - 1)]
        with pytest.raises(ValueError, match=r"ZBV|stage 0") as refused:
            zbpipe.build_pipeline_schedule(schedule, stages, 8, loss_fn, **options)
    finally:
        dist.destroy_process_group()
    return f"refused: {refused.value}"


@dataclass(frozen=True)
class Refusal:
    """What must not train."""

    feature: str
    how: str
    outcome: Callable[[Titan], str]
    """In words for the page, after it looked that this is what happens."""


REFUSALS = {
    "torch compiled": Refusal("torch's ZBVZeroBubble, torch.compile", "TorchTitan, 2 ranks", torch_compiled),
    "torch compiled, donated_buffer=False": Refusal(
        "the same with `torch._functorch.config.donated_buffer = False`",
        "TorchTitan, 2 ranks",
        torch_compiled_without_donation,
    ),
    "torch selective": Refusal(
        "torch's ZBVZeroBubble, selective checkpointing", "TorchTitan, 2 ranks", torch_selective
    ),
    "ddp": Refusal("ZBV, stages in DistributedDataParallel", "construction, 1 rank", distributed_data_parallel),
    "defer_pp_recv": Refusal(
        "torch's ZBVZeroBubble, `defer_pp_recv=True`", "construction as on 4 ranks", late_receives
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_does_not_train(titan: Titan, name: str) -> None:
    seen[name] = REFUSALS[name].outcome(titan)


@pytest.mark.parametrize("name", ROWS)
def test_other_models_and_features(titan: Titan, tmp_path: Path, name: str) -> None:
    rows[name] = ROWS[name](titan, tmp_path)


def test_the_page_says_what_was_seen(request: pytest.FixtureRequest) -> None:
    everything = CELLS.keys() | REFUSALS.keys() | ROWS.keys()
    compatibility.compare_when_all_ran(request, "name", everything, seen.keys() | rows.keys(), section)


def section() -> Section:
    """This target's part of docs/compatibility.md, as it should be."""
    return Section(
        compatibility.target("torchtitan"),
        f"Tested with {compatibility.seen_with('torch', 'torchtitan')} by `make everything`, which CI runs;"
        " `make compatibility` writes this section. Not tried: CUDA graphs, which need a GPU.",
        compatibility.TITAN,
        [
            table_of_matrix(seen),
            compatibility.features(
                "More features",
                'All rows have selective checkpointing, TorchTitan\'s default. "Ranks" are processes.',
                [row(cell, seen[name]) for name, cell in COMBINATIONS.items()],
            ),
            compatibility.features("Other models and features", ABOUT, [rows[name] for name in ROWS]),
            compatibility.features(
                "What does not work",
                '"Refused" means at construction, before any message is sent, and in TorchTitan\'s jobs by every rank.',
                [Row(refusal.feature, refusal.how, seen[name]) for name, refusal in REFUSALS.items()],
            ),
        ],
    )
