"""`demo`: the whole way, on this machine's CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zbpipe.cli.base import OutputFile, in_one_line

if TYPE_CHECKING:
    from zbpipe.demo.comparison import Run


@click.command()
@click.option(
    "--steps", default=10, show_default=True, type=click.IntRange(2, 10_000), help="Training steps of each run."
)
@click.option("--json", "json_file", type=OutputFile(), help="Also write the results to this file.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, readable=True, writable=True, path_type=Path),
    help="Keep checkpoints and the ranks' output in this folder.",
)
def demo(steps: int, json_file: Path | None, keep: Path | None) -> None:
    """Train TorchTitan's Llama on this machine's CPU, with torch's schedules and with zbpipe's.

    TorchTitan's Llama 3 debug model learns the source text of Python's standard library, on 2 pipeline ranks, with
    TorchTitan's default selective activation checkpointing, once with each of 1F1B and ZBVZeroBubble (torch) and ZBV
    (zbpipe), from the same weights and on the same data. Takes about two minutes.
    """
    from zbpipe.demo.comparison import DemoError, as_json, run_demo
    from zbpipe.demo.console import ConsoleProgress, print_table

    if keep is not None:
        _require_new(keep)
    try:
        with ConsoleProgress() as progress:
            runs = run_demo(steps, progress, keep)
    except DemoError as error:
        raise click.ClickException(str(error)) from None
    print_table(runs)
    if json_file is not None:
        with in_one_line(OSError):
            json_file.write_text(json.dumps(as_json(runs), indent=2) + "\n", encoding="utf-8")
    raise SystemExit(_exit_code(runs))


def _require_new(folder: Path) -> None:
    """Refuse a folder that has something in it, or that cannot be made."""
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"--keep {folder}: the folder is not empty; name a new one")
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise click.UsageError(f"--keep {folder}: {above} is no folder that you can write to")


def _exit_code(runs: list[Run]) -> int:
    """Nonzero if a run failed that is not known to fail: torch's ZBVZeroBubble may."""
    return int(any(run.status == "failed" and run.schedule != "ZBVZeroBubble" for run in runs))
