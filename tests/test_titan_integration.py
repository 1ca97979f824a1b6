"""The configs in titan_integration/, built at their full size without weights, and the script that launches them."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Variables of the environment are keyword arguments.

from __future__ import annotations

import hashlib
import io
import json
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import on_forks
from titan_jobs import require_titan

from zbpipe.actions import parse, validate_lowered
from zbpipe.ir import OpKind
from zbpipe.registry import generate, lookup
from zbpipe.runtime import _torch
from zbpipe.runtime.options import Options
from zbpipe.validation import validate

require_titan("0.3.0")
ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "titan_integration" / "run_train.sh"
PER_EDGE = "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P"
"""torch has it from 2.15 on."""
CONFIGS = (
    "llama3_debug",
    "llama3_8b",
    "llama3_8b_no_downloads",
    "llama3_70b",
    "llama3_70b_80gb",
    "llama3_405b",
    "llama3_405b_288gb",
    "llama3_405b_80gb",
)


# What runs in a process of its own, which imports TorchTitan once. It forks for every rank, because meshes stay behind
# in caches when a process group is destroyed.


def import_titan() -> None:
    from zbpipe.titan import cpu

    cpu.stand_in()
    from zbpipe.titan import _titan03

    _titan03.plug_in(Options(), on_cpu=True)
    torch.set_num_threads(1)
    import titan_integration.llama3  # noqa: F401

    sys.path.append(str(ROOT / "benchmarks"))
    logging.disable(logging.WARNING)


@pytest.fixture(scope="module")
def with_titan() -> Iterator[Callable[..., Any]]:
    """Calls a function of this file in the process that has TorchTitan."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=import_titan) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@dataclass(frozen=True)
class Built:
    """What a pipeline rank has when TorchTitan has cut the model."""

    stages: tuple[int, ...]
    modules: tuple[tuple[str, ...], ...]
    """By stage."""
    parameters: int
    on_one_gpu: int
    """The same, of those that one GPU keeps after TP and FSDP."""
    lowered: str
    """A hash of the table with sends, receives and unshards."""
    findings: tuple[str, ...]
    """What is wrong with that table; looked for on rank 0."""
    microbatches: int
    gathered: bool
    """Whether FSDP leaves the blocks gathered after a forward."""


@dataclass(frozen=True)
class Job:
    """A config, and what becomes of it."""

    schedule: str
    pp: int
    tp: int
    gpus: int
    gpu_memory: float
    """GiB of the smallest GPU that the config is for."""
    usable: float
    doc: str
    num_layers: int
    needs: list[Any]
    """`zbpipe.titan.memory.needs`."""
    ranks: dict[int, Built]
    """By place in the pipeline."""


_config: Any = None
_model: Any = None


