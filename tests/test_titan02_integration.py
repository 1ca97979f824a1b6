"""The TOML files in titan_integration/titan02 in TorchTitan 0.2, what memory.py tells of them, and the script."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from forks import on_forks

from zbpipe.registry import resolve
from zbpipe.runtime.options import Options
from zbpipe.titan import check

try:
    if not version("torchtitan").startswith("0.2."):
        pytest.skip("needs torchtitan 0.2", allow_module_level=True)
except PackageNotFoundError:
    pytest.skip("needs torchtitan 0.2", allow_module_level=True)

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "titan_integration" / "titan02").glob("*.toml"))
LARGE = [file for file in FILES if file.stem != "llama3_debug"]


def import_titan() -> None:
    from zbpipe.titan import cpu

    cpu.stand_in()
    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


@pytest.fixture(scope="module")
def with_titan() -> Iterator[Callable[..., Any]]:
    """Calls a function of this file in a process of its own: TorchTitan fixes its device when it is imported."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=import_titan) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=200)


class Told(NamedTuple):
    """What the first lines of a file say."""

    pp: int
    tp: int
    fsdp: int
    smallest: str
    gib: int


def told_by(file: Path) -> Told:
    text = " ".join(line.removeprefix("# ") for line in file.read_text().split("\n\n")[0].splitlines())
    found = re.search(r"PP (\d+)(?: x TP (\d+))?(?: x FSDP (\d+))? on .*?(MI\d+X).*GiB on the worst GPU: (\d+)\.", text)
    assert found is not None
    pp, tp, fsdp, smallest, gib = found.groups(default="1")
    return Told(int(pp), int(tp), int(fsdp), smallest, int(gib))


def parse(*arguments: str) -> Any:
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(list(arguments))


def look_at(file: Path) -> tuple[Told, bool]:
    """What the file's first lines should say, and whether its smallest GPU is large enough."""
    from zbpipe.titan import memory

    config, told = parse("--job.config_file", str(file)), told_by(file)
    check.check(config, Options())
    parallelism = config.parallelism
    pp, tp = parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree
    worst = max(need.total for need in memory.needs(config, pp * tp * told.fsdp)) / memory.GIB
    fits = worst <= memory.USABLE * memory.GPUS[told.smallest]
    return Told(pp, tp, told.fsdp, told.smallest, round(worst)), fits


@pytest.mark.parametrize("file", LARGE, ids=lambda file: file.stem)
def test_a_file(with_titan: Callable[..., Any], file: Path) -> None:
    assert with_titan(look_at, file) == (told_by(file), True)


def parameters_by_rank(file: Path) -> tuple[list[int], list[int]]:
    """As memory.py tells, and of the modules by TorchTitan's cut of the whole model, without data."""
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
    from torchtitan.protocols.train_spec import get_train_spec

    from zbpipe.titan import memory

    config, told = parse("--job.config_file", str(file)), told_by(file)
    needs = memory.needs(config, told.pp * told.tp * told.fsdp)
    spec = get_train_spec(config.model.name)
    args = spec.model_args[config.model.flavor]
    with torch.device("meta"):
        model = spec.model_cls(args)
    placement = resolve(config.parallelism.pipeline_parallel_schedule).place(told.pp)
    cut = generate_llm_fqn_per_model_part(placement.num_stages, args.n_layers)
    stages = [sum(each.numel() for name in names for each in model.get_submodule(name).parameters()) for names in cut]
    return (
        [need.parameters for need in needs],
        [sum(stages[stage] for stage in placement.stages_on(rank)) for rank in range(told.pp)],
    )


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_405b"])
def test_parameters_by_rank(with_titan: Callable[..., Any], name: str) -> None:
    told, counted = with_titan(parameters_by_rank, ROOT / "titan_integration" / "titan02" / f"{name}.toml")
    assert told == counted


def refuse_float32(file: Path) -> str:
    from zbpipe.titan import memory

    config = parse("--job.config_file", str(file), "--training.dtype", "float32")
    assert memory.needs(config, 16)
    with pytest.raises(ValueError, match=r"TorchTitan 0\.2 has mixed precision only with FSDP") as refused:
        memory.needs(config, 8)
    return str(refused.value)


