"""`zbpipe demo`: TorchTitan's Llama 3 debug model under schedules of torch and zbpipe, all from the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from zbpipe.cli.demo.emulated import DemoError, Emulated
from zbpipe.cli.demo.launch import JobOutcome, train_on_cpu
from zbpipe.frameworks.titan.versions import find_installed
from zbpipe.schedule.registry import resolve

SCHEDULES = ("1F1B", "ZBVZeroBubble", "ZBV")
RANKS = 2
ACTIVATION_CHECKPOINT = "selective"  # TorchTitan's default
ROUNDS = 2
"""Rounds of training. Schedules alternate, so that a machine that gets faster or slower affects all alike."""
WARM_UP = 2
"""Warm-up steps of a job, excluded from speed and bubble."""
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Run:
    """One schedule's training."""

    schedule: str
    source: Literal["torch", "zbpipe"]
    activation_checkpoint: str
    losses: list[float]
    """Losses of the first round."""
    tokens_per_second: float | None
    """Tokens per second of the whole job: median over all rounds' steps after `WARM_UP`."""
    bubble: float | None
    """Measured share of both ranks' time spent waiting: median over the same steps."""
    status: Literal["ok", "failed"]
    error: str | None


class Progress(Protocol):
    """Progress display of the demo."""

    def start(self, what: str, steps: int) -> None: ...

    def step(self, step: int, loss: float) -> None: ...

    def end(self, failed: bool) -> None: ...


def run_demo(steps: int, progress: Progress, folder: Path | None = None, rounds: int = ROUNDS) -> list[Run]:
    """Train with `SCHEDULES` alternately, on `RANKS` processes, all from one seed checkpoint.

    Checkpoints and logs go to `folder`, by default a temporary one. A schedule that fails is not trained again.
    DemoError if the installed TorchTitan cannot be used, or the seed checkpoint failed.
    """
    try:
        find_installed()
    except ImportError as error:
        raise DemoError(f"the demo trains with TorchTitan: {error}") from None
    outcomes: dict[str, list[JobOutcome]] = {schedule: [] for schedule in SCHEDULES}
    with tempfile.TemporaryDirectory(prefix="zbpipe-demo-") as temporary:
        base = folder or Path(temporary)
        seed = _make_seed_checkpoint(base / "seed", progress)
        for number in range(rounds):
            for schedule in SCHEDULES if number % 2 == 0 else SCHEDULES[::-1]:
                if all(outcome.error is None for outcome in outcomes[schedule]):
                    name = schedule if number == 0 else f"{schedule}, round {number + 1}"
                    outcomes[schedule].append(_train(schedule, steps, seed, base / name, progress))
    return [_summary(schedule, each) for schedule, each in outcomes.items()]


def _make_seed_checkpoint(folder: Path, progress: Progress) -> Path:
    progress.start("seed checkpoint", 0)
    checkpoint = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    outcome = train_on_cpu(checkpoint, num_ranks=1, folder=folder, timeout=_TIMEOUT)
    progress.end(outcome.error is not None)
    if outcome.error is not None:
        raise DemoError(f"TorchTitan could not make the seed checkpoint: {outcome.error}")
    return folder / "checkpoint" / "step-0"


def _train(schedule: str, steps: int, seed: Path, folder: Path, progress: Progress) -> JobOutcome:
    progress.start(folder.name, steps)
    outcome = train_on_cpu(
        [
            *("--training.steps", str(steps)),
            *("--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", str(seed)),
            *("--parallelism.pipeline_parallel_degree", str(RANKS)),
            *("--parallelism.pipeline_parallel_schedule", schedule),
            *find_installed().checkpoint(ACTIVATION_CHECKPOINT),
        ],
        num_ranks=RANKS,
        folder=folder,
        timeout=_TIMEOUT,
        on_step=lambda step: progress.step(step["step"], step["loss_metrics/global_avg_loss"]),
    )
    progress.end(outcome.error is not None)
    return outcome


def _summary(schedule: str, rounds: Sequence[JobOutcome]) -> Run:
    measured = [step for outcome in rounds for step in outcome.steps[WARM_UP:]]
    # TorchTitan gives tokens per second and device, and all devices of a pipeline work on the same tokens.
    rates = [RANKS * step["throughput(tps)"] for step in measured]
    bubbles = [step[BUBBLE] / 100 for step in measured if BUBBLE in step]
    error = next((outcome.error for outcome in rounds if outcome.error is not None), None)
    return Run(
        schedule,
        resolve(schedule).source,
        ACTIVATION_CHECKPOINT,
        rounds[0].losses,
        median(rates) if rates else None,
        median(bubbles) if bubbles else None,
        "ok" if error is None else "failed",
        error,
    )


BUBBLE = "zbpipe/bubble(%)"
"""Key of the bubble in a job's metrics."""


def largest_difference(runs: list[Run]) -> float | None:
    """Largest relative difference between the losses of successful runs; None for fewer than two."""
    losses = [run.losses for run in runs if run.status == "ok"]
    if len(losses) < 2:
        return None
    return max(abs(b - a) / abs(a) for other in losses[1:] for a, b in zip(losses[0], other, strict=True))


def as_json(runs: list[Run], emulated: list[Emulated]) -> dict[str, Any]:
    """Records that `zbpipe demo --json FILE` writes."""
    return {"runs": [asdict(run) for run in runs], "emulated": [each.figures() for each in emulated]}