def build_job(name: str, places: Sequence[int] | None = None) -> Job:
    """All pipeline ranks or those at some places, at the full size of the job, from meta tensors."""
    global _config, _model  # noqa: PLW0603 (the forks have no other way to it)
    from torchtitan.distributed import utils

    from titan_integration import llama3
    from zbpipe.titan import _titan03, check, memory

    function = getattr(llama3, name)
    hardware = llama3.HARDWARE[name]
    _config = replace(function())  # TorchTitan's own checks, which the CPU's adaption would satisfy
    check.check(_config, Options())
    needs = memory.needs(_config, hardware.gpus)
    _titan03.adapt_to_cpu(_config)
    utils.set_spmd_backend(_config.parallelism.spmd_backend)
    _config.model_spec.model.update_from_config(config=_config)
    with torch.device("meta"):
        _model = _config.model_spec.model.build()
    parallelism = _config.parallelism
    pp, tp = parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree
    places = range(pp) if places is None else places
    # The last of the ranks at each place of the pipeline, so that TP and FSDP are not at 0.
    ranks = [(hardware.gpus, (place + 1) * hardware.gpus // pp - 1) for place in places]
    return Job(
        parallelism.pipeline_parallel_schedule,
        pp,
        tp,
        hardware.gpus,
        memory.GPUS[hardware.kind],
        memory.USABLE,
        function.__doc__,
        len(_config.model_spec.model.layers),
        needs,
        dict(zip(places, on_forks(build_rank, ranks), strict=True)),
    )


def build_rank(job: tuple[int, int]) -> Built:
    """As `Trainer.__init__` does, up to where the weights would be made."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import ParallelDims

    from zbpipe.titan import _titan03

    num_gpus, rank = job
    dist.init_process_group("fake", rank=rank, world_size=num_gpus)
    dims = ParallelDims.from_config(_config.parallelism, num_gpus)
    dims.build_mesh()
    spec = _config.model_spec
    schedule, parts, has_first, has_last = _titan03.pipeline_with(spec.pipelining_fn, Options())(
        _model,
        parallel_dims=dims,
        training=_config.training,
        parallelism=_config.parallelism,
        compile_config=_config.compile,
        ac_config=_config.activation_checkpoint,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=_config.loss.build(compile_config=_config.compile),
    )
    place = dims.get_mesh("pp").get_local_rank()
    assert rank // (num_gpus // dims.pp) == place
    stages = tuple(stage.stage_index for stage in _torch.stages_of(schedule))
    assert (has_first, has_last) == (0 in stages, 2 * dims.pp - 1 in stages)
    table = _torch.lowered_table(schedule)
    blocks = [block for part in parts for block in part.layers.values()]
    assert all(isinstance(block, FSDPModule) for block in blocks)
    return Built(
        stages,
        tuple(modules_of(part) for part in parts),
        sum(parameter.numel() for part in parts for parameter in part.parameters()),
        sum(parameter.to_local().numel() for part in parts for parameter in part.parameters()),
        hashlib.sha256(table.encode()).hexdigest(),
        tuple(map(str, validate_lowered(parse(table)))) if place == 0 else (),
        schedule._n_microbatches,
        not any(block._get_fsdp_state()._fsdp_param_group._reshard_after_forward for block in blocks),
    )


def modules_of(part: Any) -> tuple[str, ...]:
    ends = [name for name in ("tok_embeddings", "norm", "lm_head") if getattr(part, name) is not None]
    layers = [f"layers.{number}" for number in part.layers]
    return (*ends[: "tok_embeddings" in ends], *layers, *ends["tok_embeddings" in ends :])


# The configs of the 405B model differ in schedule, checkpointing and FSDP, not in how it is cut: all ranks of one.
SOME = (0, 15)
IN_SHORT = ("llama3_debug", "llama3_70b")
"""The jobs that `make test` builds, too."""
JOBS = [(name, None) for name in CONFIGS[:-2]] + [(name, SOME) for name in CONFIGS[-2:]]


@pytest.mark.parametrize(
    ("name", "at"), [pytest.param(*job, id=job[0], marks=() if job[0] in IN_SHORT else pytest.mark.zoo) for job in JOBS]
)
def test_a_job_at_its_full_size(with_titan: Callable[..., Any], name: str, at: Sequence[int] | None) -> None:
    job: Job = with_titan(build_job, name, at)
    placement = lookup(job.schedule).place(job.pp)
    assert {place: built.stages for place, built in job.ranks.items()} == {
        place: placement.stages_on(place) for place in at or range(job.pp)
    }
    by_stage = {s: names for built in job.ranks.values() for s, names in zip(built.stages, built.modules, strict=True)}
    assert all(by_stage.values())
    if at is None:
        modules = [name for stage in sorted(by_stage) for name in by_stage[stage]]
        layers = [f"layers.{number}" for number in range(job.num_layers)]
        assert modules == ["tok_embeddings", *layers, "norm", "lm_head"]

    schedule = generate(job.schedule, job.pp, 4 * job.pp)
    assert validate(schedule) == []
    assert all(any(op.kind is OpKind.W for op in ops) for ops in schedule)
    for built in job.ranks.values():
        assert (built.microbatches, built.findings, built.gathered) == (4 * job.pp, (), True)
    assert len({built.lowered for built in job.ranks.values()}) == 1
    require_memory_as_told(name, job)


def require_memory_as_told(name: str, job: Job) -> None:
    """The parameters are those of the modules that were built, and the docstring tells the sum."""
    fsdp = job.gpus // (job.pp * job.tp)
    for place, built in job.ranks.items():
        need = job.needs[place]
        assert need.parameters == built.parameters
        # TP does not cut the norms.
        assert built.on_one_gpu * fsdp * job.tp == pytest.approx(need.parameters, rel=1e-3)
        assert need.weights == pytest.approx(built.on_one_gpu * (6 * fsdp + 12), rel=1e-3)
    worst = max(need.total for need in job.needs) / 2**30
    assert worst <= job.usable * job.gpu_memory
    if name not in ("llama3_debug", "llama3_8b_no_downloads"):
        told = re.search(r"(\d+) GiB", job.doc)
        assert told is not None
        assert int(told[1]) == round(worst)


def places(shard: tuple[int, int]) -> list[tuple[int, int, list[int], int]]:
    """Of a half of the ranks: rank, place in the pipeline, the TP group, the rank that reports the loss."""
    from torchtitan.distributed import ParallelDims

    from zbpipe.titan import _titan03

    num_gpus, first = shard
    found = []
    for rank in range(first, num_gpus, 2):
        dist.init_process_group("fake", rank=rank, world_size=num_gpus)
        dims = ParallelDims.from_config(_config.parallelism, num_gpus)
        dims.build_mesh()
        tp = dist.get_process_group_ranks(dims.get_mesh("tp").get_group())
        reports = _titan03.rank_with_loss(dims, _config.parallelism.pipeline_parallel_schedule)
        found.append((rank, dims.get_mesh("pp").get_local_rank(), tp, reports))
        dist.destroy_process_group()
    return found


def build_meshes(name: str) -> list[tuple[int, int, list[int], int]]:
    global _config
    from titan_integration import llama3

    _config, num_gpus = getattr(llama3, name)(), llama3.HARDWARE[name].gpus
    return sorted(place for half in on_forks(places, [(num_gpus, 0), (num_gpus, 1)]) for place in half)


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "pp"), [("llama3_405b", 16)])
def test_the_place_of_every_gpu(with_titan: Callable[..., Any], name: str, pp: int) -> None:
    """TP within a node of 8 GPUs, and neighbours in the pipeline as far apart as the job has GPUs for each place."""
    found = with_titan(build_meshes, name)
    each = len(found) // pp
    expected = [(rank, rank // each, list(range(rank - rank % 8, rank - rank % 8 + 8)), 0) for rank in range(each * pp)]
    assert found == expected


def kept_by_a_block(how: tuple[int, str]) -> tuple[float, float, float, float]:
    """Elements for each token that a block of the debug model keeps from F to I and from I to W, counted and told."""
    from live_bytes import meter
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from titan_integration import llama3
    from zbpipe.runtime.split.layers import defer_weights
    from zbpipe.runtime.split.products import WeightGradients
    from zbpipe.titan import _titan03, memory

    tp, checkpointing = how
    dist.init_process_group("fake", rank=0, world_size=tp)
    config = llama3._pipelined(llama3.llama3_debug(), "ZBV", pp=1, tp=tp, checkpointing=checkpointing)
    _titan03.adapt_to_cpu(config)
    # The CPU's attention keeps other things than a GPU's, so the result of a GPU's is added below.
    ScaledDotProductAttention.forward = attend_to_nothing
    dims = ParallelDims.from_config(config.parallelism, tp)
    dims.build_mesh()
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    torch.set_default_dtype(torch.bfloat16)
    model = config.model_spec.model.build()
    model.parallelize(dims)
    config.activation_checkpoint.build(dump_folder="").apply(model)
    block, gradients = model.layers["0"], WeightGradients()
    defer_weights(block, gradients)
    told = memory.block_of(config.model_spec.model.layers[0])
    tokens = config.training.seq_len
    x = torch.randn(1, tokens // tp, told.dim, requires_grad=True)
    positions = torch.zeros(1, tokens, dtype=torch.long)
    with utils.get_spmd_context(parallel_dims=dims)():
        block(x, None, positions).sum().backward()  # all gradients are there
        with meter(torch.device("cpu")) as bytes_:
            y = block(x, None, positions)
            after_f = bytes_.live - y.nbytes + x.nbytes  # the next stage has y, and x was there before
            dy = torch.randn_like(y)
            with gradients.record() as pending:
                y.backward(dy)
            del y, dy
            after_i = bytes_.live
    assert len(pending) == 5
    attention = told.queries / tp if checkpointing == "selective" else 0
    scale = 2 * tokens
    return (
        after_f / scale + attention,
        told.kept_by_f(checkpointing, tp),
        after_i / scale,
        told.kept_by_i(tp),
    )


def attend_to_nothing(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **unused: Any) -> Any:  # noqa: N803 (TorchTitan's)
    return q_BLNH * 1


def ask_for_blocks(hows: Sequence[tuple[int, str]]) -> list[tuple[float, float, float, float]]:
    return on_forks(kept_by_a_block, hows)


def test_what_a_block_keeps(with_titan: Callable[..., Any]) -> None:
    """The arithmetic of activations, against what TorchTitan's block under zbpipe's split leaves alive."""
    hows = [(tp, checkpointing) for tp in (1, 8) for checkpointing in ("selective", "full")]
    for counted_f, told_f, counted_i, told_i in with_titan(ask_for_blocks, hows):
        assert counted_f == told_f
        assert counted_i == told_i


# The script. It is started from another folder than the repository's.


def run_script(
    folder: Path, *arguments: str, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """With the given variables alone: what this shell has of the script's is left out. No process is left behind."""
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "PYTHONPATH")}
    process = subprocess.Popen(
        [str(SCRIPT), *arguments],
        cwd=folder,
        env=clean | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def dry_run(folder: Path, *arguments: str, **variables: str) -> tuple[dict[str, str], str]:
    """The environment that the script sets, and its command."""
    result = run_script(folder, *arguments, DRY_RUN="1", **variables)
    assert result.returncode == 0, result.stderr
    *settings, command = result.stdout.splitlines()
    return dict(setting.split("=", 1) for setting in settings), command.strip()


ON_ROCM = {
    "GPU_MAX_HW_QUEUES": "2",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "HSA_NO_SCRATCH_RECLAIM": "1",
    "HSA_ENABLE_SDMA": "1",
    "NCCL_CHECKS_DISABLE": "1",
    "NCCL_CROSS_NIC": "0",
    "NCCL_PXN_DISABLE": "1",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_IB_GID_INDEX": "3",
}


def test_one_node_of_rocm(tmp_path: Path) -> None:
    arguments = ("--training.steps", "7", "--dump_folder", "a b")
    settings, command = dry_run(tmp_path, *arguments, PLATFORM="rocm", CONFIG="llama3_8b")
    assert settings.pop("PYTHONPATH").split(":")[0] == str(ROOT)
    assert settings == {"PLATFORM": "rocm", **ON_ROCM}
    assert command == (
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 8 --standalone --local-ranks-filter 0 --role rank"
        " --tee 3 -m zbpipe.titan.train --module titan_integration.llama3 --config llama3_8b --training.steps 7"
        " --dump_folder a\\ b"
    )


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    settings, _ = dry_run(tmp_path, PLATFORM="rocm", NCCL_IB_GID_INDEX="1", HSA_ENABLE_SDMA="")
    assert {**ON_ROCM, "NCCL_IB_GID_INDEX": "1", "HSA_ENABLE_SDMA": ""}.items() <= settings.items()


def test_several_nodes_of_cuda(tmp_path: Path) -> None:
    nodes = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "1234"}
    settings, command = dry_run(tmp_path, PLATFORM="cuda", NGPU="4", LOG_RANK="0,3", MODULE="llama3", **nodes)
    assert settings["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert settings.get(PER_EDGE) == ("1" if hasattr(dist.config, "pipeline_per_edge_p2p") else None)
    assert not ON_ROCM.keys() & settings.keys()
    assert " --nproc-per-node 4 --nnodes 4 --node-rank 2 --master-addr node-0 --master-port 1234 " in command
    assert " --local-ranks-filter 0\\,3 " in command
    assert " --module llama3 " in command


SLURM = {
    "SLURM_STEP_NUM_NODES": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "node[07-22]",
    "SLURM_NODEID": "3",
    "SLURM_JOB_ID": "1234567",
}


def test_under_slurm(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[07-22]" ] && printf "node07\\nnode08\\n"\n')
    scontrol.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    _, command = dry_run(tmp_path, PLATFORM="rocm", PATH=path, **SLURM)
    assert " --nnodes 16 --node-rank 3 --master-addr node07 --master-port 24567 " in command
    _, command = dry_run(tmp_path, PLATFORM="rocm", PATH=path, **SLURM, MASTER_ADDR="other", MASTER_PORT="9")
    assert " --master-addr other --master-port 9 " in command


def test_the_cpu_shares_its_cores(tmp_path: Path) -> None:
    settings, command = dry_run(tmp_path, PLATFORM="cpu")
    assert (settings["CUDA_VISIBLE_DEVICES"], settings["HIP_VISIBLE_DEVICES"]) == ("", "")
    assert settings["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert " --nproc-per-node 2 " in command


def test_one_process_for_all(tmp_path: Path) -> None:
    settings, command = dry_run(tmp_path, "--a", PLATFORM="cuda", COMM_MODE="fake_backend", NGPU="32", NNODES="4")
    assert (settings["NGPU"], settings["LOCAL_RANK"]) == ("32", "0")
    assert command.startswith(f"{sys.executable} -m zbpipe.titan.train ")
    assert command.endswith(" --comm.mode fake_backend --training.steps 1 --a")


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        (
            {"MASTER_ADDR": "n0", "NODE_RANK": "3"},
            "NODE_RANK='3' and MASTER_ADDR='n0' are of several nodes",
        ),
        ({"PLATFORM": "tpu"}, "PLATFORM='tpu' is unknown: use cuda, rocm or cpu"),
        ({"COMM_MODE": "fake"}, "COMM_MODE='fake' is unknown: use fake_backend or local_tensor"),
        ({"NGPU": "08"}, "NGPU='08' has to be a whole number from 1 to"),
        ({"NGPU": "0"}, "NGPU='0' has to be a whole number from 1 to"),
        ({"LOG_RANK": "all"}, "LOG_RANK='all' has to be numbers separated by commas"),
        ({"NNODES": "two"}, "NNODES='two' has to be a whole number"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES='2' needs MASTER_ADDR: set it to the name or address of node 0"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NNODES='2' needs NODE_RANK: set it to 0 on the node MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK='2' has to be a whole number from 0 to 1"),
        (
            {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "1", "MASTER_PORT": "99999"},
            "MASTER_PORT='99999' has to be a whole number from 1 to 65535",
        ),
        ({"SLURM_JOB_NUM_NODES": "16"}, "SLURM_JOB_NUM_NODES='16', but without srun this trains on one node"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "128"}, "started SLURM_STEP_NUM_TASKS='128' tasks on 16 nodes: use"),
        ({"MODULE": "titan_integration.llama4"}, "MODULE='titan_integration.llama4' is no Python module"),
        ({"TRAIN_FILE": "zbpipe.titan.tain"}, "TRAIN_FILE='zbpipe.titan.tain' is no Python module"),
        ({"PYTHON": "no-python"}, "PYTHON='no-python' is not there: activate your environment"),
        ({"PLATFORM": "cuda", "DRY_RUN": "0"}, "build that sees 0 GPUs: install the build for cuda"),
    ],
)
def test_what_the_script_refuses(tmp_path: Path, variables: dict[str, str], complaint: str) -> None:
    result = run_script(tmp_path, **{"PLATFORM": "cpu", "DRY_RUN": "1", **variables})
    assert result.returncode == 2
    assert complaint in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def python_with(
    folder: Path, torch_version: str, gpus: int = 0, hip: str | None = None, titan_version: str = "0.3.0"
) -> dict[str, str]:
    """The variables for an interpreter that has nothing but stand-ins of the packages, in these versions."""
    python, packages = folder / "python", folder / "packages"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    for package in ("torch", "torchtitan", "zbpipe/titan/train"):
        (packages / package).mkdir(parents=True)
        (packages / package / "__init__.py").touch()
    (packages / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        f"cuda = SimpleNamespace(is_available=lambda: {gpus > 0}, device_count=lambda: {gpus})\n"
        f"version = SimpleNamespace(hip={hip!r}, cuda='13.0')\n"
    )
    for package, release in (("torch", torch_version), ("torchtitan", titan_version)):
        metadata = packages / f"{package}-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    return {"PYTHON": str(python), "PYTHONPATH": str(packages)}


