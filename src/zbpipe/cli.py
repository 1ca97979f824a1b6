"""The `zbpipe` command. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

if TYPE_CHECKING:
    from zbpipe.costs import CostModel
    from zbpipe.ir import Schedule
    from zbpipe.simulate import Timeline
    from zbpipe.titan.demo import Run

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _UserError(click.ClickException):
    """What the user can put right: one line, exit code 2."""

    exit_code = 2


@contextmanager
def _in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """The one place where errors of these kinds become messages. A broken pipe is none: click ends quietly on it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        raise _UserError(_message(error)) from None


def _message(error: Exception) -> str:
    if isinstance(error, click.UsageError):
        where = f" See `{error.ctx.command_path} --help`." if error.ctx else ""
        return _line(error.format_message()).removesuffix(".") + "." + where
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; name a file in a folder that exists and is yours to write to"
    return _line(str(error))


def _line(text: str) -> str:
    return " ".join(text.split())


class _Group(click.Group):
    """A group that reports misuse of itself and its commands in one line."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _in_one_line(click.UsageError):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _in_one_line(click.UsageError):
            return super().invoke(ctx)


class _Command(click.Command):
    """A command that ends with one line if the library refuses what it was given."""

    def invoke(self, ctx: click.Context) -> Any:
        with _in_one_line(ValueError, OSError):
            return super().invoke(ctx)


class _Times(NamedTuple):
    """What a rank takes for one microbatch, in seconds."""

    f: float
    i: float
    w: float


def _times(context: click.Context, option: click.Parameter, text: str) -> _Times:
    """What `--costs` says."""
    try:
        times = _Times(*map(float, text.split(",")))
    except (TypeError, ValueError):
        raise click.BadParameter(f"{text!r} is not three numbers; write for example 1,1,0.8") from None
    if not all(map(_is_amount, times)) or not any(times):
        raise click.BadParameter(f"{text!r} has no three times from zero on, one above; write for example 1,1,0.8")
    return times


def _amount(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not _is_amount(value):
        raise click.BadParameter(f"{value} is no amount; write a number from zero on, for example 0.5")
    return value


def _is_amount(number: float) -> bool:
    return math.isfinite(number) and number >= 0


def _options(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Several options as one decorator, in the order in which `--help` lists them."""

    def add(command: _Function) -> _Function:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_FILE = click.Path(dir_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)
