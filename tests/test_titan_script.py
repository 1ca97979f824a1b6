"""titan_integration/run_train.sh: the environment and the command of a launch, and what it refuses."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Variables of the environment are keyword arguments.

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from titan_jobs import require_titan

require_titan("0.3.0")
ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "titan_integration" / "run_train.sh"
PER_EDGE = "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P"
"""torch has it from 2.15 on."""


def run_script(
    folder: Path, *arguments: str, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """With the given variables alone: what this shell has of the script's is omitted. No process is left behind."""
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


SLURM = {"SLURM_STEP_NUM_NODES": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "node[07-22]"}
SLURM |= {"SLURM_NODEID": "3", "SLURM_JOB_ID": "1234567"}
NODES = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "1234"}
HALF_THE_CORES = str(max(1, (os.cpu_count() or 1) // 2))
ON_CUDA = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    PER_EDGE: "1" if hasattr(dist.config, "pipeline_per_edge_p2p") else None,
    **dict.fromkeys(ON_ROCM),
}


@pytest.mark.parametrize(
    ("variables", "settings", "words"),
    [
        # What the user has set stays.
        (
            {"PLATFORM": "rocm", "NCCL_IB_GID_INDEX": "1", "HSA_ENABLE_SDMA": ""},
            {**ON_ROCM, "NCCL_IB_GID_INDEX": "1", "HSA_ENABLE_SDMA": ""},
            [],
        ),
        (
            {"PLATFORM": "cuda", "NGPU": "4", "LOG_RANK": "0,3", "MODULE": "llama3", **NODES},
            ON_CUDA,
            [
                " --nproc-per-node 4 --nnodes 4 --node-rank 2 --master-addr node-0 --master-port 1234 ",
                " --local-ranks-filter 0\\,3 ",
                " --module llama3 ",
            ],
        ),
        (
            {"PLATFORM": "cpu"},  # whose cores the ranks share
            {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": HALF_THE_CORES},
            [" --nproc-per-node 2 "],
        ),
        (
            {"PLATFORM": "cuda", "COMM_MODE": "fake_backend", "NGPU": "32", "NNODES": "4"},  # one process for all
            {"NGPU": "32", "LOCAL_RANK": "0"},
            [f"{sys.executable} -m zbpipe.titan.train ", " --comm.mode fake_backend --training.steps 1 --a"],
        ),
    ],
)
def test_the_environment_and_the_command(
    tmp_path: Path, variables: dict[str, str], settings: dict[str, str | None], words: list[str]
) -> None:
    found, command = dry_run(tmp_path, "--a", **variables)
    assert {name: found.get(name) for name in settings} == settings
    assert [each for each in words if each not in command] == []


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


def test_under_slurm(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[07-22]" ] && printf "node07\\nnode08\\n"\n')
    scontrol.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    _, command = dry_run(tmp_path, PLATFORM="rocm", PATH=path, **SLURM)
    assert " --nnodes 16 --node-rank 3 --master-addr node07 --master-port 24567 " in command
    _, command = dry_run(tmp_path, PLATFORM="rocm", PATH=path, **SLURM, MASTER_ADDR="other", MASTER_PORT="9")
    assert " --master-addr other --master-port 9 " in command


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"MASTER_ADDR": "n0", "NODE_RANK": "3"}, "NODE_RANK='3' and MASTER_ADDR='n0' are of several nodes"),
        ({"PLATFORM": "tpu"}, "PLATFORM='tpu' is unknown: use cuda, rocm or cpu"),
        ({"COMM_MODE": "fake"}, "COMM_MODE='fake' is unknown: use fake_backend or local_tensor"),
        ({"NGPU": "08"}, "NGPU='08' has to be a whole number from 1 to"),
        ({"NGPU": "0"}, "NGPU='0' has to be a whole number from 1 to"),
        ({"LOG_RANK": "all"}, "LOG_RANK='all' has to be numbers separated by commas"),
        ({"NNODES": "two"}, "NNODES='two' has to be a whole number"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES='2' needs MASTER_ADDR: set it to the name or address of node 0"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NNODES='2' needs NODE_RANK: set it to 0 on the node MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK='2' has to be a whole number from 0 to 1"),
        ({**NODES, "MASTER_PORT": "99999"}, "MASTER_PORT='99999' has to be a whole number from 1 to 65535"),
        ({"SLURM_JOB_NUM_NODES": "16"}, "SLURM_JOB_NUM_NODES='16', but without srun this trains on one node"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "128"}, "started SLURM_STEP_NUM_TASKS='128' tasks on 16 nodes: use"),
        ({"MODULE": "titan_integration.llama4"}, "MODULE='titan_integration.llama4' is no Python module"),
        ({"TRAIN_FILE": "zbpipe.titan.tain"}, "TRAIN_FILE='zbpipe.titan.tain' is no Python module"),
        ({"PYTHON": "no-python"}, "PYTHON='no-python' is not there: activate your environment"),
        ({"PLATFORM": "cuda", "DRY_RUN": "0"}, "build that sees 0 GPUs: install the build for cuda"),
    ],
)
def test_what_the_script_refuses(tmp_path: Path, variables: dict[str, str], complaint: str) -> None:
    assert_refused(tmp_path, complaint, **{"PLATFORM": "cpu", **variables})


