"""The first hour with GPUs: what it reports when jobs do well, fail, hang, differ or are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from titan_jobs import require_titan

from titan_integration import first_run
from titan_integration.first_run import FirstRun, Report, Step
from zbpipe.runtime.verify import on_device

require_titan("0.3.0")
ROOT = Path(__file__).parent.parent

LINE = (
    "[titan] 2026-11-22 05:09:58,585 - root - INFO - step: {:2}  loss: {:8.5f}  grad_norm:  3.2116  memory: {:5.2f}GiB"
    "(10.00%)  tps: 1,{}  tflops: 0.02  mfu: 0.01%\n"
)

STUB = """#!/bin/sh
# Stands for run_train.sh: two ranks, of which the second has the loss. Nobody interrupts a job as it is started.
if [ "$DRY_RUN" = 1 ]; then
    echo PLATFORM=${PLATFORM:-cpu}
    echo "python -m torch.distributed.run --nproc-per-node 2 -m zbpipe.titan.train --config x"
    exit
fi
log=$LOG_DIR/run/attempt_0
mkdir -p $log/0 $log/1
echo "$*" >> "$LOG_DIR/../commands"
case "$*" in
*create_seed*) exit 0 ;;
*ZBV*late*) loss=7.5 ;;
*ZBV*timed*) sleep $NAP ;;
*VHalf*early*) echo "ValueError: too many" && exit 3 ;;
*VHalf*timed*) sleep 0.5 && kill -INT $PPID && sleep $NAP ;;
esac
for step in 1 2 3; do
    begin="root - INFO - step:  $step" end="grad_norm:  2.0  memory:"
    echo "$begin  loss: -1.00000  $end 10.00GiB(9.1%)  tps: 900  tflops: 1" >> $log/0/stdout.log
    echo "$begin  loss:  ${loss:-8.0}  $end 30.00GiB(9.1%)  tps: 1,${step}00  tflops: 1" >> $log/1/stdout.log
    echo "pipeline: 1F1B  step: 1.5s (simulated 1.25s)  bubble: 12.5%  peak activations: 2" >> $log/1/stdout.log
done
echo "zbpipe - Messages: early receives, for the transport 'one queue'" >> $log/1/stdout.log
case "$*" in *zbpipe.trace*) echo '{"traceEvents": [1, 2]}' > "$TRACE" ;; esac
"""


def test_what_torchtitan_says_of_its_steps() -> None:
    log = (
        "step on\n" + LINE.format(1, 8.09475, 0.0, 195) + LINE.format(12, -1, 31.25, 419) + "pipeline: ZBV  step: 1s\n"
    )
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
    file = tmp_path / "run_train.sh"
    file.write_text(STUB)
    file.chmod(0o755)
    return file


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
    print(text)
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
    assert none_runs(str(stub))
    assert none_runs(f"sleep {nap}")


def none_runs(words: str) -> bool:
    """Whether no process with these words in its command is left, after the moment in which killed ones go."""
    for _ in range(300):
        if not subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=False).stdout:
            return True
        time.sleep(0.1)
    return False


WAYS = ("early", "late", "timed")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_jobs_on_the_cpu(tmp_path: Path) -> None:
    """With one schedule and one way to receive: more take minutes."""
    arguments = ["--out", str(tmp_path), "--schedules", "ZBV", "--receives", "timed"]
    ended = subprocess.run(
        [str(ROOT / "titan_integration" / "first_run.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    report = (tmp_path / "report.md").read_text()
    print(report, ended.stderr)
    assert ended.returncode == 0
    assert "FAIL" not in report
    for job in ("1F1B", "ZBV, timed receives"):
        assert f"| pass | {job} | 3 steps, " in report
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
