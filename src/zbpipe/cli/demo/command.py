"""`demo`: short training runs with three schedules on this machine's CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from pathlib import Path
from statistics import median

import click

from zbpipe.algorithms.generate import generate
from zbpipe.cli.demo.launch import DemoError, JobOutcome, train_on_cpu
from zbpipe.frameworks.titan.versions import find_installed

JOBS: dict[str, tuple[str, ...]] = {name: (name,) for name in ("1F1B", "ZBVZeroBubble", "ZBV")}
"""Schedules, with TorchTitan's arguments. 1F1B comes first: the others are compared with it."""
RANKS = 2
MICROBATCHES = 8
"""As in the demo's models."""
CHECKPOINTING = "selective"  # TorchTitan's default
WARM_UP = 2
"""Warm-up steps of a job, excluded from speed and bubble."""
_TIMEOUT = 300.0
TOLERANCES = {"loss_metrics/global_avg_loss": 1e-5, "grad_norm": 1e-4}
"""Relative tolerances, because float32 sums depend on their order."""


@click.command()
@click.option(
    "--steps", default=6, show_default=True, type=click.IntRange(3, 10_000), help="Training steps of each run."
)
@click.option("--all", "everything", is_flag=True, help="Also train with ZB, Auto, a CSV file and validated steps.")
def demo(steps: int, everything: bool) -> None:
    """Train TorchTitan's Llama on this machine's CPU, with schedules of torch and of zbpipe.

    TorchTitan's Llama 3 debug model learns the source text of Python's standard library on 2 pipeline ranks. It uses
    TorchTitan's default selective activation checkpointing. 1F1B and ZBVZeroBubble (torch) and ZBV (zbpipe) train from
    the same weights and on the same data. Takes some minutes. The exit code is 1 if a schedule fails, except for
    ZBVZeroBubble, or if losses or gradient norms differ. So --all checks a clone of TorchTitan on Python's path.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="zbpipe-demo-") as name:
            folder = Path(name)
            outcomes = run_demo(steps, folder, JOBS | (_more_jobs(folder) if everything else {}))
    except DemoError as error:
        raise click.ClickException(str(error)) from None
    wrong = [words for each in outcomes.items() if (words := find_fault(outcomes["1F1B"], *each))]
    click.echo("\n".join([*_compare(outcomes), *wrong]))
    raise SystemExit(int(bool(wrong)))


def _more_jobs(folder: Path) -> dict[str, tuple[str, ...]]:
    table = folder / "wave.csv"
    table.write_text(generate("ZB", RANKS, MICROBATCHES, stages_per_rank=4).to_csv())
    return {
        "ZB": ("ZB",),
        "Auto": ("Auto", "--zbpipe.profile-steps", "1"),
        "CSV": (str(table),),
        "validated": ("ZBV", "--zbpipe.optimizer-step", "validated"),
    }


def run_demo(steps: int, folder: Path, jobs: Mapping[str, Sequence[str]]) -> dict[str, JobOutcome]:
    """Outcomes of trainings by name, on `RANKS` processes, all from one seed checkpoint.

    Each job is a schedule and TorchTitan's arguments.

    Raises:
        DemoError: the installed TorchTitan cannot be used, or the seed checkpoint failed.
    """
    try:
        version = find_installed()
    except ImportError as error:
        raise DemoError(f"the demo trains with TorchTitan: {error}") from None
    click.echo("seed checkpoint ...")
    checkpoint = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    seed = train_on_cpu(checkpoint, num_ranks=1, folder=folder / "seed", timeout=_TIMEOUT)
    if seed.error is not None:
        raise DemoError(f"TorchTitan could not make the seed checkpoint: {seed.error}")
    outcomes = {}
    for name, job in jobs.items():
        click.echo(f"{name} ...", nl=False)
        outcomes[name] = outcome = train_on_cpu(
            [
                *("--training.steps", str(steps), "--checkpoint.enable", "--checkpoint.load_only"),
                *("--checkpoint.initial_load_path", str(folder / "seed" / "checkpoint" / "step-0")),
                *("--parallelism.pipeline_parallel_degree", str(RANKS)),
                *("--parallelism.pipeline_parallel_schedule", *job, *version.checkpoint(CHECKPOINTING)),
            ],
            num_ranks=RANKS,
            folder=folder / name,
            timeout=_TIMEOUT,
        )
        click.echo(" failed" if outcome.error else f" loss {outcome.losses[0]:.4f} to {outcome.losses[-1]:.4f}")
    return outcomes


BUBBLE = "zbpipe/bubble(%)"
"""The bubble's key in a job's metrics."""


def find_fault(expected: JobOutcome, name: str, found: JobOutcome) -> str | None:
    """What is wrong with a job: it failed, or a metric of a step differs from 1F1B's. None if all is well."""
    if name == "ZBVZeroBubble":  # torch's is known to fail
        return None
    if found.error is not None:
        return f"{name} does not train"
    if len(found.steps) != len(expected.steps):
        return f"{name} has {len(found.steps)} steps and 1F1B {len(expected.steps)}"
    for one, other in zip(expected.steps, found.steps, strict=True):
        for metric, tolerance in TOLERANCES.items():
            if not isclose(one[metric], other[metric], rel_tol=tolerance):
                return f"in step {one['step']} {metric} is {one[metric]} with 1F1B and {other[metric]} with {name}"
    return None


def _compare(outcomes: dict[str, JobOutcome]) -> Iterator[str]:
    """A table with losses, speed, bubble and outcome of each schedule."""
    from zbpipe.views.report import table

    yield (
        f"\nLlama 3 debug model, {RANKS} pipeline ranks on the CPU, {CHECKPOINTING} checkpointing, with which"
        " torch's ZBVZeroBubble fails. Speed and bubble (idle time) are medians of the measured steps, without the"
        " first ones. More ranks have more bubble to fill: `zbpipe compare -p 8 -m 32` simulates them.\n"
    )
    head = ("schedule", "from", "first loss", "last loss", "tokens/s", "bubble")
    yield from table(head, [_cells(*each) for each in outcomes.items()], left=2)


def _cells(schedule: str, outcome: JobOutcome) -> tuple[str, ...]:
    from zbpipe.views.style import percent

    measured, losses = outcome.steps[WARM_UP:], outcome.losses
    # TorchTitan gives tokens per second and device, and all devices of a pipeline work on the same tokens.
    rates = [RANKS * step["throughput(tps)"] for step in measured]
    bubbles = [step[BUBBLE] / 100 for step in measured if BUBBLE in step]
    return (
        schedule,
        "torch" if schedule in ("1F1B", "ZBVZeroBubble") else "zbpipe",
        *([f"{losses[0]:.5f}", f"{losses[-1]:.5f}"] if losses else "--"),
        f"{median(rates):,.0f}" if rates else "-",
        percent(median(bubbles)) if bubbles else "-",
        "ok" if outcome.error is None else f"failed: {outcome.error}",
    )