def test_float32_for_want_of_fsdp(with_titan: Callable[..., Any]) -> None:
    refused = with_titan(refuse_float32, ROOT / "titan_integration" / "titan02" / "llama3_8b.toml")
    assert refused.endswith("take twice as many GPUs, or --training.dtype bfloat16")


def kept_by_a_block(how: tuple[int, str]) -> tuple[float, float, float, float]:
    """Elements for each token that a block of the debug model keeps from F to I and from I to W, counted and told."""
    import harness
    from torch.utils._pytree import tree_leaves
    from torchtitan.models import llama3
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    from zbpipe.runtime._torch import live
    from zbpipe.runtime.split.layers import defer_weights
    from zbpipe.runtime.split.products import WeightGradients
    from zbpipe.titan import memory

    tp, checkpointing = how
    # The tensors inside of DTensors and of pending collectives, which have storages of their own.
    live.tree_leaves = lambda values: [inner(inner(leaf)) for leaf in tree_leaves(values)]  # type: ignore
    # The CPU's attention keeps other things than a GPU's, so the result of a GPU's is added below.
    ScaledDotProductAttentionWrapper.forward = attend_to_all
    dist.init_process_group("fake", rank=0, world_size=tp)
    torch.set_default_dtype(torch.bfloat16)
    tokens = 256
    model, args = debug_model(tp, checkpointing, tokens)
    with torch.device("meta"):
        told = memory.block_of_titan_02(llama3.Transformer(args).layers["0"])
    block, gradients = model.layers["0"], WeightGradients()
    defer_weights(block, gradients)
    x = torch.randn(1, tokens // tp, told.dim, requires_grad=True)
    frequencies = model.freqs_cis[:tokens]
    block(x, frequencies, None, None).sum().backward()  # all gradients are there
    with harness.meter(torch.device("cpu")) as bytes_:
        with gradients.record() as pending:
            y = block(x, frequencies, None, None)
            after_f = bytes_.live
            dy = torch.ones_like(y)
            y.backward(dy)
        del y, dy
        after_i = bytes_.live
    assert len(pending) == 7
    dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    attention = told.queries / tp if checkpointing == "selective" else 0
    scale = 2 * tokens
    return (
        after_f / scale + attention,
        told.kept_by_f(checkpointing, tp),
        after_i / scale,
        told.kept_by_i(tp),
    )


def debug_model(tp: int, checkpointing: str, tokens: int) -> tuple[Any, Any]:
    """Llama 3's debug model on one of `tp` ranks, and its arguments."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3

    config = parse("--parallelism.tensor_parallel_degree", str(tp), "--activation_checkpoint.mode", checkpointing)
    config.activation_checkpoint.selective_ac_option = "op"
    config.training.seq_len = tokens
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=tp)
    dims.build_mesh()
    args = replace(llama3.llama3_args["debugmodel"], n_kv_heads=8)
    args.update_from_config(config)
    return llama3.parallelize_llama(llama3.Transformer(args), dims, config), args


def attend_to_all(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **unused: Any) -> torch.Tensor:
    return q + (k.sum(1, keepdim=True) + v.sum(1, keepdim=True))


def inner(leaf: Any) -> Any:
    return getattr(leaf, "_local_tensor", getattr(leaf, "elem", leaf))


def ask_for_blocks(hows: Sequence[tuple[int, str]]) -> list[tuple[float, float, float, float]]:
    return on_forks(kept_by_a_block, hows)  # a process for each, because meshes stay behind in caches


def test_what_a_block_keeps(with_titan: Callable[..., Any]) -> None:
    """The arithmetic of activations, against what TorchTitan's block under zbpipe's split leaves alive."""
    hows = [(tp, checkpointing) for tp in (1, 8) for checkpointing in ("selective", "full")]
    for counted_f, told_f, counted_i, told_i in with_titan(ask_for_blocks, hows):
        assert counted_f == told_f
        assert counted_i == told_i


def test_training_on_the_cpu(tmp_path: Path) -> None:
    """Two processes by the script, torchrun and TorchTitan's trainer."""
    result = subprocess.run(
        [
            str(ROOT / "titan_integration" / "run_train.sh"),
            *("--job.dump_folder", str(tmp_path), "--training.steps", "4"),
            *("--training.local_batch_size", "4", "--training.seq_len", "64"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert "Using zbpipe's pipeline schedule ZBV with 4 microbatches" in result.stdout + result.stderr
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss_metrics/global_avg_loss"] for step in steps]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
