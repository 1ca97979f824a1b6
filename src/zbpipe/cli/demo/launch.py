"""Start a TorchTitan job on this machine's CPU with torchrun, and watch it. Imports neither torch nor torchtitan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbpipe.frameworks.titan.versions import find_installed

METRICS = "metrics.jsonl"
"""File in the job's folder for the models' metrics: one JSON object per step."""


@dataclass(frozen=True)
class JobOutcome:
    steps: tuple[dict[str, Any], ...]
    """TorchTitan's metrics, one dict per step."""
    error: str | None
    """One line from the rank that failed first; None if all ranks finished."""

    @property
    def losses(self) -> list[float]:
        return [step["loss_metrics/global_avg_loss"] for step in self.steps]


class DemoError(RuntimeError):
    """The demo could not run."""


def train_on_cpu(arguments: Sequence[str], *, num_ranks: int, folder: Path, timeout: float) -> JobOutcome:
    """Train a model of the demo on `num_ranks` processes, which share the cores evenly, for at most `timeout` seconds.

    `arguments` are those of `torchtitan.train`, without the model's. All output is in `folder`: `metrics.jsonl`,
    `output.log` with the ranks' output, and checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
        *("--log-dir", str(folder / "errors"), "-m", "zbpipe.titan.train"),
        *demo_arguments(folder, "llama3_python_stdlib"),
        *arguments,
    ]
    code = run_to_end(command, folder / "output.log", threads, timeout)
    metrics = folder / METRICS
    steps = tuple(map(json.loads, metrics.read_text().splitlines())) if metrics.exists() else ()
    if code is None:
        return JobOutcome(steps, f"not finished after {timeout:.0f} seconds")
    return JobOutcome(steps, None if code == 0 else first_error(folder))


def run_to_end(command: Sequence[str], log: Path, threads: int, timeout: float) -> int | None:
    """Exit code of a command that runs without an accelerator, or None after a timeout. Its output goes to `log`.
    All its processes have ended."""
    settings = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | settings, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun passes the signal on to its ranks
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def write_steps(logger: Any, file: Path) -> None:
    """Let TorchTitan's metrics logger also append one JSON object per step to `file`."""
    log = logger.log

    def log_both(metrics: dict[str, Any], step: int) -> None:
        log(metrics, step)
        with file.open("a") as lines:
            lines.write(json.dumps({"step": step, **metrics}) + "\n")

    logger.log = log_both


def demo_arguments(folder: Path, model: str) -> list[str]:
    """The installed TorchTitan's command line for a model of the demo, with all output in `folder`."""
    if not find_installed().name.startswith("0.2"):
        return [
            *("--module", "zbpipe.cli.demo.models03", "--config", model, "--dump_folder", str(folder)),
            *("--metrics.json_lines", str(folder / METRICS), "--metrics.disable_color_printing"),
        ]
    return [
        *("--experimental.custom_import", "zbpipe.cli.demo.models02", "--model.name", model),
        *("--model.flavor", "debugmodel", "--model.hf_assets_path", str(Path(__file__).parent)),
        *("--training.dataset", "python_stdlib", "--training.seq_len", "256", "--debug.seed", "0"),
        *("--training.mixed_precision_param", "float32", "--training.steps", "10"),
        *("--lr_scheduler.warmup_steps", "2", "--lr_scheduler.decay_ratio", "0.8"),
        *("--job.dump_folder", str(folder), "--metrics.log_freq", "1", "--metrics.disable_color_printing"),
    ]


def first_error(folder: Path) -> str:
    """The earliest error: under torchrun every rank writes its exception, with the time, to a file."""
    messages = [json.loads(file.read_text())["message"] for file in (folder / "errors").rglob("error.json")]
    if messages:
        first = min(messages, key=lambda message: int(message["extraInfo"]["timestamp"]))
        return " ".join(first["message"].split())
    lines = (folder / "output.log").read_text().splitlines()
    # A rank that a signal ended wrote no exception. torchrun prints the cause last.
    killed = [line.partition("traceback : ")[2] for line in lines if "traceback : Signal" in line]
    errors = killed[-1:] or [line for line in lines if "Error: " in line] or lines[-1:]
    return errors[0].strip() if errors else "the job ended without output"
