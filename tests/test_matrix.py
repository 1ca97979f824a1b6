"""TorchTitan jobs with a pipeline against the same jobs without one, for docs/compatibility.md."""

import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import compatibility
import pytest
import torch
import torch.distributed.checkpoint as dcp
from compatibility import Row, Section
from models import build_stage
from pipelines import Pipeline, as_rank
from titan_jobs import (
    DEEPSEEK,
    LLAMA,
    STEPS,
    Cell,
    Job,
    Titan,
    assert_trains_alike,
    assert_values,
    flavor,
    pipeline,
    train_as_without_a_pipeline,
    words,
)
from titan_jobs import require_titan as require
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.parallel import DistributedDataParallel

IS_02 = require("0.3.0", "0.2.2") == "0.2.2"
pytestmark = [pytest.mark.long, pytest.mark.versions, pytest.mark.timeout(900)]

SHARD, REPLICATE = "--parallelism.data_parallel_shard_degree", "--parallelism.data_parallel_replicate_degree"
_SHARDED, _HYBRID, _REPLICATED = (SHARD, "2"), (REPLICATE, "2", SHARD, "2"), (REPLICATE, "2", SHARD, "1")
_TENSOR = ("--parallelism.tensor_parallel_degree", "2")
_BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
_LONGER = ("--training.steps", "4")
# By default TorchTitan 0.3.0 makes new parameters of those that LoRA has frozen, and trains them.
_FROZEN = ("--parallelism.spmd_backend", "partial_dtensor")
_EXPERTS_APART = (*_SHARDED, *_FROZEN, "--parallelism.expert_parallel_degree", "2")
_BF16_EXPERTS = {"losses": 1e-4, "norms": 1e-3}


def _by_microbatch(num_sequences: int = 4) -> tuple[str, ...]:
    """Without a pipeline: one microbatch after the other, because float8 has one scale for each product."""
    return ("--training.local_batch_size", "1", "--training.global_batch_size", str(num_sequences))


_OF_BOTH = {
    **{f"{name} p=4": Cell(name, name, pipeline_ranks=4) for name in ("ZBV", "VHalf")},
    "dp_shard compiled": Cell("ZBV, FSDP2, torch.compile", settings=_SHARDED, ranks_per_stage=2, compiled=True),
    # Products round to 8 bits, and without a pipeline they go over the whole batch at once.
    "bfloat16": Cell(
        "ZBV, FSDP2, bfloat16 parameters and float32 reduction (loss within 3e-4, norm within 1e-3)",
        settings=(*_SHARDED, *_BFLOAT16),
        ranks_per_stage=2,
        tolerances={"losses": 3e-4, "norms": 1e-3},
    ),
}
_VALIDATION = {"validation": Cell("ZBV, TorchTitan's validation after each step", settings=flavor().validation)}
_MOE = "ZBV, mixture of experts (DeepSeek V3), torch.compile"
# Further ones are in ROWS, each with four stages per rank.
COMBINATIONS_03 = {
    **{name: Cell(name, name) for name in ("ZBH1", "ZBH2", "ZB1P", "ZB2P", "VMin")},
    **{name: _OF_BOTH[name] for name in ("ZBV p=4", "VHalf p=4", "bfloat16")},
    "dp_replicate": Cell("ZBV, replicated data parallelism by FSDP2", settings=_REPLICATED, ranks_per_stage=2),
    **_VALIDATION,
}
COMBINATIONS_02 = {
    **{name: Cell(name, name, checkpointing="full") for name in ("ZBH1", "ZB1P", "1F1B", "Interleaved1F1B")},
    **{
        name: Cell(f"torch's {name}, no checkpointing", name, checkpointing="none")
        for name in ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
    },
    **{name: _OF_BOTH[name] for name in ("ZBV p=4", "VHalf p=4")},
    "every second block": Cell(
        "ZBV, every second block checkpointed, which is TorchTitan's default",
        settings=("--activation_checkpoint.selective_ac_option", "2"),
    ),
    **_OF_BOTH,
    "tp": Cell("ZBV, tensor parallelism", settings=_TENSOR, ranks_per_stage=2),
    "moe compiled": Cell(_MOE, model=DEEPSEEK, compiled=True, tolerances=_BF16_EXPERTS),
    "llama4": Cell(
        "ZB, mixture of experts (Llama 4), sharded and replicated (HSDP)",
        "ZB",
        model="rows02_config:llama4_python_stdlib",
        settings=_HYBRID,
        ranks_per_stage=4,
        tolerances=_BF16_EXPERTS,
    ),
    **_VALIDATION,
}
MATRIX = {
    f"ZBV {checkpointing} {compiled}": Cell(checkpointing=checkpointing, compiled=compiled == "compiled")
    for checkpointing in ("none", "selective", "full")
    for compiled in ("eager", "compiled")
}
COMBINATIONS = COMBINATIONS_02 if IS_02 else COMBINATIONS_03
CELLS = MATRIX | COMBINATIONS
seen: dict[str, str] = {}
"""What became of each cell and each refusal, in words for the page."""
rows: dict[str, Row] = {}


