"""Commands that look at schedules by name: `list`, `show`, `simulate`, `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zbpipe.cli.base import (
    COUNT,
    Command,
    OutputFile,
    Times,
    cost_options,
    json_option,
    memory_limit_option,
    name_argument,
    print_json,
    required_size,
    size_options,
    stages_option,
    transport_option,
)
from zbpipe.cli.named import all_simulated, simulated, uniform

if TYPE_CHECKING:
    from zbpipe.timeline import Timeline
    from zbpipe.transport import Transport


@click.command("list", cls=Command)
@json_option
def list_(as_json: bool) -> None:
    """List all schedules, with those of installed packages.

    \b
    Example:
      zbpipe list
    """
    from zbpipe.registry import schedules
    from zbpipe.views.report import table

    known = sorted(schedules().values(), key=lambda algorithm: algorithm.name.lower())
    if as_json:
        keys = ("name", "stages_per_rank", "placement", "source", "summary")
        print_json([{key: getattr(algorithm, key) for key in keys} for algorithm in known])
        return
    rows = [
        (
            algorithm.name,
            f"{algorithm.stages_per_rank}{' or any' if algorithm.any_stages_per_rank else ''}",
            algorithm.placement,
            algorithm.source,
            algorithm.summary,
        )
        for algorithm in known
    ]
    for line in table(("schedule", "stages per rank", "placement", "runs as", "summary"), rows, left=5):
        click.echo(line)


@click.command(cls=Command)
@name_argument
@size_options
@stages_option
@cost_options
@transport_option
@click.option("--svg", "svg_file", type=OutputFile(), help="Write a picture to this file.")
@click.option("--html", "html_file", type=OutputFile(), help="Write an interactive page, with memory over time.")
@click.option(
    "--perfetto", "perfetto_file", type=OutputFile(), help="Write a trace for ui.perfetto.dev or chrome://tracing."
)
def show(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    costs: Times,
    comm: float,
    transport: Transport,
    svg_file: Path | None,
    html_file: Path | None,
    perfetto_file: Path | None,
) -> None:
    """Draw a schedule, in the terminal or into files.

    Time runs from left to right. F is a forward, I the backward for the input, W the backward for the weights, B a full
    backward; the numbers are microbatches.

    \b
    Examples:
      zbpipe show ZBV -p 4 -m 8
      zbpipe show 1F1B -p 4 -m 8 --costs 1,1.2,0.8 --comm 0.1 --svg 1f1b.svg --html 1f1b.html
      zbpipe show mine.csv
    """
    from zbpipe.views.style import summary

    timeline = simulated(name, ranks, microbatches, uniform(costs, comm), stages_per_rank, transport=transport)
    written = _write_pictures(timeline, svg_file, html_file, perfetto_file)
    if not written:
        from rich.console import Console

        from zbpipe.views.grid import grid

        console = Console(highlight=False)
        console.print(grid(timeline, console.width, console.height))
    click.echo(summary(timeline))
    for file in written:
        click.echo(f"wrote {file}")


def _write_pictures(
    timeline: Timeline, svg_file: Path | None, html_file: Path | None, perfetto_file: Path | None
) -> list[Path]:
    """Write the files that are named, and tell which."""
    written: list[Path] = []

    def write(file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        written.append(file)

    if svg_file is not None:
        from zbpipe.views.svg import svg

        write(svg_file, svg(timeline))
    if html_file is not None:
        from zbpipe.views.html import html

        write(html_file, html(timeline))
    if perfetto_file is not None:
        from zbpipe.views.perfetto import perfetto

        write(perfetto_file, perfetto(timeline))
    return written


@click.command(cls=Command)
@name_argument
@size_options
@stages_option
@cost_options
@transport_option
@click.option("--steps", type=COUNT, default=1, show_default=True, help="Training steps in a row.")
@click.option(
    "--no-sync", is_flag=True, help="Let each rank start its next step as soon as it is done. ZBH2 and ZB2P rely on it."
)
@json_option
def simulate(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    costs: Times,
    comm: float,
    transport: Transport,
    steps: int,
    no_sync: bool,
    as_json: bool,
) -> None:
    """Simulate a schedule: makespan, bubble, peak activations.

    Also prints the idle time of each rank, and a lower bound of the makespan for this placement and these times.

    \b
    Examples:
      zbpipe simulate ZBV -p 8 -m 32 --costs 1,1.2,0.8 --comm 0.05
      zbpipe simulate ZBH2 -p 8 -m 32 --steps 4 --no-sync --json
    """
    from zbpipe.views.report import record, report

    timeline = simulated(
        name,
        ranks,
        microbatches,
        uniform(costs, comm),
        stages_per_rank,
        num_steps=steps,
        synchronous=not no_sync,
        transport=transport,
    )
    if as_json:
        print_json(record(timeline))
    else:
        click.echo(report(timeline))


@click.command(cls=Command)
@required_size
@cost_options
@transport_option
@memory_limit_option
@json_option
def compare(
    ranks: int,
    microbatches: int,
    costs: Times,
    comm: float,
    transport: Transport,
    memory_limit: float | None,
    as_json: bool,
) -> None:
    """Compare all schedules, the shortest step first.

    Schedules over the memory limit come last, with a mark.

    \b
    Examples:
      zbpipe compare -p 8 -m 32
      zbpipe compare -p 8 -m 32 --costs 1,1.2,0.8 --memory-limit 6
    """
    from zbpipe.views import report

    limits = None if memory_limit is None else (memory_limit,) * ranks
    standings = report.compare(all_simulated(ranks, microbatches, uniform(costs, comm), transport=transport), limits)
    if as_json:
        print_json([standing.record() for standing in standings])
        return
    for line in report.comparison(standings):
        click.echo(line)