_name = click.argument("name")
_size = _options(
    click.option("-p", "--ranks", type=_COUNT, metavar="P", help="Pipeline ranks. A CSV file says it itself."),
    click.option(
        "-m", "--microbatches", type=_COUNT, metavar="M", help="Microbatches per step. A CSV file says it itself."
    ),
)
_required_size = _options(
    click.option("-p", "--ranks", type=_COUNT, metavar="P", required=True, help="Pipeline ranks."),
    click.option("-m", "--microbatches", type=_COUNT, metavar="M", required=True, help="Microbatches per step."),
)
_stages = click.option(
    "--stages-per-rank",
    "stages_per_rank",
    type=_COUNT,
    metavar="V",
    help="Stages on each rank, for the schedules that take any number; default: the schedule's own.",
)
_costs = _options(
    click.option(
        "--costs",
        metavar="F,I,W",
        callback=_times,
        default="1,1,1",
        show_default=True,
        help="Seconds (or any one unit) that a rank takes for F, I and W of one microbatch.",
    ),
    click.option(
        "--comm",
        type=float,
        callback=_amount,
        default=0.0,
        show_default=True,
        help="Seconds that a transfer between two ranks takes.",
    ),
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=_Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zbpipe")
@click.pass_context
def main(context: click.Context) -> None:
    """Zero-bubble pipeline schedules for torch.distributed.pipelining and TorchTitan.

    NAME is the name of a schedule, in any case (`zbpipe list` has them), or the path of a .csv file in torch's
    compute-only format.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command("list", cls=_Command)
@_json
def list_(as_json: bool) -> None:
    """List all schedules, also those of installed packages.

    \b
    Example:
      zbpipe list
    """
    from zbpipe.registry import schedules
    from zbpipe.views.report import table

    known = sorted(schedules().values(), key=lambda traits: traits.name.lower())
    if as_json:
        keys = ("name", "stages_per_rank", "placement", "source", "summary")
        _print_json([{key: getattr(traits, key) for key in keys} for traits in known])
        return
    rows = [
        (
            traits.name,
            f"{traits.stages_per_rank}{' or any' if traits.any_stages_per_rank else ''}",
            traits.placement,
            traits.source,
            traits.summary,
        )
        for traits in known
    ]
    for line in table(("schedule", "stages per rank", "placement", "runs as", "summary"), rows, left=5):
        click.echo(line)


@main.command(cls=_Command)
@_name
@_size
@_stages
@_costs
@click.option("--svg", "svg_file", type=_FILE, help="Write a picture to this file.")
@click.option("--html", "html_file", type=_FILE, help="Write a page to zoom, pan and point at, with memory over time.")
@click.option("--perfetto", "perfetto_file", type=_FILE, help="Write a trace for ui.perfetto.dev or chrome://tracing.")
def show(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    costs: _Times,
    comm: float,
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

    timeline = _simulated(name, ranks, microbatches, stages_per_rank, costs, comm)
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


@main.command(cls=_Command)
@_name
@_size
@_stages
@_costs
@click.option("--steps", type=_COUNT, default=1, show_default=True, help="Training steps in a row.")
@click.option(
    "--no-sync", is_flag=True, help="Let each rank begin its next step when it is done, as ZBH2 and ZB2P count on."
)
@_json
def simulate(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    costs: _Times,
    comm: float,
    steps: int,
    no_sync: bool,
    as_json: bool,
) -> None:
    """Run a schedule on paper: makespan, bubble, peak activations.

    And the idle time of each rank, and a lower bound of the makespan for this placement and these times.

    \b
    Examples:
      zbpipe simulate ZBV -p 8 -m 32 --costs 1,1.2,0.8 --comm 0.05
      zbpipe simulate ZBH2 -p 8 -m 32 --steps 4 --no-sync --json
    """
    from zbpipe.views.report import record, report

    timeline = _simulated(
        name, ranks, microbatches, stages_per_rank, costs, comm, num_steps=steps, synchronous=not no_sync
    )
    if as_json:
        _print_json(record(timeline))
    else:
        click.echo(report(timeline))


@main.command(cls=_Command)
@_required_size
@_costs
@click.option(
    "--memory-limit",
    type=float,
    callback=_amount,
    metavar="X",
    help="The most activations that a rank can hold; 1 is its share of one microbatch, 1F1B holds p.",
)
@_json
def compare(
    ranks: int, microbatches: int, costs: _Times, comm: float, memory_limit: float | None, as_json: bool
) -> None:
    """Compare all schedules, the shortest step first.

    What exceeds the memory limit comes after all others and is marked.

    \b
    Examples:
      zbpipe compare -p 8 -m 32
      zbpipe compare -p 8 -m 32 --costs 1,1.2,0.8 --memory-limit 6
    """
    from zbpipe.registry import schedules
    from zbpipe.views import report

    timelines = []
    for traits in schedules().values():
        try:
            timelines.append(_simulated(traits.name, ranks, microbatches, None, costs, comm))
        except ValueError as error:  # one that cannot have these numbers does not keep the others from being compared
            click.echo(f"left out {traits.name}: {_line(str(error))}", err=True)
    standings = report.compare(timelines, memory_limit)
    if as_json:
        _print_json([standing.record() for standing in standings])
        return
    for line in report.comparison(standings):
        click.echo(line)


@main.command(cls=_Command)
@_name
@_size
@_stages
@click.option("-o", "--output", type=_FILE, required=True, help="The CSV file to write.")
def export(name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, output: Path) -> None:
    """Write a schedule as torch's compute-only CSV.

    A row per rank, a cell per op. torch and TorchTitan load it as it is, for instance with
    --parallelism.pipeline_parallel_schedule_csv.

    \b
    Example:
      zbpipe export ZBV -p 4 -m 8 -o zbv.csv
    """
    from zbpipe.views.style import counted

    schedule, _ = _generated(name, ranks, microbatches, stages_per_rank, _Times(1, 1, 1), 0)
    output.write_text(schedule.to_csv(), encoding="utf-8")
    ops = sum(map(len, schedule))
    click.echo(f"wrote {output}: {schedule.name}, {counted(schedule.num_ranks, 'rank')}, {counted(ops, 'op')}")


@main.command(cls=_Command)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--memory-limit",
    type=click.FloatRange(min=0, min_open=True),
    help="Peak activations that a rank may hold, in shares of one microbatch.",
)
def validate(file: Path, memory_limit: float | None) -> None:
    """Check a schedule in a CSV file.

    Is it complete, in an order that each rank can run, and free of deadlock? The format is torch's compute-only table,
    or its table with communication, in which sends and receives have to match as well. Prints everything that is wrong
    with it, a line each, and ends with exit code 1 if anything is.

    \b
    Example:
      zbpipe validate mine.csv --memory-limit 4
    """
    from zbpipe.lowered import check_table
    from zbpipe.views.style import counted

    try:
        schedule, findings = check_table(file.read_text(encoding="utf-8"), str(file), memory_limit)
    except ValueError as error:
        click.echo(f"table: {_line(str(error))}")
        raise SystemExit(1) from None
    for finding in findings:
        click.echo(str(finding))
    if findings:
        raise SystemExit(1)
    click.echo(
        f"{file}: valid; {counted(schedule.num_ranks, 'rank')}, {counted(schedule.placement.num_stages, 'stage')},"
        f" {counted(schedule.num_microbatches, 'microbatch')}, {counted(sum(map(len, schedule)), 'op')}"
    )


def _generated(
    name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, times: _Times, comm: float
) -> tuple[Schedule, CostModel]:
    """The schedule of that name or file, valid, and its costs."""
    from zbpipe.costs import CostModel
    from zbpipe.registry import generate, lookup
    from zbpipe.validate import validate as check

    traits = lookup(name)
    if traits.table is not None:
        ranks = traits.table.placement.num_ranks if ranks is None else ranks
        microbatches = traits.table.num_microbatches if microbatches is None else microbatches
    if ranks is None or microbatches is None:
        missing = "-p (pipeline ranks)" if ranks is None else "-m (microbatches)"
        raise ValueError(f"{traits.name} needs {missing}; for example: {traits.name} -p 4 -m 8")
    costs = CostModel.uniform(traits.place(ranks, stages_per_rank), *times, comm=comm)
    schedule = generate(name, ranks, microbatches, stages_per_rank=stages_per_rank, costs=costs)
    if findings := check(schedule):
        more = f" (the first of {len(findings)} findings)" if len(findings) > 1 else ""
        raise ValueError(
            f"{traits.name} cannot run: {findings[0]}{more}; `zbpipe validate FILE.csv` lists all findings"
        )
    # A function may call what it makes as it likes; people look for the name that they gave.
    return replace(schedule, name=traits.name), costs


def _simulated(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    times: _Times,
    comm: float,
    **how: Any,
) -> Timeline:
    """Its timeline; `how` is for `zbpipe.simulate.simulate`."""
    from zbpipe.simulate import simulate as run

    schedule, costs = _generated(name, ranks, microbatches, stages_per_rank, times, comm)
    return run(schedule, costs, **how)


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))


@main.command()
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