@pytest.mark.parametrize("name", CELLS)
def test_trains_as_without_a_pipeline(titan: Titan, name: str) -> None:
    train_as_without_a_pipeline(titan, CELLS[name])
    bounds = " (loss within 1e-4, norm within 1e-3)" if CELLS[name].tolerances is _BF16_EXPERTS else ""
    seen[name] = f"works{bounds}"


# What does not train, by the feature, how it was tried, and a check that returns the outcome in words for the page.


def fails(
    titan: Titan, error: str, outcome: str, *arguments: str, on: int = 2, model: str = LLAMA, say: int = 2, **more: Any
) -> str:
    """At least `say` ranks fail with `error`: {0} in `outcome` is the whole of it, {1} without type, {2} a sentence."""
    began, functorch = more.pop("began", False), more
    job = titan.train(*arguments, num_ranks=on, model=model, functorch=functorch)
    found = [each for each in job.errors if error in each]
    assert len(found) >= say, job.log
    assert all(code > 0 for code in job.exit_codes), job.log
    assert (job.began, job.steps) == (job.began if began is None else began, ()), job.log
    return outcome.format(found[0], found[0].partition(": ")[2], found[0].partition(". ")[0])


ZERO_BUBBLE = pipeline("ZBVZeroBubble")
_COMPILED = (*ZERO_BUBBLE, "--compile.enable")
_TORCHS_COMPILED = "ValueError: torch's own ZBVZeroBubble cannot split"


def refusal(build: Callable[[int, int], Any], num_ranks: int, schedule: str = "ZBV", **options: Any) -> str:
    with as_rank(0, num_ranks), pytest.raises(ValueError, match=r"ZBV|stage 0") as refused:
        Pipeline(schedule, 8, build, **options)
    return f"refused: {refused.value}"


Refusals = dict[str, tuple[str, str, Callable[[Titan], str]]]
_ON_TWO, _BY_TITAN, _QWEN = "TorchTitan, 2 ranks", "refused by TorchTitan: {0}", "rows02_config:qwen3_python_stdlib"
_SELECTIVE = "Trying to backward an extra time", "fails in torch, in the first step: {2}", *ZERO_BUBBLE
_OF_BOTH_REFUSED: Refusals = {
    "torch selective": (
        "torch's ZBVZeroBubble, selective checkpointing",
        _ON_TWO,
        lambda titan: fails(
            titan, *_SELECTIVE, *(() if IS_02 else ("activation-checkpoint:selective",)), say=1, began=True
        ),
    )
}
REFUSALS_02: Refusals = {
    "qwen3": (
        "Qwen 3, and GPT-OSS, which are alike in this",
        "2 ranks",
        lambda titan: fails(titan, "does not support pipelining", _BY_TITAN, *pipeline("ZBV"), model=_QWEN),
    ),
    "dp_replicate": (
        "ZBV, replicated data parallelism by DDP",
        "4 ranks",
        lambda titan: fails(titan, "DDP has not supported > 1D", _BY_TITAN, *pipeline("ZBV"), *_REPLICATED, on=4),
    ),
    "torch compiled": (
        "torch's ZBVZeroBubble, torch.compile",
        _ON_TWO,
        lambda titan: fails(titan, "with stage modules that have used torch.comp", "refused by torch: {1}", *_COMPILED),
    ),
    **_OF_BOTH_REFUSED,
}
REFUSALS_03: Refusals = {
    "torch compiled": (
        "torch's ZBVZeroBubble, torch.compile",
        _ON_TWO,
        lambda titan: fails(titan, _TORCHS_COMPILED, "refused: {1}", *_COMPILED),
    ),
    "torch compiled, donated_buffer=False": (
        "the same with `torch._functorch.config.donated_buffer = False`",
        _ON_TWO,
        lambda titan: fails(titan, _TORCHS_COMPILED, "refused: {1}", *_COMPILED, donated_buffer=False),
    ),
    **_OF_BOTH_REFUSED,
    "ddp": (
        "ZBV, stages in DistributedDataParallel",
        "construction, 1 rank",
        lambda titan: refusal(lambda index, total: DistributedDataParallel(build_stage(index, total)), num_ranks=1),
    ),
    "defer_pp_recv": (
        "torch's ZBVZeroBubble, `defer_pp_recv=True`",
        "construction as on 4 ranks",
        lambda titan: refusal(build_stage, num_ranks=4, schedule="ZBVZeroBubble", defer_pp_recv=True),
    ),
}
REFUSALS = REFUSALS_02 if IS_02 else REFUSALS_03


