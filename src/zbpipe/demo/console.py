"""The demo in the terminal: progress while it trains, then the table."""

from __future__ import annotations

from types import TracebackType

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

from zbpipe.demo.comparison import ACTIVATION_CHECKPOINT, RANKS, Run, largest_difference


class ConsoleProgress:
    """On a terminal a moving bar for each run; elsewhere lines."""

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

    def __enter__(self) -> ConsoleProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def started(self, what: str, steps: int) -> None:
        self._task = self._bars.add_task(what, total=steps or 1, note="starting")
        self._say(f"{what}: starting")

    def stepped(self, step: int, loss: float) -> None:
        self._bars.update(self._task, completed=step, note=f"loss {loss:.4f}")
        self._say(f"  step {step}: loss {loss:.4f}")

    def ended(self, run: Run | None) -> None:
        if run is None:
            self._bars.update(self._task, completed=1, note="")
        elif run.status == "failed":
            self._bars.update(self._task, note="failed")
            self._bars.stop_task(self._task)
            self._say("  failed")

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line)


def print_table(runs: list[Run]) -> None:
    """Schedule, losses, speed and outcome of each run; an error stays on one line, however long."""
    console = Console(highlight=False)
    table = Table("schedule", "from", box=None, padding=(0, 2, 0, 0))
    for name in ("first loss", "last loss", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("outcome", no_wrap=True)
    for run in runs:
        losses = [f"{loss:.5f}" for loss in (run.losses[:1] + run.losses[-1:])] or ["-", "-"]
        speed = "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
        outcome = "ok" if run.error is None else f"failed: {run.error}"
        table.add_row(run.schedule, run.source, *losses, speed, Text(outcome))  # no markup in torch's words
    wide = Console(highlight=False, width=10_000)
    console.print(f"\nLlama 3 debug model, {RANKS} pipeline ranks on the CPU, {ACTIVATION_CHECKPOINT} checkpointing:\n")
    with wide.capture() as capture:
        wide.print(table)
    for line in capture.get().splitlines():
        console.print(line.rstrip(), soft_wrap=True, markup=False)
    difference = largest_difference(runs)
    if difference is not None:
        console.print(f"\nLargest relative difference between the losses of the runs that are ok: {difference:.1e}")
