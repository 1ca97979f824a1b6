"""What works with torchtitan 0.2.2, for docs/compatibility.md: `make test-titan02` runs this in its environment."""

from __future__ import annotations

import compatibility
import pytest
from cells import MATRIX, Cell, row, table_of_matrix, train_as_without_a_pipeline
from compatibility import Row, Section
from titan_jobs import DEEPSEEK, Titan, flavor, pipeline, require_titan

require_titan("0.2.2")
pytestmark = pytest.mark.timeout(900)

_SHARDED = ("--parallelism.data_parallel_shard_degree", "2")
_HYBRID = ("--parallelism.data_parallel_replicate_degree", "2", *_SHARDED)
_TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2")
_EVERY_SECOND_BLOCK = ("--activation_checkpoint.selective_ac_option", "2")
_BF16_EXPERTS = {"losses": 1e-4, "norms": 1e-3}
COMBINATIONS = {
    **{name: Cell(name, name, checkpointing="full") for name in ("ZBH1", "ZB1P", "1F1B", "Interleaved1F1B")},
    **{
        name: Cell(f"torch's {name}, no checkpointing", name, checkpointing="none")
        for name in ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
    },
    **{f"{name} p=4": Cell(name, name, pipeline_ranks=4) for name in ("ZBV", "VHalf")},
    "every second block": Cell(
        "ZBV, every second block checkpointed, which is TorchTitan's default", settings=_EVERY_SECOND_BLOCK
    ),
    "dp_shard compiled": Cell("ZBV, FSDP2, torch.compile", settings=_SHARDED, ranks_per_stage=2, compiled=True),
    "bfloat16": Cell(
        "ZBV, FSDP2, bfloat16 parameters and float32 reduction (loss within 3e-4, norm within 1e-3)",
        settings=(*_SHARDED, "--training.mixed_precision_param", "bfloat16"),
        ranks_per_stage=2,
        tolerances={"losses": 3e-4, "norms": 1e-3},
    ),
    "tp": Cell("ZBV, tensor parallelism", settings=_TENSOR_PARALLEL, ranks_per_stage=2),
    "moe compiled": Cell(
        "ZBV, mixture of experts (DeepSeek V3), torch.compile",
        model=DEEPSEEK,
        compiled=True,
        tolerances=_BF16_EXPERTS,
    ),
    "llama4": Cell(
        "ZBVLean, mixture of experts (Llama 4), sharded and replicated (HSDP)",
        "ZBVLean",
        model="rows02_config:llama4_python_stdlib",
        settings=_HYBRID,
        ranks_per_stage=4,
        tolerances=_BF16_EXPERTS,
    ),
    "validation": Cell("ZBV, TorchTitan's validation after each step", settings=flavor().validation),
}
CELLS = MATRIX | COMBINATIONS
seen: dict[str, str] = {}
"""What became of each cell and each refusal, in words for the page."""


@pytest.mark.parametrize("name", CELLS)
def test_trains_as_without_a_pipeline(titan: Titan, name: str) -> None:
    train_as_without_a_pipeline(titan, CELLS[name])
    bounds = " (loss within 1e-4, norm within 1e-3)" if CELLS[name].tolerances is _BF16_EXPERTS else ""
    seen[name] = f"works{bounds}"


def replicated_by_ddp(titan: Titan) -> str:
    settings = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    job = titan.train(*pipeline("ZBV"), *settings, num_ranks=4)
    assert "DDP has not supported > 1D parallelism" in job.errors[0]
    return f"refused by TorchTitan: {job.errors[0]}"


def without_pipelines(titan: Titan) -> str:
    job = titan.train(*pipeline("ZBV"), num_ranks=2, model="rows02_config:qwen3_python_stdlib")
    assert "does not support pipelining" in job.errors[0]
    return f"refused by TorchTitan: {job.errors[0]}"


def torch_compiled(titan: Titan) -> str:
    job = titan.train(*pipeline("ZBVZeroBubble"), "--compile.enable", num_ranks=2)
    assert len(job.errors) == 2
    assert not job.began
    assert all("not supported with stage modules that have used torch.compile" in error for error in job.errors)
    return f"refused by torch: {job.errors[0].removeprefix('RuntimeError: ')}"


def torch_selective(titan: Titan) -> str:
    job = titan.train(*pipeline("ZBVZeroBubble"), num_ranks=2)
    assert job.began
    assert "Trying to backward an extra time" in job.errors[0]
    return f"fails in torch, in the first step: {job.errors[0].partition('. ')[0]}"


REFUSALS = {
    "qwen3": ("Qwen 3, and GPT-OSS, which are alike in this", "2 ranks", without_pipelines),
    "dp_replicate": ("ZBV, replicated data parallelism by DDP", "4 ranks", replicated_by_ddp),
    "torch compiled": ("torch's ZBVZeroBubble, torch.compile", "TorchTitan, 2 ranks", torch_compiled),
    "torch selective": ("torch's ZBVZeroBubble, selective checkpointing", "TorchTitan, 2 ranks", torch_selective),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_does_not_train(titan: Titan, name: str) -> None:
    seen[name] = REFUSALS[name][2](titan)


def test_the_page_says_what_was_seen(request: pytest.FixtureRequest) -> None:
    everything = CELLS.keys() | REFUSALS.keys()
    compatibility.compare_when_all_ran(request, "name", everything, seen.keys(), section)


def section() -> Section:
    """This target's part of docs/compatibility.md, as it should be."""
    return Section(
        compatibility.target("torchtitan"),
        f"Tested with {compatibility.seen_with('torch', 'torchtitan')} by tests/test_titan02.py. CI runs it with torch"
        " 2.13 by `make test-titan02`; `make test-titan02 WRITE=--write-compatibility` writes this section. In"
        " torchtitan 0.2.2 every pipeline, torch's 1F1B as well, has the gradients of the sum of the loss over all"
        " tokens of a step, not of its mean. So the tests divide the norms by the number of tokens before they compare"
        " them, and all jobs clip to the same norm. Selective checkpointing is by op. Rows with nothing but a schedule"
        " on 2 ranks have full checkpointing, all others selective checkpointing, unless they say so. Not tried:"
        " context parallelism, expert parallelism, float8. Tensor parallelism with torch.compile also fails in"
        " TorchTitan without a pipeline (torch 2.13, CPU).",
        compatibility.TITAN,
        [
            table_of_matrix(seen),
            compatibility.features(
                "More features",
                '"Ranks" are processes.',
                [row(cell, seen[name]) for name, cell in COMBINATIONS.items()],
            ),
            compatibility.features(
                "What does not work",
                "",
                [Row(feature, how, seen[name]) for name, (feature, how, _) in REFUSALS.items()],
            ),
        ],
    )