def test_a_queue_for_each_edge_where_torch_has_it(tmp_path: Path) -> None:
    variables = python_with(tmp_path, "2.14.0", gpus=8)
    settings, _ = dry_run(tmp_path, **variables)
    assert settings["PLATFORM"] == "cuda"
    assert PER_EDGE not in settings
    (tmp_path / "packages" / "torch" / "distributed").mkdir()
    (tmp_path / "packages" / "torch" / "distributed" / "config.py").write_text(f"# {PER_EDGE}\n")
    settings, _ = dry_run(tmp_path, **variables)
    assert settings[PER_EDGE] == "1"
    settings, _ = dry_run(tmp_path, **variables, **{PER_EDGE: "0"})
    assert settings[PER_EDGE] == "0"


@pytest.mark.parametrize(("hip", "platform"), [("7.2", "rocm"), (None, "cuda")])
def test_the_platform_is_what_torch_finds(tmp_path: Path, hip: str | None, platform: str) -> None:
    settings, _ = dry_run(tmp_path, **python_with(tmp_path, "2.14.0+any", gpus=8, hip=hip))
    assert settings["PLATFORM"] == platform


def test_what_has_to_be_installed(tmp_path: Path) -> None:
    variables = python_with(tmp_path, "2.12.0+rocm7.15", gpus=4, hip="7.15")
    for others, complaint in (
        ({"PYTHONPATH": ""}, "has no module torch: install the build for this platform first"),
        ({}, "torch 2.12.0+rocm7.15 is too old for TorchTitan 0.3, which needs 2.14 or newer"),
    ):
        result = run_script(tmp_path, **{**variables, **others, "DRY_RUN": "1"})
        assert result.returncode == 2
        assert complaint in result.stderr


