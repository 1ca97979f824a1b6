"""`zbpipe demo`: TorchTitan's Llama 3 debug model under torch's schedules and zbpipe's, all from the same weights."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from zbpipe.demo.launch import JobOutcome, train_on_cpu
from zbpipe.registry import lookup
from zbpipe.titan.versions import installed

SCHEDULES = ("1F1B", "ZBVZeroBubble", "ZBV")
RANKS = 2
ACTIVATION_CHECKPOINT = "selective"  # TorchTitan's default
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Run:
    """One schedule's training."""

    schedule: str
    source: Literal["torch", "zbpipe"]
    activation_checkpoint: str
    losses: list[float]
    tokens_per_second: float | None
    """Of the whole job: the median over all steps but the first, which sets everything up."""
    status: Literal["ok", "failed"]
    error: str | None


class Progress(Protocol):
    """Shows how far the demo is."""

    def started(self, what: str, steps: int) -> None: ...

    def stepped(self, step: int, loss: float) -> None: ...

    def ended(self, run: Run | None) -> None: ...


class DemoError(RuntimeError):
    """The demo could not start."""


def run_demo(steps: int, progress: Progress, folder: Path | None = None) -> list[Run]:
    """Train once with each of `SCHEDULES`, on `RANKS` processes, all from one seed checkpoint.

    Args:
        steps: optimizer steps of each run.
        progress: called at every step.
        folder: where checkpoints and logs go; default: a temporary one.

    Raises:
        DemoError: TorchTitan is not installed, zbpipe does not know its version, or the seed checkpoint failed.
    """
    try:
        installed()
    except ImportError as error:
        raise DemoError(f"the demo trains with TorchTitan: {error}") from None
    with tempfile.TemporaryDirectory(prefix="zbpipe-demo-") as temporary:
        base = folder or Path(temporary)
        seed = _make_seed_checkpoint(base / "seed", progress)
        return [_train(schedule, steps, seed, base / schedule, progress) for schedule in SCHEDULES]


def _make_seed_checkpoint(folder: Path, progress: Progress) -> Path:
    progress.started("seed checkpoint", 0)
    checkpoint = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    outcome = train_on_cpu(checkpoint, num_ranks=1, folder=folder, timeout=_TIMEOUT)
    progress.ended(None)
    if outcome.error is not None:
        raise DemoError(f"TorchTitan could not make the seed checkpoint: {outcome.error}")
    return folder / "checkpoint" / "step-0"


def _train(schedule: str, steps: int, seed: Path, folder: Path, progress: Progress) -> Run:
    progress.started(schedule, steps)
    outcome = train_on_cpu(
        [
            *("--training.steps", str(steps)),
            *("--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", str(seed)),
            *("--parallelism.pipeline_parallel_degree", str(RANKS)),
            *("--parallelism.pipeline_parallel_schedule", schedule),
            *installed().checkpoint(ACTIVATION_CHECKPOINT),
        ],
        num_ranks=RANKS,
        folder=folder,
        timeout=_TIMEOUT,
        on_step=lambda step: progress.stepped(step["step"], step["loss_metrics/global_avg_loss"]),
    )
    run = _summary(schedule, outcome)
    progress.ended(run)
    return run


def _summary(schedule: str, outcome: JobOutcome) -> Run:
    # TorchTitan gives tokens per second and device, and all devices of a pipeline work on the same tokens.
    rates = [RANKS * step["throughput(tps)"] for step in outcome.steps[1:]]
    return Run(
        schedule,
        lookup(schedule).source,
        ACTIVATION_CHECKPOINT,
        outcome.losses,
        median(rates) if rates else None,
        "ok" if outcome.error is None else "failed",
        outcome.error,
    )


def largest_difference(runs: list[Run]) -> float | None:
    """The largest relative difference between the losses of the runs that ended well; None if fewer than two did."""
    losses = [run.losses for run in runs if run.status == "ok"]
    if len(losses) < 2:
        return None
    return max(abs(b - a) / abs(a) for other in losses[1:] for a, b in zip(losses[0], other, strict=True))


def as_json(runs: list[Run]) -> dict[str, Any]:
    """What `zbpipe demo --json FILE` writes."""
    return {"runs": [asdict(run) for run in runs]}
