"""The scripts of titan_integration/: run_train.sh launches, and first_run.sh reports of the first hour with GPUs."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import process
from data import refusals
from titan_jobs import require_titan

from titan_integration import first_run
from titan_integration.first_run import FirstRun, Report, Step
from zbpipe.runtime.verify import on_device

require_titan("0.3.0")
ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "titan_integration" / "run_train.sh"
PER_EDGE = "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P"
"""torch has it from 2.15 on."""


DEFAULTS: dict[str, Any] = {
    "PYTHON": sys.executable,
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "DRY_RUN": "1",
}


def dry_run(folder: Path, *arguments: str, **variables: Any) -> tuple[dict[str, str], str]:
    result = process(SCRIPT, *arguments, folder=folder, clean=True, **DEFAULTS | variables)
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
ON_CUDA = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **dict.fromkeys(ON_ROCM)}
ON_CUDA |= {PER_EDGE: "1" if hasattr(dist.config, "pipeline_per_edge_p2p") else None}


OWN = {"NCCL_IB_GID_INDEX": "1", "HSA_ENABLE_SDMA": ""}


@pytest.mark.parametrize(
    ("variables", "settings", "words"),
    [
        # What the user has set stays.
        ({"PLATFORM": "rocm", **OWN}, {**ON_ROCM, **OWN}, []),
        (
            {"PLATFORM": "cuda", "NGPU": "4", "LOG_RANK": "0,3", "MODULE": "llama3", **NODES},
            ON_CUDA,
            [
                " --nproc-per-node 4 --nnodes 4 --node-rank 2 --master-addr node-0 --master-port 1234 ",
                *(" --local-ranks-filter 0\\,3 ", " --module llama3 "),
            ],
        ),
        # Whose cores the ranks share.
        ({"PLATFORM": "cpu"}, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": HALF_THE_CORES}, ["--nproc-per-node 2 "]),
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


@pytest.mark.parametrize(("given", "complaint"), refusals("run_train.sh"))
def test_what_the_script_refuses(tmp_path: Path, given: str, complaint: str) -> None:
    variables = {"PLATFORM": "cpu"}
    for word in given.split():
        name, has_value, value = word.partition("=")
        variables |= {name: value} if has_value else {"NODES": NODES, "SLURM": SLURM}[name]
    assert_refused(tmp_path, complaint, **variables)


def assert_refused(folder: Path, complaint: str, **variables: Any) -> None:
    result = process(SCRIPT, folder=folder, code=2, clean=True, **DEFAULTS | variables)
    assert complaint in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def python_with(
    folder: Path, torch_version: str, gpus: int = 0, hip: str | None = None, titan_version: str = "0.3.0"
) -> dict[str, str]:
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


def test_what_torchtitan_says_of_its_steps() -> None:
    line = "- INFO - step: {:2}  loss: {:8.5f}  grad_norm:  3.2116  memory: {:5.2f}GiB(10%)  tps: 1,{}  tflops: 0.02\n"
    log = "step on\n" + line.format(1, 8.09475, 0.0, 195) + line.format(12, -1, 31.25, 419) + "pipeline: ZBV  step: 1s"
    assert first_run.steps_in(log) == [Step(1, 8.09475, 3.2116, 0.0, 1195.0), Step(12, -1.0, 3.2116, 31.25, 1419.0)]


def test_differences_are_of_the_first_steps_alone() -> None:
    steps = [Step(n, 8.0, 2.0, 0.0, 1.0) for n in range(1, 8)]
    off = [step._replace(loss=8.08) if step.number == 3 else step for step in steps]
    late = [step._replace(loss=80.0) if step.number == 6 else step for step in steps]
    assert first_run.differences(off, steps) == pytest.approx({"loss": 0.01, "grad_norm": 0.0})
    assert first_run.differences(late, steps) == {"loss": 0.0, "grad_norm": 0.0}


def test_a_report_is_there_after_every_line(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.md")
    report.add(True, "one", "a | b")
    assert "| pass | one | a \\| b |" in report.file.read_text()
    report.add(False, "two", "lines\nof an error")
    assert "| **FAIL** | two | lines of an error |" in report.file.read_text()
    assert report.failed == 1


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    return Path(shutil.copy(Path(__file__).with_name("run_train_stub.sh"), tmp_path / "run_train.sh"))


FAILED = on_device.Result("fused W", "RuntimeError: gradients are off by 1.0e+00 of their norm", failed=True)


def test_on_gpus_every_way_is_tried(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATFORM", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(on_device, "try_out", lambda device: iter([on_device.Result("memory of ops"), FAILED]))
    monkeypatch.setattr(FirstRun, "_expected_memory", lambda self, job: [10.0, 30.0])
    arguments = first_run.parse(["--out", str(tmp_path / "out"), "--schedules", "VMin,Auto"])
    arguments.steps = 3
    run = FirstRun(arguments, stub)
    run.run()
    text = (tmp_path / "out" / "report.md").read_text()
    has_edges = hasattr(torch.distributed.config, "pipeline_per_edge_p2p")
    for job in ("1F1B", *(f"{name}, {way} receives" for name in ("VMin", "Auto") for way in WAYS)):
        for edges in (", one queue", ", a queue per edge") if has_edges else ("",):
            assert f"| {job}{edges} |" in text
    assert "| **FAIL** | GPUs | " in text
    assert "| pass | memory of ops | works |" in text
    assert f"| **FAIL** | {FAILED.what} | {FAILED.found} |" in text
    of_jobs = [line for line in (tmp_path / "out" / "logs" / "commands").read_text().splitlines() if "steps" in line]
    assert len(of_jobs) > 2
    assert all(("--zbpipe.plain" in line) == ("1F1B" not in line) for line in of_jobs)
    assert "| **FAIL** | VMin at its best | 0.0% shorter step than 1F1B |" in text


def test_torchs_classes_post_their_own_receives(tmp_path: Path, stub: Path) -> None:
    """So a job of theirs runs once, and one of zbpipe's first in all ways, with the trace."""
    run = FirstRun(first_run.parse(["--out", str(tmp_path)]), stub)
    run._platform = "cpu"
    jobs = [(job.schedule, job.receives, job.trace is not None) for job in run._jobs()]
    lean = [("ZBLoop", when, when == "early") for when in WAYS]
    assert jobs == [("1F1B", None, False), ("Interleaved1F1B", None, False), *lean, ("ZB", "timed", False)]


