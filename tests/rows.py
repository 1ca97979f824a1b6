"""Models and features of TorchTitan 0.3 that the demo lacks: the CPU runs some, others fail in TorchTitan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import Cell, row, train_as_without_a_pipeline
from compatibility import Row
from safetensors.torch import load_file
from titan_jobs import DEEPSEEK, LLAMA, STEPS, Job, Titan, assert_trains_alike, grad_norms, pipeline
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

ABOUT = """\
Qwen, GPT-OSS, Kimi and Muse Glimmer are debug models. Qwen and Muse Glimmer have half of their blocks, Qwen and GPT-OSS
have smaller experts. Attention with sinks and the attention of images and of packed conversations have dense masks in
place of FlexAttention. LoRA has `--parallelism.spmd_backend partial_dtensor`: with its default, TorchTitan 0.3.0 also
trains the frozen weights. With tensor parallelism the loss is parallel as well.
"""
"""What the page says before the table of `ROWS`."""

Check = Callable[[Titan, Path], Row]
"""Trains what a row is about, in an empty folder, and returns the row after it looked that the outcome is right."""

_LONGER = ("--training.steps", "4")
_REPLICATED = ("--parallelism.data_parallel_replicate_degree", "2")
_SHARDED = ("--parallelism.data_parallel_shard_degree", "2")
# By default TorchTitan 0.3.0 makes new parameters of those that LoRA has frozen, and trains them.
_FROZEN = ("--parallelism.spmd_backend", "partial_dtensor")
_BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")


def _by_microbatch(num_sequences: int = 4) -> tuple[str, ...]:
    """Without a pipeline: one microbatch after the other, because float8 has one scale for each product."""
    return ("--training.local_batch_size", "1", "--training.global_batch_size", str(num_sequences))


def _trains(cell: Cell) -> Check:
    def check(titan: Titan, folder: Path) -> Row:
        train_as_without_a_pipeline(titan, cell)
        return row(cell, "works")

    return check


def _fails_in_titan(feature: str, how: str, model: str, *settings: str, num_ranks: int = 1, error: str) -> Check:
    """Without a pipeline, by TorchTitan's or torch's `error`."""

    def check(titan: Titan, folder: Path) -> Row:
        job = titan.train(*settings, num_ranks=num_ranks, model=model)
        assert any(error in each for each in job.errors), job.log
        assert job.steps == ()
        return Row(feature, f"{how}, no pipeline", f"fails in TorchTitan: {error}")

    return check


def _resumes(titan: Titan, folder: Path) -> Row:
    first = _saved(titan, folder / "first", *pipeline("ZBV"), "--checkpoint.async_mode", "async", *_LONGER)
    shutil.copytree(folder / "first" / "step-2", folder / "resumed" / "step-2")
    resumed = _saved(titan, folder / "resumed", *pipeline("ZBVLean", 4), *_LONGER, num_ranks=4)
    assert [step["step"] for step in resumed.steps] == [3, 4]
    for job in (first, resumed):
        for name, tolerance in (("loss_metrics/global_avg_loss", 1e-5), ("grad_norm", 1e-4)):
            expected = [step[name] for step in titan.without_pipeline(*_LONGER).steps][-len(job.steps) :]
            assert [step[name] for step in job.steps] == pytest.approx(expected, rel=tolerance)
    return Row("ZBV, asynchronous checkpoints, resumed by ZBVLean", "2 ranks: pp=2, then 4 ranks: pp=4", "works")


def _exports(titan: Titan, folder: Path) -> Row:
    """Adam makes steps of one size of gradients near zero, whose signs rounding decides; so weights are compared."""
    as_hf = ("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only")
    _saved(titan, folder / "ZBV", *pipeline("ZBV"), *as_hf)
    _saved(titan, folder / "alone", *as_hf, num_ranks=1)
    exported, expected = (_exported(folder / name / f"step-{STEPS}") for name in ("ZBV", "alone"))
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        assert (weight - expected[name]).norm() < 1e-4 * expected[name].norm(), name
    return Row("ZBV, weights exported for Hugging Face", "2 ranks: pp=2", "works")


def _exported(folder: Path) -> dict[str, Tensor]:
    return {name: weight for file in folder.rglob("*.safetensors") for name, weight in load_file(file).items()}


def _plans_by_itself(titan: Titan, folder: Path) -> Row:
    longer = ("--training.steps", "7")
    model = "rows_config:muse_glimmer_images"
    job = titan.train(*longer, *pipeline("Auto"), "--zbpipe.profile-steps", "1", num_ranks=2, model=model)
    expected = titan.without_pipeline(*longer, *_by_microbatch(), model=model)
    assert (job.error, expected.error) == (None, None), job.log
    assert "Auto: a step took" in job.log
    assert job.losses == pytest.approx(expected.losses, rel=1e-5)
    assert grad_norms(job) == pytest.approx(grad_norms(expected), rel=1e-4)
    return Row("Auto, Muse Glimmer with images", "2 ranks: pp=2", "works")


def _has_equal_expert_biases(titan: Titan, folder: Path) -> Row:
    # Neither steps that are logged nor those before a checkpoint run ahead of their validation.
    settings = (
        *("--training.steps", "4", "--metrics.log_freq", "4", "--checkpoint.interval", "10"),
        *("--training.max_norm", "1e6"),
    )
    jobs = {
        name: _saved(titan, folder / name, *settings, *own, num_ranks=1 if name == "alone" else 2, model=DEEPSEEK)
        for name, own in (
            ("alone", _by_microbatch()),
            ("ZBV", (*pipeline("ZBV"), "--zbpipe.optimizer-step", "validated")),
        )
    }
    assert jobs["ZBV"].steps[-1]["zbpipe/optimizer_steps/validated"] > 0
    for job in jobs.values():
        assert_trains_alike(job, jobs["alone"])
    found = {name: _expert_biases(folder / name / "step-4") for name in jobs}
    assert len(found["alone"]) == 5
    for biases in found.values():
        assert biases.keys() == found["alone"].keys()
        assert all(bias.any() and torch.equal(bias, found["alone"][name]) for name, bias in biases.items())
    return Row(
        "ZBV, validated optimizer steps, mixture of experts with biases that balance their load",
        "2 ranks: pp=2",
        "works; the biases are bit-identical",
    )


def _expert_biases(checkpoint: Path) -> dict[str, Tensor]:
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    biases = {name: torch.empty(each.size) for name, each in saved.items() if name.endswith("expert_bias_E")}
    dcp.load(biases, checkpoint_id=checkpoint, no_dist=True)
    return biases


def _saved(titan: Titan, folder: Path, *arguments: str, num_ranks: int = 2, model: str = LLAMA) -> Job:
    job = titan.train(*arguments, num_ranks=num_ranks, model=model, checkpoints=folder)
    assert job.error is None, job.log
    return job


ROWS: dict[str, Check] = {
    "eight ranks": _trains(
        Cell(
            "ZBVLean, Llama 3 with 16 blocks, 8 microbatches",
            schedule="ZBVLean",
            model="rows_config:llama3_deep",
            pipeline_ranks=8,
            microbatches=8,
            settings=("--training.local_batch_size", "8"),
        )
    ),
    "lora": _trains(
        Cell(
            "ZBVLean, Llama 3 with LoRA, fine-tuned on packed conversations",
            schedule="ZBVLean",
            model="rows_config:llama3_lora_chat",
            settings=_FROZEN,
            tolerances={"learned": 0.02},
        )
    ),
    "float8": _trains(
        Cell(
            "ZBVLean, Llama 3 in emulated float8",
            schedule="ZBVLean",
            model="rows_config:llama3_float8",
            alone=_by_microbatch(),
        )
    ),
    "float8 lora": _trains(
        Cell(
            "ZBVLean, Llama 3 in emulated float8 with LoRA",
            schedule="ZBVLean",
            model="rows_config:llama3_float8_lora",
            settings=_FROZEN,
            alone=_by_microbatch(),
            tolerances={"learned": 0.02},
        )
    ),
    "gpt_oss": _trains(
        Cell(
            "ZBVLean, GPT-OSS with attention sinks, bfloat16, torch.compile",
            schedule="ZBVLean",
            compiled=True,
            model="rows_config:gpt_oss_small",
            settings=_BFLOAT16,
            alone=(*_by_microbatch(), "--compile.enable"),
            tolerances={"losses": 1e-4, "norms": 1e-3},
        )
    ),
    "gpt_oss float32": _fails_in_titan(
        "GPT-OSS in float32",
        "1 rank",
        "rows_config:gpt_oss_small",
        error="RuntimeError: scatter(): Expected self.dtype to be equal to src.dtype",
    ),
    "qwen3": _trains(
        Cell(
            "ZBVLean, Qwen 3 mixture of experts, sharded and replicated (HSDP)",
            schedule="ZBVLean",
            model="rows_config:qwen3_moe_small",
            settings=(*_REPLICATED, *_SHARDED),
            ranks_per_stage=4,
        )
    ),
    "muse": _trains(
        Cell(
            "ZBVLean, Muse Glimmer with images",
            schedule="ZBVLean",
            model="rows_config:muse_glimmer_images",
            alone=_by_microbatch(),
            tolerances={"learned": 0.02},
        )
    ),
    "kimi": _trains(
        Cell(
            "ZBVLean, Kimi with images, mixture of experts",
            schedule="ZBVLean",
            model="rows_config:kimi_images",
            alone=_by_microbatch(),
            tolerances={"learned": 0.2},
        )
    ),
    "auto": _plans_by_itself,
    "expert biases": _has_equal_expert_biases,
    "resume": _resumes,
    "export": _exports,
    "ep": _fails_in_titan(
        "expert parallelism over gloo (DeepSeek V3)",
        "2 ranks: dp_shard=2 x ep=2",
        DEEPSEEK,
        *(*_SHARDED, "--parallelism.expert_parallel_degree", "2"),
        num_ranks=2,
        error="RuntimeError: ProcessGroupGloo::alltoall: invalid tensor size",
    ),
    "cp": _fails_in_titan(
        "context parallelism without FlexAttention, which has no backward on the CPU",
        "2 ranks: cp=2",
        LLAMA,
        *("--parallelism.context_parallel_degree", "2"),
        num_ranks=2,
        error="NotImplementedError: spmd_types + CP is not supported with ScaledDotProductAttention",
    ),
}