@pytest.mark.parametrize("name", REFUSALS)
def test_does_not_train(titan: Titan, name: str) -> None:
    seen[name] = REFUSALS[name][2](titan)


# Models and features of TorchTitan 0.3 that the demo lacks: the CPU runs some, others fail in TorchTitan.


_A_BLOCK_EACH = words(
    "parallelism.pipeline_parallel_layers_per_stage 1",
    *(f"parallelism.pipeline_parallel_{end}_stage_less_layers 0" for end in ("first", "last")),
)
_FOUR_STAGES = "runs 4 stages per rank in a (wave|loop)"


def resumes(titan: Titan, folder: Path) -> str:
    """With four stages on each rank, which are parts of the one stage that the first job had there."""
    deep, settings = "rows_config:llama3_8_blocks", (*words("checkpoint.async_mode async"), *_LONGER)
    first = _saved(titan, folder / "first", *pipeline("1F1B"), *settings, model=deep)
    shutil.copytree(folder / "first" / "step-2", folder / "resumed" / "step-2")
    resumed = _saved(titan, folder / "resumed", *pipeline("ZB"), *_A_BLOCK_EACH, *settings, model=deep)
    assert re.search(_FOUR_STAGES, resumed.log)
    assert [step["step"] for step in resumed.steps] == [3, 4]
    for job in (first, resumed):
        assert_values(job.steps, titan.without_pipeline(*_LONGER, model=deep).steps[-len(job.steps) :])
    return "works"


def exports(titan: Titan, folder: Path) -> str:
    """Adam makes steps of one size of gradients near zero, whose signs rounding decides; so weights are compared."""
    from safetensors.torch import load_file

    as_hf = ("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only")
    _saved(titan, folder / "ZBV", *pipeline("ZBV"), *as_hf)
    _saved(titan, folder / "alone", *as_hf, num_ranks=1)
    exported, expected = (
        {
            name: weight
            for file in folder.glob(f"{job}/step-{STEPS}/**/*.safetensors")
            for name, weight in load_file(file).items()
        }
        for job in ("ZBV", "alone")
    )
    assert exported.keys() == expected.keys() != set()
    for name, weight in exported.items():
        assert (weight - expected[name]).norm() < 1e-4 * expected[name].norm(), name
    return "works"


def has_equal_expert_biases(titan: Titan, folder: Path) -> str:
    # Neither steps that are logged nor those before a checkpoint run ahead of their validation.
    settings = (*_LONGER, "--metrics.log_freq", "4", "--checkpoint.interval", "10", "--training.max_norm", "1e6")
    validated = (*pipeline("ZBV"), "--zbpipe.optimizer-step", "validated")
    alone = _saved(titan, folder / "alone", *settings, *_by_microbatch(), num_ranks=1, model=DEEPSEEK)
    job = _saved(titan, folder / "ZBV", *settings, *validated, model=DEEPSEEK)
    assert job.steps[-1]["zbpipe/optimizer_steps/validated"] > 0
    assert_trains_alike(job, alone)
    expected, found = (_expert_biases(folder / name / "step-4") for name in ("alone", "ZBV"))
    assert len(expected) == 5
    assert found.keys() == expected.keys()
    assert all(bias.any() and torch.equal(bias, expected[name]) for name, bias in found.items())
    return "works; the biases are bit-identical"


def _expert_biases(checkpoint: Path) -> dict[str, Tensor]:
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    biases = {name: torch.empty(each.size) for name, each in saved.items() if name.endswith("expert_bias_E")}
    dcp.load(biases, checkpoint_id=checkpoint, no_dist=True)
    return biases