def test_torchtitan_02(tmp_path: Path) -> None:
    variables = python_with(tmp_path, "2.12.0+rocm7.15", gpus=8, hip="7.15", titan_version="0.2.2")
    configs = ROOT / "titan_integration" / "titan02"
    (tmp_path / "own.toml").touch()
    for config, file in (("llama3_8b", configs / "llama3_8b.toml"), ("own.toml", "own.toml")):
        settings, command = dry_run(tmp_path, "--training.steps", "5", **variables, CONFIG=config)
        assert settings["PLATFORM"] == "rocm"
        assert command.endswith(f" -m zbpipe.titan.train --job.config_file {file} --training.steps 5")
    for others, complaint in (
        ({"CONFIG": "llama3_9b"}, "CONFIG='llama3_9b' is neither a TOML file nor the name of one in"),
        ({"MODULE": "llama3"}, "MODULE='llama3' is for TorchTitan 0.3, and this is 0.2: leave it out"),
    ):
        result = run_script(tmp_path, **{**variables, **others, "DRY_RUN": "1"})
        assert result.returncode == 2
        assert complaint in result.stderr


def test_torchtitan_that_is_not_installed(tmp_path: Path) -> None:
    variables = python_with(tmp_path, "2.12.0", titan_version="0.2.2")
    shutil.rmtree(tmp_path / "packages" / "torchtitan-0.2.2.dist-info")
    result = run_script(tmp_path, **variables, DRY_RUN="1")
    assert result.returncode == 2
    assert "torchtitan is in Python's path, but not installed: pip install --no-deps --editable" in result.stderr


