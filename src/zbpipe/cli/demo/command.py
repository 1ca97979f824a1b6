"""`demo`: short training runs with three schedules, and 8 ranks of sleeping stages, on this machine's CPU."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import click

from zbpipe.cli.base import OutputFile, in_one_line


@click.command()
@click.option(
    "--steps", default=6, show_default=True, type=click.IntRange(3, 10_000), help="Training steps of each run."
)
@click.option("--html", "html_file", type=OutputFile(), help="The page with the picture; default: a temporary file.")
@click.option("--json", "json_file", type=OutputFile(), help="Also write the results to this file.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, readable=True, writable=True, path_type=Path),
    help="Keep checkpoints and the ranks' output in this folder.",
)
def demo(steps: int, html_file: Path | None, json_file: Path | None, keep: Path | None) -> None:
    """Train TorchTitan's Llama on this machine's CPU, with schedules of torch and of zbpipe.

    First, TorchTitan's Llama 3 debug model learns the source text of Python's standard library on 2 pipeline ranks. It
    uses TorchTitan's default selective activation checkpointing. 1F1B and ZBVZeroBubble (torch) and ZBV (zbpipe) train
    alternately, from the same weights and on the same data. Then 1F1B and ZBV run on 8 ranks whose stages sleep instead
    of computing: more ranks have more bubble to fill. Takes some minutes.
    """
    from zbpipe.cli.demo.comparison import as_json, run_demo
    from zbpipe.cli.demo.console import ConsoleProgress, announce_emulated, print_emulated, print_table
    from zbpipe.cli.demo.emulated import ROUNDS, SCHEDULES, DemoError, emulate
    from zbpipe.views.html import join

    if keep is not None:
        _require_new(keep)
    try:
        with ConsoleProgress.show() as progress:
            runs = run_demo(steps, progress, keep)
        print_table(runs)
        announce_emulated()
        with ConsoleProgress.show() as progress:
            progress.start("8 ranks that sleep", ROUNDS * len(SCHEDULES))
            emulated = emulate(on_step=progress.count)
    except DemoError as error:
        raise click.ClickException(str(error)) from None
    print_emulated(emulated)
    shown = {f"{each.schedule}, measured": each.measured for each in emulated}
    shown |= {f"{each.schedule}, simulated": each.planned for each in emulated}
    with in_one_line(OSError):
        file = html_file or Path(tempfile.mkdtemp(prefix="zbpipe-demo-"), "demo.html")
        file.write_text(join("Two schedules on 8 ranks whose stages sleep, on one time scale", shown), encoding="utf-8")
        click.echo(f"\nThe same as an interactive page: {file}")
        if json_file is not None:
            json_file.write_text(json.dumps(as_json(runs, emulated), indent=2) + "\n", encoding="utf-8")
    # torch's ZBVZeroBubble is known to fail.
    raise SystemExit(int(any(run.status == "failed" and run.schedule != "ZBVZeroBubble" for run in runs)))


def _require_new(folder: Path) -> None:
    """Refuse a folder that is not empty or cannot be made."""
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"--keep {folder}: the folder is not empty; name a new one")
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise click.UsageError(f"--keep {folder}: {above} is not a folder that you can write to")