def fills_waits(titan: Titan, folder: Path, *more: str, num_ranks: int = 4, model: str = LLAMA) -> str:
    settings = (*_TENSOR, *more, "--training.steps", "6")
    plain, filled = (
        titan.train(*pipeline("ZB"), *settings, *options, num_ranks=num_ranks, model=model)
        for options in ((), ("--zbpipe.fill-waits", "all"))
    )
    if model is LLAMA:
        assert_trains_alike(filled, titan.without_pipeline(*settings, num_ranks=num_ranks // 2), steps=6)
    assert plain.error is filled.error is None, filled.log
    assert len(plain.steps) == len(filled.steps) == 6
    assert re.search("fill_waits='all': the collectives in .*, and W's products fill them", filled.log), filled.log
    assert_values(filled.steps, plain.steps, losses=0, norms=0)
    return "works; losses and norms are bit-identical"


def _saved(titan: Titan, folder: Path, *arguments: str, num_ranks: int = 2, model: str = LLAMA) -> Job:
    job = titan.train(*arguments, num_ranks=num_ranks, model=model, checkpoints=folder)
    assert job.error is None, job.log
    return job


def lean(feature: str, model: str, **more: Any) -> Cell:
    return Cell(f"ZB, {feature}", "ZB", model=f"rows_config:{model}", **more)


def with_four_stages(feature: str, model: str, **more: Any) -> Cell:
    return lean(f"4 stages per rank, {feature}", model, options=_A_BLOCK_EACH, says=(_FOUR_STAGES,), **more)


def titans(model: str, error: str, *settings: str, on: int = 1) -> Callable[[Titan, Path], str]:
    """It fails without a pipeline, too, by TorchTitan's or torch's `error`."""
    outcome = f"fails in TorchTitan: {error}"
    return lambda titan, folder: fails(titan, error, outcome, *settings, on=on, model=model, say=1, began=None)


ROWS: dict[str, Cell | tuple[str, str, Callable[[Titan, Path], str]]] = {
    "eight ranks": lean(
        "Llama 3 with 16 blocks, 8 microbatches",
        "llama3_16_blocks",
        pipeline_ranks=8,
        microbatches=8,
        settings=("--training.local_batch_size", "8"),
    ),
    "dp_shard": with_four_stages(
        "FSDP2 (`fully_shard`), torch.compile", "llama3_8_blocks", settings=_SHARDED, ranks_per_stage=2, compiled=True
    ),
    "tp": with_four_stages(
        "tensor parallelism, torch.compile", "llama3_8_blocks", settings=_TENSOR, ranks_per_stage=2, compiled=True
    ),
    # The first of the blocks has no experts, so its rank compiles for both kinds.
    "moe": with_four_stages(
        "mixture of experts (DeepSeek V3), torch.compile", "deepseek_v3_8_blocks", compiled=True, recompilations=1
    ),
    "lora": lean(
        "Llama 3 with LoRA, fine-tuned on packed conversations",
        "llama3_lora_chat",
        settings=_FROZEN,
        tolerances={"learned": 0.02},
    ),
    "float8": lean("Llama 3 in emulated float8", "llama3_float8", alone=_by_microbatch()),
    "float8 lora": lean(
        "Llama 3 in emulated float8 with LoRA",
        "llama3_float8_lora",
        settings=_FROZEN,
        alone=_by_microbatch(),
        tolerances={"learned": 0.02},
    ),
    "gpt_oss": lean(
        "GPT-OSS with attention sinks, bfloat16, torch.compile",
        "gpt_oss_small",
        compiled=True,
        settings=_BFLOAT16,
        alone=(*_by_microbatch(), "--compile.enable"),
        tolerances=_BF16_EXPERTS,
    ),
    "gpt_oss float32": (
        "GPT-OSS in float32",
        "1 rank, no pipeline",
        titans("rows_config:gpt_oss_small", "RuntimeError: scatter(): Expected self.dtype to be equal to src.dtype"),
    ),
    "qwen3": lean(
        "Qwen 3 mixture of experts, sharded and replicated (HSDP)",
        "qwen3_moe_small",
        options=words("parallelism.pipeline_parallel_layers_per_stage 1"),  # also of embedding and head
        settings=_HYBRID,
        ranks_per_stage=4,
        alone=_by_microbatch(16),  # a batch of another size may be rounded, and so routed, in another way
    ),
    "muse": lean(
        "Muse Glimmer with images", "muse_glimmer_images", alone=_by_microbatch(), tolerances={"learned": 0.02}
    ),
    "kimi": lean(
        "Kimi with images, mixture of experts", "kimi_images", alone=_by_microbatch(), tolerances={"learned": 0.2}
    ),
    "auto": Cell(
        "Auto, Muse Glimmer with images",
        "Auto",
        model="rows_config:muse_glimmer_images",
        steps=7,
        options=("--zbpipe.profile-steps", "1"),
        alone=_by_microbatch(),
        says=("Auto: a step took",),
        tolerances={"learned": 0.02},
    ),
    "expert biases": (
        "ZBV, validated optimizer steps, mixture of experts with biases that balance their load",
        "2 ranks: pp=2",
        has_equal_expert_biases,
    ),
    "waits": ("ZB, tensor parallelism, weight gradients in waits for collectives", "4 ranks: pp=2 x tp=2", fills_waits),
    "waits, experts": (
        "ZB, mixture of experts (DeepSeek V3), FSDP2, tensor and expert parallelism, spmd_backend partial_dtensor,"
        " weight gradients in waits for collectives",
        "8 ranks: pp=2 x dp_shard=2 x tp=2, ep=2",
        lambda titan, folder: fills_waits(titan, folder, *_EXPERTS_APART, num_ranks=8, model=DEEPSEEK),
    ),
    "resume": ("1F1B, asynchronous checkpoints, resumed by ZB with 4 stages per rank", "2 ranks: pp=2", resumes),
    "export": ("ZBV, weights exported for Hugging Face", "2 ranks: pp=2", exports),
    "ep": (
        "expert parallelism over gloo (DeepSeek V3), spmd_types",
        "2 ranks: dp_shard=2 x ep=2, no pipeline",
        titans(
            DEEPSEEK,
            "RuntimeError: ProcessGroupGloo::alltoall: invalid tensor size",
            *(*_SHARDED, "--parallelism.expert_parallel_degree", "2"),
            on=2,
        ),
    ),
    "cp": (
        "context parallelism without FlexAttention, which has no backward on the CPU",
        "2 ranks: cp=2, no pipeline",
        titans(
            LLAMA,
            "NotImplementedError: spmd_types + CP is not supported with ScaledDotProductAttention",
            *("--parallelism.context_parallel_degree", "2"),
            on=2,
        ),
    ),
}


@pytest.mark.skipif(IS_02, reason="of torchtitan 0.3")
@pytest.mark.parametrize("name", ROWS)
def test_other_models_and_features(titan: Titan, tmp_path: Path, name: str) -> None:
    match ROWS[name]:
        case Cell() as cell:
            train_as_without_a_pipeline(titan, cell)
            rows[name] = row(cell, "works")
        case (feature, how, check):
            rows[name] = Row(feature, how, check(titan, tmp_path))


def test_the_page_says_what_was_seen(request: pytest.FixtureRequest) -> None:
    everything = CELLS.keys() | REFUSALS.keys() | (set() if IS_02 else ROWS.keys())
    compatibility.compare_when_all_ran(request, "name", everything, seen.keys() | rows.keys(), section)


SHORT = {
    True: '"Ranks" are processes.',
    False: 'All rows have selective checkpointing, TorchTitan\'s default. "Ranks" are processes.',
}
REFUSED = '"Refused" means at construction, before any message is sent, and in TorchTitan\'s jobs by every rank.'


def row(cell: Cell, outcome: str) -> Row:
    """A line of the page for a cell outside of the matrix: its ranks, and the other degrees of parallelism."""
    short = {SHARD: "dp_shard=", REPLICATE: "dp_replicate=", _TENSOR[0]: "tp="}
    degrees = [short[name] + degree for name, degree in pairwise(cell.settings) if name in short]
    num_ranks = cell.pipeline_ranks * cell.ranks_per_stage
    how = f"{num_ranks} ranks: {' x '.join([f'pp={cell.pipeline_ranks}', *degrees])}"
    return Row(cell.feature, how, outcome)


def table_of_matrix() -> compatibility.Table:
    columns = ["schedule", *(", ".join(name.split()[1:]) for name in MATRIX)]
    heading = "Schedule, activation checkpointing, torch.compile"
    about = 'Llama 3. "Compiled" means TorchTitan\'s `--compile.enable`: every block, by Inductor, and the loss.'
    return compatibility.Table(heading, about, columns, [["ZBV", *(seen[name] for name in MATRIX)]])


def section() -> Section:
    own = compatibility.words("torchtitan 0.2" if IS_02 else "torchtitan 0.3")
    combinations = [row(cell, seen[name]) for name, cell in COMBINATIONS.items()]
    about = compatibility.words("other models")
    others = (
        [] if IS_02 else [compatibility.features("Other models and features", about, [rows[name] for name in ROWS])]
    )
    refused = [Row(feature, how, seen[name]) for name, (feature, how, _) in REFUSALS.items()]
    return Section(
        compatibility.target("torchtitan"),
        f"Tested with {compatibility.seen_with('torch', 'torchtitan')} {own}",
        compatibility.words("torchtitan"),
        [
            table_of_matrix(),
            compatibility.features("More features", SHORT[IS_02], combinations),
            *others,
            compatibility.features("What does not work", "" if IS_02 else REFUSED, refused),
        ],
    )