def settings_of(name: str) -> dict[str, Any]:
    """What the TOML file for TorchTitan 0.2 has to say to mean the same."""
    from titan_integration import llama3

    config = getattr(llama3, name)()
    parallelism, training = config.parallelism, config.training
    (parameters,) = config.optimizer.param_groups
    return {
        "optimizer": {"lr": parameters.optimizer_kwargs["lr"]},
        "warmup_steps": config.lr_scheduler.warmup_steps,
        "dataset": config.dataloader.dataset,
        "local_batch_size": training.local_batch_size,
        "seq_len": training.seq_len,
        "steps": training.steps,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
        "pipeline_parallel_schedule": parallelism.pipeline_parallel_schedule,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "mode": "selective" if "Selective" in type(config.activation_checkpoint).__qualname__ else "full",
        "compile": config.compile.enable,
        "flavor": config.model_spec.flavor,
        "init_timeout_seconds": config.comm.init_timeout_seconds,
    }


TOML_FILES = sorted((ROOT / "titan_integration" / "titan02").glob("*.toml"))


@pytest.mark.parametrize("file", TOML_FILES, ids=lambda file: file.stem)
def test_the_same_job_for_torchtitan_02(with_titan: Callable[..., Any], file: Path) -> None:
    toml = tomllib.loads(file.read_text())
    found = {name: value for section in ("training", "parallelism", "comm") for name, value in toml[section].items()}
    found |= {
        "optimizer": toml["optimizer"],
        "warmup_steps": toml["lr_scheduler"]["warmup_steps"],
        "mode": toml["activation_checkpoint"]["mode"],
        "compile": toml.get("compile", {}).get("enable", False),
        "flavor": toml["model"]["flavor"],
    }
    expected = with_titan(settings_of, file.stem)
    assert {name: found[name] for name in expected} == expected