def assert_refused(folder: Path, complaint: str, **variables: str) -> None:
    """In one line."""
    result = run_script(folder, **{"DRY_RUN": "1", **variables})
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
    """And the platform is what torch finds."""
    variables = python_with(tmp_path, "2.14.0", gpus=8)
    settings, _ = dry_run(tmp_path, **variables)
    assert settings["PLATFORM"] == "cuda"
    assert PER_EDGE not in settings
    (tmp_path / "packages" / "torch" / "distributed").mkdir()
    (tmp_path / "packages" / "torch" / "distributed" / "config.py").write_text(f"# {PER_EDGE}\n")
    for given, expected in (({}, "1"), ({PER_EDGE: "0"}, "0")):
        settings, _ = dry_run(tmp_path, **variables, **given)
        assert settings[PER_EDGE] == expected
    assert_refused(tmp_path, "NGPU='16', but torch sees 8 GPUs: use NGPU=8", **variables, DRY_RUN="0", NGPU="16")


def test_torchtitan_02(tmp_path: Path) -> None:
    variables = python_with(tmp_path, "2.12.0+rocm7.15", gpus=8, hip="7.15", titan_version="0.2.2")
    configs = ROOT / "titan_integration" / "titan02"
    (tmp_path / "own.toml").touch()
    for config, file in (("llama3_8b", configs / "llama3_8b.toml"), ("own.toml", "own.toml")):
        settings, command = dry_run(tmp_path, "--training.steps", "5", **variables, CONFIG=config)
        assert settings["PLATFORM"] == "rocm"
        assert command.endswith(f" -m zbpipe.titan.train --job.config_file {file} --training.steps 5")
    packages = tmp_path / "packages"
    for others, complaint in (
        ({"CONFIG": "llama3_9b"}, "CONFIG='llama3_9b' is neither a TOML file nor the name of one in"),
        ({"MODULE": "llama3"}, "MODULE='llama3' is for TorchTitan 0.3, and this is 0.2: omit it"),
        ({"PYTHONPATH": ""}, "has no module torch: install the build for this platform first"),
    ):
        assert_refused(tmp_path, complaint, **{**variables, **others})
    info = (packages / "torchtitan-0.2.2.dist-info").rename(packages / "torchtitan-0.3.0.dist-info") / "METADATA"
    info.write_text(info.read_text().replace("0.2.2", "0.3.0"))
    assert_refused(tmp_path, "torch 2.12.0+rocm7.15 is too old for TorchTitan 0.3, which needs 2.14 or", **variables)
    shutil.rmtree(info.parent)
    complaint = "torchtitan is in Python's path, but not installed: pip install --no-deps --editable"
    assert_refused(tmp_path, complaint, **variables)
