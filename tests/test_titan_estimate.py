"""What `zbpipe estimate` reads of TorchTitan's configs: operations, bytes and degrees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from titan_jobs import require_titan

require_titan("0.3.0")
pytestmark = pytest.mark.long
ROOT = Path(__file__).parent.parent

PROGRAM = """
import json, sys
import torch
from dataclasses import replace
from click.testing import CliRunner
from zbpipe import OpKind, estimate
from zbpipe.cli import main
from zbpipe.schedule.registry import resolve
from zbpipe.frameworks.titan.command_line import read_workload
from zbpipe.estimation.estimate import memory_by_rank
from zbpipe.estimation.workload import Degrees

def bytes_of(layer):
    return [layer.activations, layer.waits, *(dict(layer.working)[kind] for kind in (OpKind.F, OpKind.I, OpKind.B))]

module, found = "titan_integration.llama3", {}
found["refusals"] = []
for arguments in json.loads(sys.argv[1]):
    command = ["estimate", "--module", module, "--gpus", "64", "--device", "H100", *arguments]
    result = CliRunner().invoke(main, command)
    found["refusals"].append([result.exit_code, result.stderr.splitlines()[-1]])
named = ["--module", module, "--config", "llama3_70b"]
job = read_workload(named, 64)
block = job.layers[1]
found["block"] = [block.f, block.i, block.w, block.parameters]
found["job"] = [str(job.degrees), job.microbatches, job.schedule, str(job.checkpointing), job.parameters]
rows = {step.schedule: step for step in estimate(job, "MI300X", only=["ZBV"], plans=False).steps}
found["memory"] = [rows["ZBV"].memory.total, memory_by_rank(job).worst]
other = job.on(Degrees(8, 4, 2))
found["other"] = [other.microbatches, other.global_tokens == job.global_tokens, other.layers[1].f == block.f]
shared = [job.on(Degrees(4, tensor, 16 // tensor // context, 1, context)) for tensor, context in ((4, 2), (2, 1))]
found["messages"] = [[each.message_bytes, each.degrees.sharing] for each in (job, *shared)]
counted = read_workload([*named, "--parallelism.tensor_parallel_degree", "1"], 64)
weighted = "--parallelism.pipeline_parallel_first_stage_less_layers 3".split()
ends = [read_workload([*named, *more], 64) for more in ([], weighted)]
placement = resolve("ZBV").place(4)
found["ends"] = [list(map(len, each.split(placement, resolve("ZBV")))) for each in ends]
from zbpipe.frameworks.titan import models
kinds = [read_workload(["--module", "llama3", "--config", f"llama3_debugmodel{kind}"], 8) for kind in ("", "_float8")]
found["float8"] = [[each.float8 for each in kinds], kinds[0].layers == kinds[1].layers]
experts = ["--module", "qwen3", "--config", "qwen3_moe_debug", "--parallelism.pipeline_parallel_degree", "2"]
found["experts"] = [(moe := read_workload(experts, 4)).words, list(map(bytes_of, moe.layers[1:-1]))]
images = ["--module", "rows_config", "--config", "muse_glimmer_images", "--parallelism.pipeline_parallel_degree", "2"]
seeing = read_workload(images, 2)
first = seeing.layers[0]
found["images"] = [first.modules, first.f / seeing.tokens, first.i == first.w == first.f, first.parameters]
found["images"].append(seeing.words)
try:
    models.require_decoder(torch.nn.Linear(1, 1))
except ValueError as error:
    found["no decoder"] = str(error)
from zbpipe.frameworks.titan import counting
counting._on_meta = lambda block, x, *args: None
guessed = read_workload([*named, "--parallelism.tensor_parallel_degree", "1"], 64)
found["bytes"] = [bytes_of(each.layers[1]) for each in (counted, guessed)]
found["guessed"] = [guessed.layers[1].f == block.f, "read values" in guessed.words]
print(json.dumps(found))
"""


REFUSED = {
    ("--config", "llama3_7b"): "titan_integration.llama3 has no config 'llama3_7b'; it has llama3_debug, ",
    ("--gpus", "48", "--config", "llama3_70b"): "PP x TP x CP x replicas = 32: use 32 or 64",
    ("--gpus", "16", "--config", "llama3_70b"): "PP x TP x CP x replicas = 32: use 32",
    ("--module", "qwen3", "--config", "qwen3_0_6b", "--parallelism.pipeline_parallel_degree", "2"): (
        "TorchTitan refuses this job: Weight tying is not supported with Pipeline Parallel."
    ),
}
"""Arguments of `zbpipe estimate`, and what it says."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Of one process that imports TorchTitan."""
    # As with the installed command, the current folder is not on Python's path.
    command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(list(REFUSED))]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # of rows_config
    environment = os.environ | {"PYTHONPATH": path}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    answers: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answers


def test_operations_of_a_block(found: dict[str, Any]) -> None:
    """Two for each weight and token, and half of the attention's two products; I repeats every second product."""
    f, i, w, parameters = found["block"]
    tokens, dim, hidden, kv = 8192, 8192, 28672, 1024
    products = 2 * tokens * (2 * dim * dim + 2 * dim * kv + 3 * dim * hidden)
    attention = 2 * tokens * tokens * dim
    assert (f, w) == (products + attention, products)
    again = 2 * tokens * (dim * dim + dim * hidden)  # out and up
    assert i == products + 2.5 * attention + again
    assert parameters == products / (2 * tokens) + 2 * dim


def test_the_job(found: dict[str, Any]) -> None:
    assert found["job"][:4] == ["PP 4 x TP 8 x FSDP 2", 16, "ZBV", "selective"]
    assert found["job"][4] == pytest.approx(70.6e9, rel=0.01)
    assert found["other"] == [16, True, True]
    # Hidden states of 8192 tokens, 8192 wide, in two bytes, of which each GPU sends its share to one other.
    assert found["messages"] == [[2 * 8192 * 8192 / sharing, sharing] for sharing in (8, 8, 2)]
    by_work, weighted = found["ends"]
    assert weighted == [9, 11, 11, 11, 10, 10, 10, 10] != by_work  # 82 layers, of which the embedding counts as 3


def test_memory_of_the_worst_rank_is_that_of_the_table(found: dict[str, Any]) -> None:
    in_table, by_rank = found["memory"]
    assert in_table == pytest.approx(by_rank, rel=1e-6)


def test_a_layer_that_cannot_run_on_meta_tensors(found: dict[str, Any]) -> None:
    """It counts as a Llama block, which it is here. Such formulas and meta tensors agree."""
    counted, guessed = found["bytes"]
    assert guessed == pytest.approx(counted, rel=0.01)
    assert found["guessed"] == [True, True]


def test_a_model_with_experts(found: dict[str, Any]) -> None:
    """TorchTitan's own config, without what its trainer wants to be said about a pipeline."""
    words, bytes_of_blocks = found["experts"]
    assert "read values" in words
    assert all(activations > 0 for activations, *_ in bytes_of_blocks)


def test_float8_is_counted_as_plain_products_on_any_machine(found: dict[str, Any]) -> None:
    """TorchTitan asks for a device with float8 when it makes the config, and meta tensors show no float8 products."""
    assert found["float8"] == [[False, True], True]


def test_encoders_of_images(found: dict[str, Any]) -> None:
    """They count on the first stage, with two operations for each weight and token in each of F, I and W."""
    modules, operations, are_equal, parameters, words = found["images"]
    assert modules == ["tok_embeddings", "vision_projection", "vision_encoder", "vision_adapter"]
    biases_and_norms = 0.1
    embedding = 2048 * 256
    assert operations == pytest.approx(2 * (parameters - embedding), rel=biases_and_norms)
    assert are_equal
    assert "vision_projection, vision_encoder, vision_adapter from the weights, with one patch per token" in words


def test_what_titan_refuses_is_told_in_one_line(found: dict[str, Any]) -> None:
    for words, (code, line) in zip(REFUSED.values(), found["refusals"], strict=True):
        assert code == 2
        assert words in line
    assert found["no decoder"].startswith("Linear has no tok_embeddings, layers, norm, lm_head: only TorchTitan's")