def test_it_goes_on_after_what_fails(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE", str(tmp_path / "out" / "trace.json"))
    nap = f"60.{os.getpid()}"  # seconds that no other process sleeps
    monkeypatch.setenv("NAP", nap)
    monkeypatch.setattr(FirstRun, "_expected_memory", lambda self, job: [9.0, 20.0 if job.trace else 28.0])
    arguments = first_run.parse(["--out", str(tmp_path / "out"), "--schedules", "ZBV,VHalf", "--timeout", "3"])
    arguments.steps = 3
    run = FirstRun(arguments, stub)
    jobs = [first_run.Job("1F1B"), *(first_run.Job(name, when) for name in ("ZBV", "VHalf") for when in WAYS)]
    jobs[1] = first_run.Job("ZBV", "early", trace=tmp_path / "out" / "trace.json")
    monkeypatch.setattr(run, "_jobs", lambda: iter(jobs))
    # A process that a shell started in the background would ignore the interrupt.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run.run() == 5
    finally:
        signal.signal(signal.SIGINT, before)
    text = (tmp_path / "out" / "report.md").read_text()
    print(text)
    for line in (
        "| pass | 1F1B | 3 steps, 1,250 tokens/s per GPU |",
        "| pass | 1F1B: memory | rank 1 reserves 30.0 GiB, calculated 28.0 |",
        "| pass | ZBV, early receives against 1F1B | off by at most 0.0e+00 (loss) and 0.0e+00 (grad_norm), 3 steps |",
        "| **FAIL** | ZBV, early receives: memory | rank 1 reserves 30.0 GiB, calculated 20.0 |",
        "| pass | trace | 2 events in trace.json, for ui.perfetto.dev |",
        "| **FAIL** | ZBV, late receives against 1F1B | off by at most 6.2e-02 (loss) and 0.0e+00 (grad_norm), 3 ",
        "| **FAIL** | ZBV, timed receives | not finished after 3 seconds |",
        "| **FAIL** | VHalf, early receives | exit code 3 |",
        "| **FAIL** | interrupted | the rest was not tried |",
        "| ZBV, early receives | 1,250 | 1.5 (1.25s) | 12.5% | early | one queue |",
        "| ZBV, early receives | 1 | 30.0 | 20.0 |",
    ):
        assert line in text
    assert "VHalf, late receives" in text
    assert "## VHalf-early-receives: the end of its log\n\n```\nValueError: too many\n" in text
    for words in (str(stub), f"sleep {nap}"):
        for _ in range(300):  # killed processes take a moment to go
            if not (left := process("pgrep", "-f", words, code=None).stdout):
                break
            time.sleep(0.1)
        assert not left


WAYS = ("early", "late", "timed")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_jobs_on_the_cpu(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--schedules", "ZBV", "--receives", "timed"]
    script = ROOT / "titan_integration" / "first_run.sh"
    process(script, *arguments, code=None, timeout=850, PYTHON=sys.executable, PLATFORM="cpu")
    report = (tmp_path / "report.md").read_text()
    assert "FAIL" not in report, report
    for job in ("1F1B", "ZBV, timed receives"):
        assert f"| pass | {job} | 3 steps, " in report
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