def test_more_processes_than_gpus(tmp_path: Path) -> None:
    result = run_script(tmp_path, **python_with(tmp_path, "2.15.0", gpus=4), NGPU="8")
    assert result.returncode == 2
    assert "NGPU='8', but torch sees 4 GPUs: use NGPU=4" in result.stderr


def test_training_on_the_cpu(tmp_path: Path) -> None:
    """Two processes by the script, torchrun and TorchTitan's trainer; the platform is found, not given."""
    result = run_script(
        tmp_path,
        *("--dump_folder", str(tmp_path), "--metrics.json_lines", str(tmp_path / "metrics.jsonl")),
        *("--training.steps", "4", "--training.local_batch_size", "4", "--training.seq_len", "64"),
        timeout=120,
        LOG_RANK="0,1",  # which of them fails is not known before
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert "Using zbpipe's pipeline schedule ZBV with 4 microbatches" in result.stdout
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss_metrics/global_avg_loss"] for step in steps]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5  # and so none is NaN


README = ROOT / "titan_integration" / "README.md"


def test_the_readme_has_all_configs() -> None:
    text = README.read_text()
    assert [name for name in CONFIGS if f"`{name}`" not in text] == []
    variables = re.findall(r"^#   ([A-Z_]+) ", SCRIPT.read_text(), re.MULTILINE)
    assert len(variables) == 15
    assert [name for name in variables if f"`{name}`" not in text] == []


def commands(program: str) -> list[str]:
    """Those of the README with this program, each in one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"^srun (--\S+ )*", "", line.split("  #")[0]) for line in lines if program in line]


def model_of(arguments: list[str]) -> str:
    """The model of a job by TorchTitan's own reading of the command line, checked as before a launch."""
    import torchtitan.train

    from zbpipe.titan import check, command_line

    chosen, rest = command_line.parse(arguments)
    config = torchtitan.train.ConfigManager().parse_args(rest)
    check.check(config, chosen)
    return f"{config.model_spec.name} {config.model_spec.flavor}"


def test_the_commands_of_the_readme(with_titan: Callable[..., Any]) -> None:
    """Up to where TorchTitan has read them; a plan that is still to be made cannot be read."""
    launches = commands("run_train.sh")
    assert len(launches) == 11
    models = set()
    for launch in launches:
        result = subprocess.run(
            ["bash", "-c", launch],
            cwd=ROOT,
            env=os.environ | {"PYTHON": sys.executable, "DRY_RUN": "1", "PLATFORM": "rocm"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        arguments = shlex.split(result.stdout.splitlines()[-1])
        arguments = arguments[arguments.index("zbpipe.titan.train") + 1 :]
        if not any(".csv" in argument for argument in arguments):
            models.add(with_titan(model_of, arguments))
    assert models == {"llama3 debugmodel", "llama3 8B", "llama3 70B"}


def table(arguments: list[str]) -> str:
    """What `python -m zbpipe.titan.memory` prints."""
    from zbpipe.titan import memory

    sys.argv = ["memory", *arguments]
    with redirect_stdout(io.StringIO()) as out:
        memory.main()
    return out.getvalue()


def test_the_table_of_memory(with_titan: Callable[..., Any]) -> None:
    (command,) = commands("zbpipe.titan.memory")
    lines = with_titan(table, shlex.split(command)[3:]).splitlines()
    assert lines[0] == "rank  parameters  weights  activations  total (GiB on each GPU)"
    assert [line.split()[0] for line in lines[1:-2]] == ["0", "1", "2", "3"]
    assert lines[1].split()[1] == "18.36B"
    assert lines[-2].startswith("1 microbatch in --zbpipe.memory-limit: ")
    assert lines[-1] == "worst rank: 52.0 GiB, which with 15% left free fits: H100, H200, B200, MI300X, MI325X, MI355X"
    with pytest.raises(ValueError, match="48 GPUs are not a multiple of PP x TP x replicas = 32: use 32 or 64"):
        with_titan(table, ["--gpus", "48", *shlex.split(command)[5:]])


def test_memory_of_auto(with_titan: Callable[..., Any]) -> None:
    """What its plan may take, by its limit; where that is tight, what it starts with."""

    def activations(limit: str) -> list[float]:
        arguments = [
            *("--gpus", "32", "--module", "titan_integration.llama3", "--config", "llama3_70b"),
            *("--parallelism.pipeline_parallel_schedule", "Auto", "--zbpipe.memory-limit", limit),
        ]
        lines = with_titan(table, arguments).splitlines()
        units.append(float(lines[-2].split()[-2]))
        return [float(line.split()[3]) for line in lines[1:5]]

    units: list[float] = []
    tight, ample = activations("2 microbatches"), activations("12 microbatches")
    assert ample == pytest.approx([12 * units[0]] * 4, rel=0.01)
    assert min(tight) > 2 * units[0]
