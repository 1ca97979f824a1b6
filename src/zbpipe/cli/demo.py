"""`demo`: the whole way, on this machine's CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from zbpipe.titan.demo import Run


@click.command()
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=2), help="Training steps of each run.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Also write the results to this file.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep checkpoints and the ranks' output in this folder.",
)
def demo(steps: int, json_file: Path | None, keep: Path | None) -> None:
    """Train TorchTitan's Llama on this machine's CPU, with torch's schedules and with zbpipe's.

    TorchTitan's Llama 3 debug model learns the source text of Python's standard library, on 2 pipeline ranks, with
    TorchTitan's default selective activation checkpointing, once with each of 1F1B and ZBVZeroBubble (torch) and ZBV
    (zbpipe), from the same weights and on the same data. Takes about two minutes.
    """
    from zbpipe.titan.console import ConsoleProgress, print_table
    from zbpipe.titan.demo import DemoError, as_json, run_demo

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise click.UsageError(f"--json {json_file}: its folder does not exist")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise click.UsageError(f"--keep {keep}: the folder is not empty; name a new one")
    try:
        with ConsoleProgress() as progress:
            runs = run_demo(steps, progress, keep)
    except DemoError as error:
        raise click.ClickException(str(error)) from None
    print_table(runs)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(runs), indent=2) + "\n")
    raise SystemExit(_exit_code(runs))


def _exit_code(runs: list[Run]) -> int:
    """Nonzero if a run failed that is not known to fail: torch's ZBVZeroBubble may."""
    return int(any(run.status == "failed" and run.schedule != "ZBVZeroBubble" for run in runs))
