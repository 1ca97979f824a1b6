"""The demo in the terminal: progress while it trains, then the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from zbpipe.cli.demo.comparison import ACTIVATION_CHECKPOINT, RANKS, ROUNDS, Run, largest_difference
from zbpipe.cli.demo.emulated import MICROBATCHES, SECONDS, Emulated
from zbpipe.cli.demo.emulated import RANKS as RANKS_THAT_SLEEP
from zbpipe.views.style import number, percent


class ConsoleProgress:
    """A progress bar per run on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._bars = Progress(
            SpinnerColumn(finished_text="·"),
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = TaskID(0)

    @classmethod
    @contextmanager
    def show(cls) -> Iterator[ConsoleProgress]:
        progress = cls()
        with progress._bars:
            yield progress

    def start(self, what: str, steps: int) -> None:
        self._task = self._bars.add_task(what, total=steps or 1, note="starting")
        self._say(f"{what}: starting")

    def step(self, step: int, loss: float) -> None:
        self._bars.update(self._task, completed=step, note=f"loss {loss:.4f}")
        self._say(f"  step {step}: loss {loss:.4f}")

    def count(self, steps: int) -> None:
        """Show the number of finished steps with sleeping stages."""
        self._bars.update(self._task, completed=steps, note="")

    def end(self, failed: bool) -> None:
        if failed:
            self._bars.update(self._task, note="failed")
            self._bars.stop_task(self._task)
            self._say("  failed")
        else:
            task = self._bars.tasks[self._task]
            self._bars.update(
                self._task, completed=task.total, note="" if task.total == 1 else str(task.fields["note"])
            )

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line)


def print_table(runs: list[Run]) -> None:
    """Print schedule, losses, speed, bubble and outcome of each run. An error stays on one line, however long."""
    console = Console(highlight=False)
    table = Table("schedule", "from", box=None, padding=(0, 2, 0, 0))
    for name in ("first loss", "last loss", "tokens/s", "bubble"):
        table.add_column(name, justify="right")
    table.add_column("outcome", no_wrap=True)
    for run in runs:
        losses = [f"{loss:.5f}" for loss in (run.losses[:1] + run.losses[-1:])] or ["-", "-"]
        speed = "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
        bubble = "-" if run.bubble is None else percent(run.bubble)
        outcome = "ok" if run.error is None else f"failed: {run.error}"
        table.add_row(run.schedule, run.source, *losses, speed, bubble, Text(outcome))  # no markup in torch's words
    console.print(
        f"\nLlama 3 debug model, {RANKS} pipeline ranks on the CPU, {ACTIVATION_CHECKPOINT} checkpointing. Speed and"
        " bubble (the time in which ranks wait) are measured, without the first steps, and medians of"
        f" {ROUNDS} rounds in turns:\n"
    )
    _print(table)
    difference = largest_difference(runs)
    if difference is not None:
        console.print(f"\nLargest relative difference between the losses of the runs that are ok: {difference:.1e}")


def _print(table: Table) -> None:
    """Print each row on one line, however long, without trailing spaces."""
    wide = Console(highlight=False, width=10_000)
    with wide.capture() as capture:
        wide.print(table)
    for line in capture.get().splitlines():
        Console(highlight=False).print(line.rstrip(), soft_wrap=True, markup=False)


def announce_emulated() -> None:
    """Print which parts of the second run are real."""
    Console(highlight=False).print(
        f"\nThe more ranks, the more bubble there is to fill. Here are {RANKS_THAT_SLEEP} ranks and {MICROBATCHES}"
        " microbatches: the processes, the messages and torch's executor are real, the computing is emulated. On each"
        f" rank F, I and W sleep for {1e3 * SECONDS:.0f} ms each.\n"
    )


def print_emulated(emulated: Sequence[Emulated]) -> None:
    """Print a table of measured and simulated times, and the last schedule's picture: planned above measured."""
    console = Console(highlight=False)
    table = Table("schedule", "from", box=None, padding=(0, 2, 0, 0))
    for name in ("step", "faster", "bubble", "simulated step", "faster", "bubble"):
        table.add_column(name, justify="right")
    usual = emulated[0]
    for each in emulated:
        table.add_row(
            each.schedule,
            each.source,
            f"{each.seconds:.2f} s",
            "" if each is usual else f"{usual.seconds / each.seconds - 1:+.0%}",
            percent(each.measured.bubble),
            f"{each.planned.makespan:.2f} s",
            "" if each is usual else f"{usual.planned.makespan / each.planned.makespan - 1:+.0%}",
            percent(each.planned.bubble),
        )
    _print(table)
    shown = emulated[-1]
    for what, timeline in (("planned", shown.planned), ("measured", shown.measured)):
        console.print(f"\n{shown.schedule} as {what}, {number(timeline.makespan)} s:")
        timeline.show()
