"""`demo`: short training runs with three schedules, and 8 ranks of sleeping stages, on this machine's CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import click

from zbpipe.cli.demo import emulated
from zbpipe.cli.demo.emulated import Emulated
from zbpipe.cli.demo.launch import DemoError, JobOutcome, train_on_cpu
from zbpipe.frameworks.titan.versions import find_installed
from zbpipe.schedule.registry import resolve

SCHEDULES = {name: (name,) for name in ("1F1B", "ZBVZeroBubble", "ZBV")}
RANKS = 2
MICROBATCHES = 8
"""As in the demo's models."""
CHECKPOINTING = "selective"  # TorchTitan's default
ROUNDS = 2
"""Rounds of training. Schedules alternate, so that changes of the machine's speed affect all alike."""
WARM_UP = 2
"""Warm-up steps of a job, excluded from speed and bubble."""
_TIMEOUT = 300.0


@click.command()
@click.option(
    "--steps", default=6, show_default=True, type=click.IntRange(3, 10_000), help="Training steps of each run."
)
def demo(steps: int) -> None:
    """Train TorchTitan's Llama on this machine's CPU, with schedules of torch and of zbpipe.

    First, TorchTitan's Llama 3 debug model learns the source text of Python's standard library on 2 pipeline ranks. It
    uses TorchTitan's default selective activation checkpointing. 1F1B and ZBVZeroBubble (torch) and ZBV (zbpipe) train
    alternately, from the same weights and on the same data. Then 1F1B and ZBV run on 8 ranks whose stages sleep instead
    of computing: more ranks have more bubble to fill. Takes some minutes.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="zbpipe-demo-") as folder:
            outcomes = run_demo(steps, Path(folder))
        click.echo("\n".join(_compare(outcomes)))
        click.echo(
            f"\nThe more ranks, the more bubble there is to fill. Here are {emulated.RANKS} ranks and"
            f" {emulated.MICROBATCHES} microbatches: the processes, the messages and torch's executor are real, the"
            f" computing is emulated. On each rank F, I and W sleep for {1e3 * emulated.SECONDS:.0f} ms each.\n"
        )
        _show_emulated(emulated.emulate())
    except DemoError as error:
        raise click.ClickException(str(error)) from None
    # torch's ZBVZeroBubble is known to fail.
    raise SystemExit(int(any(_error(each) for name, each in outcomes.items() if name != "ZBVZeroBubble")))


def run_demo(
    steps: int, folder: Path, jobs: Mapping[str, Sequence[str]] = SCHEDULES, rounds: int = ROUNDS
) -> dict[str, list[JobOutcome]]:
    """Outcomes of trainings by name, alternately on `RANKS` processes, all from one seed checkpoint.

    Each job is a schedule and TorchTitan's arguments. A job that failed does not train again.

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
    outcomes: dict[str, list[JobOutcome]] = {schedule: [] for schedule in jobs}
    for number in range(rounds):
        for schedule in list(jobs)[:: 1 if number % 2 == 0 else -1]:
            if _error(outcomes[schedule]) is not None:
                continue
            click.echo(f"{schedule}, round {number + 1} ...", nl=False)
            outcome = train_on_cpu(
                [
                    *("--training.steps", str(steps), "--checkpoint.enable", "--checkpoint.load_only"),
                    *("--checkpoint.initial_load_path", str(folder / "seed" / "checkpoint" / "step-0")),
                    *("--parallelism.pipeline_parallel_degree", str(RANKS)),
                    *("--parallelism.pipeline_parallel_schedule", *jobs[schedule], *version.checkpoint(CHECKPOINTING)),
                ],
                num_ranks=RANKS,
                folder=folder / f"{schedule}-{number}",
                timeout=_TIMEOUT,
            )
            outcomes[schedule].append(outcome)
            click.echo(" failed" if outcome.error else f" loss {outcome.losses[0]:.4f} to {outcome.losses[-1]:.4f}")
    return outcomes


def _error(rounds: Sequence[JobOutcome]) -> str | None:
    return next((outcome.error for outcome in rounds if outcome.error is not None), None)


BUBBLE = "zbpipe/bubble(%)"
"""The bubble's key in a job's metrics."""


def _compare(outcomes: dict[str, list[JobOutcome]]) -> Iterator[str]:
    """A table with losses, speed, bubble and outcome of each schedule, and the largest difference between losses."""
    from zbpipe.views.report import table

    yield (
        f"\nLlama 3 debug model, {RANKS} pipeline ranks on the CPU, {CHECKPOINTING} checkpointing. Speed and bubble"
        f" (the time in which ranks wait) are measured, without the first steps, and medians of {ROUNDS} rounds:\n"
    )
    head = ("schedule", "from", "first loss", "last loss", "tokens/s", "bubble")
    yield from table(head, [_cells(*each) for each in outcomes.items()], left=2)
    losses = [rounds[0].losses for rounds in outcomes.values() if _error(rounds) is None]
    if len(losses) > 1:
        most = max(abs(b - a) / abs(a) for other in losses[1:] for a, b in zip(losses[0], other, strict=True))
        yield f"\nLargest relative difference between the losses of the runs that are ok: {most:.1e}"


def _cells(schedule: str, rounds: Sequence[JobOutcome]) -> tuple[str, ...]:
    from zbpipe.views.style import percent

    measured = [step for outcome in rounds for step in outcome.steps[WARM_UP:]]
    # TorchTitan gives tokens per second and device, and all devices of a pipeline work on the same tokens.
    rates = [RANKS * step["throughput(tps)"] for step in measured]
    bubbles = [step[BUBBLE] / 100 for step in measured if BUBBLE in step]
    losses, error = rounds[0].losses, _error(rounds)
    return (
        schedule,
        resolve(schedule).source,
        *([f"{losses[0]:.5f}", f"{losses[-1]:.5f}"] if losses else "--"),
        f"{median(rates):,.0f}" if rates else "-",
        percent(median(bubbles)) if bubbles else "-",
        "ok" if error is None else f"failed: {error}",
    )


def _show_emulated(found: Sequence[Emulated]) -> None:
    from zbpipe.views.report import longer, table
    from zbpipe.views.style import number, percent

    usual, *_, shown = found
    head = ("schedule", "from", "step", "vs 1F1B", "bubble", "simulated step", "vs 1F1B", "bubble")
    rows = [
        (
            each.schedule,
            resolve(each.schedule).source,
            *(f"{each.seconds:.2f} s", longer(each.seconds, usual.seconds), percent(each.measured.bubble)),
            f"{each.planned.makespan:.2f} s",
            *(longer(each.planned.makespan, usual.planned.makespan), percent(each.planned.bubble)),
        )
        for each in found
    ]
    click.echo("\n".join(table(head, rows, left=2)))
    for what, timeline in (("planned", shown.planned), ("measured", shown.measured)):
        click.echo(f"\n{shown.schedule} as {what}, {number(timeline.makespan)} s:")
        timeline.show()
