"""Commands that look at schedules (`list`, `show`, `simulate`, `compare`, `playground`), or write and check their files
(`export`, `validate`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zbpipe.cli import base
from zbpipe.cli.base import COUNT, Command, OutputFile, one_line, print_json, size_options, stages_option
from zbpipe.cli.jobs import TITANS
from zbpipe.cli.request import (
    Costs,
    Request,
    cost_options,
    limit_option,
    memory_limit_option,
    request_options,
    simulate_all,
)
from zbpipe.costs.job import RELATIVE, MemoryLimit
from zbpipe.costs.model import CostModel, Transport
from zbpipe.schedule.ir import count_noun, require_size
from zbpipe.schedule.registry import schedules
from zbpipe.schedule.user_code import read_text
from zbpipe.simulator.message_checks import check_table
from zbpipe.simulator.validation import validate as findings_of

if TYPE_CHECKING:
    from zbpipe.views.report import Vary

_IN_SHARES = f"{RELATIVE}, or a number of microbatches on one rank"


@click.command("list", cls=Command)
@base.json_option
def list_(as_json: bool) -> None:
    """List all schedules, with those of installed packages. `compare` has their step times and memory.

    \b
    Example:
      zbpipe list
    """
    from zbpipe.views.report import table

    known = sorted(schedules().values(), key=lambda algorithm: algorithm.name.lower())
    keys = ("name", "source", "stages_per_rank", "placement", "summary")
    rows = [{key: getattr(each, key) for key in keys} for each in known]
    if as_json:
        print_json(rows)
        return
    for row, each in zip(rows, known, strict=True):
        row["stages_per_rank"] = f"{each.stages_per_rank}{' or any' if each.any_stages_per_rank else ''}"
    cells = [tuple(row.values()) for row in rows]
    click.echo("\n".join(table(("schedule", "from", "stages per rank", "placement", "summary"), cells, left=5)))


@click.command(cls=Command)
@request_options(times="1,1,1")
@base.transport_option
@click.option("--svg", "svg_file", type=OutputFile(), help="Write a picture to this file.")
@click.option("--html", "html_file", type=OutputFile(), help="Write an interactive page, with memory over time.")
@click.option(
    "--perfetto",
    "perfetto_file",
    type=OutputFile(),
    help="Write a trace for ui.perfetto.dev or chrome://tracing; gzipped if its name ends in .gz.",
)
def show(
    request: Request,
    transport: Transport | None,
    svg_file: Path | None,
    html_file: Path | None,
    perfetto_file: Path | None,
) -> None:
    """Draw a schedule, in the terminal or into files.

    Time runs from left to right. F is a forward, I the backward for the input, W the backward for the weights, B a full
    backward. The numbers are microbatches. By default all times are equal, as in the papers. `--costs typical` has the
    times of a transformer.

    \b
    Examples:
      zbpipe show ZBV -p 4 -m 8
      zbpipe show 1F1B -p 4 -m 8 --costs 1,1.2,0.8 --comm 0.1 --svg 1f1b.svg --html 1f1b.html
      zbpipe show mine.csv
    """
    from zbpipe.views.style import summary

    costs = request.costs
    timeline = request.simulate(transport=costs.transport(transport))
    if svg_file is not None:
        from zbpipe.views.svg import svg

        svg_file.write_text(svg(timeline, drawn_with=costs.words), encoding="utf-8")
    if html_file is not None:
        from zbpipe.views.html import html

        html_file.write_text(html(timeline, costs.words), encoding="utf-8")
    if perfetto_file is not None:
        from zbpipe.views.perfetto import write_perfetto

        write_perfetto(perfetto_file, timeline)
    written = list(filter(None, (svg_file, html_file, perfetto_file)))
    if not written:
        timeline.show()
    click.echo("\n".join([summary(timeline), f"drawn with {costs.words}", *(f"wrote {file}" for file in written)]))


def _parse_jitter(text: str) -> Vary:
    from zbpipe.simulator.jitter import Jitter, step_times

    jitter = Jitter.parse(text)
    return lambda timeline: step_times(timeline.schedule, timeline.costs, jitter).record()


_jitter_option = click.option(
    "--jitter",
    "vary",
    callback=base.parse_with(_parse_jitter),
    metavar="WORDS",
    help="Varying times, separated by commas: ops=0.1 (relative standard deviation of an op's time), delay=0.2"
    " (mean delay of a message in seconds), slow-rank=3:1.2, slow-link=0-1:0.5 (docs/messages.md).",
)


@click.command(cls=Command)
@request_options()
@base.transport_option
@click.option("--steps", type=COUNT, default=1, show_default=True, help="Training steps in a row.")
@click.option(
    "--no-sync", is_flag=True, help="Let each rank start its next step when it is done, as ZBH2 and ZB2P assume."
)
@_jitter_option
@base.json_option
def simulate(
    request: Request,
    transport: Transport | None,
    steps: int,
    no_sync: bool,
    vary: Vary | None,
    as_json: bool,
) -> None:
    """Simulate a schedule: makespan, bubble, memory.

    Also prints the idle time of each rank, and a lower bound of the makespan for this placement and these times.

    \b
    Examples:
      zbpipe simulate ZBV -p 8 -m 32 --costs 1,1.2,0.8 --comm 0.05
      zbpipe simulate ZBV -p 8 -m 32 --jitter ops=0.1,delay=0.5
      zbpipe simulate ZBH2 -p 8 -m 32 --steps 4 --no-sync --json
    """
    from zbpipe.views.report import record, report
    from zbpipe.views.style import number

    costs = request.costs
    transport = costs.transport(transport)
    if vary and (no_sync or steps > 1 or transport is not Transport.IDEAL):
        raise click.UsageError("--jitter is for one synchronous step with the ideal transport: omit the other options")
    timeline = request.simulate(num_steps=steps, synchronous=not no_sync, transport=transport)
    baseline = costs.baseline(timeline.schedule.num_ranks, timeline.schedule.num_microbatches)
    varied = vary(timeline) if vary else None
    if as_json:
        print_json(record(timeline, baseline) | ({"jitter": varied} if varied else {}))
        return
    click.echo(report(timeline, baseline))
    if varied:
        words = ", ".join(f"{name} {number(seconds)}" for name, seconds in varied.items())
        click.echo(f"\nwhere times vary, 1000 steps: {words}")
    click.echo(f"\n{costs.words}")


@click.command(cls=Command, context_settings=TITANS)
@size_options
@base.stages_option
@cost_options(of_job=True)
@base.transport_option
@memory_limit_option
@_jitter_option
@base.json_option
def compare(
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    costs: Costs,
    transport: Transport | None,
    memory_limit: MemoryLimit | None,
    vary: Vary | None,
    as_json: bool,
) -> None:
    """Compare all schedules, the shortest step first.

    Equally fast schedules are sorted by memory. The recommended schedule has the shortest step within 1F1B's memory, or
    within the memory limit; it is ZB if that is at most 2 % longer. ZB and ZBLoop have 4 stages per rank, as in jobs
    with 4 layers per rank, or as many as they choose in your job. Its limit is what the weights leave of the device.
    Schedules over the limit follow with a mark. Schedules that cannot run are last: torch's own split fails under
    selective checkpointing. With --jitter, the 95th percentile of the step time decides.

    \b
    Examples:
      zbpipe compare -p 8 -m 32
      zbpipe compare -p 8 -m 32 --stages-per-rank 4
      zbpipe compare -p 8 -m 32 --jitter ops=0.1,delay=0.5
      zbpipe compare -p 8 -m 32 --checkpointing full --memory-limit 1.2x
      zbpipe compare -p 8 -m 32 --costs 1,1.2,0.8 --memory-limit 6
      zbpipe compare --module titan_integration.llama3 --config llama3_70b --gpus 64 --device H200
    """
    from zbpipe.views import report

    ranks, microbatches = costs.require_size(ranks, microbatches)
    transport = costs.transport(transport)
    require_size(f"a pipeline of {ranks} ranks", ranks, microbatches)
    limits = costs.limits(memory_limit, ranks, microbatches)
    baseline = costs.baseline(ranks, microbatches)
    if vary and transport is not transport.IDEAL:
        raise click.UsageError("--jitter is for the ideal transport: omit --transport")
    if not as_json:
        click.echo(f"{ranks} ranks, {microbatches} microbatches; {costs.words}\n")
    if costs.job is None and costs.stages is None:
        costs = replace(costs, stages=4)  # of four layers per rank or more
    timelines = simulate_all(ranks, microbatches, costs, memory_limit, stages_per_rank, transport=transport)
    how = (limits, baseline, vary, costs.checkpointing)
    compared = (report.ComparedSchedule.of(each, *how, with_period=as_json) for each in timelines)
    standings = sorted(compared, key=lambda each: each.sort_key)
    if as_json:
        print_json(report.records(standings))
    else:
        click.echo("\n".join(report.comparison(standings)))


@click.command(cls=Command)
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: a free one.")
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the page in the browser.")
def playground(port: int, browser: bool) -> None:
    """Try schedules in the browser: sliders for sizes, times and memory.

    Shows two schedules, the best plan found, and the lower bound. It runs on this machine only, until Ctrl-C.

    \b
    Example:
      zbpipe playground
    """
    from zbpipe.views.playground import server

    try:
        listening = server(port)
    except OSError as error:
        raise ValueError(f"--port {port} cannot be used ({error.strerror}): omit it for a free one") from None
    with listening as started:
        host, taken = started.server_address[:2]
        address = f"http://{host!s}:{taken}/"
        click.echo(f"the playground is at {address}; Ctrl-C ends it")
        if browser:
            import webbrowser

            webbrowser.open(address)
        try:
            started.serve_forever()
        except KeyboardInterrupt:
            click.echo()


@click.command(cls=Command)
@request_options()
@click.option("-o", "--output", type=OutputFile(ending=".csv"), required=True, help="The .csv file to write.")
def export(request: Request, output: Path) -> None:
    """Write a schedule as torch's compute-only CSV.

    One row per rank, one cell per op. torch and TorchTitan load it unchanged, for example with
    --parallelism.pipeline_parallel_schedule_csv. Only schedules that adapt to costs use the cost options.

    \b
    Example:
      zbpipe export ZBV -p 4 -m 8 -o zbv.csv
    """
    schedule, _ = request.make_valid()
    output.write_text(schedule.to_csv(), encoding="utf-8")
    ops = sum(map(len, schedule))
    click.echo(f"wrote {output}: {schedule.name}, {count_noun(schedule.num_ranks, 'rank')}, {count_noun(ops, 'op')}")


def _name_or_file(context: click.Context, argument: click.Parameter, text: str) -> str | Path:
    """Parse what `validate` takes: a file need not end in .csv."""
    if text.lower().endswith(".csv") or Path(text).is_file():
        file: Path = click.Path(exists=True, dir_okay=False, path_type=Path).convert(text, argument, context)
        return file
    return text


@click.command(cls=Command)
@click.argument("name", callback=_name_or_file)
@size_options
@stages_option
@limit_option("Memory limit of a rank", _IN_SHARES)
def validate(
    name: str | Path,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    memory_limit: MemoryLimit | None,
) -> None:
    """Check a schedule, by its name or in a CSV file.

    It has to be complete, each rank has to be able to run its order, and no ranks may deadlock. A file is torch's
    compute-only table, or its table with communication, whose sends and receives have to match as well. Other
    commands and jobs read only its computations. Prints one finding per line. The exit code is 1 if there is any.
    A memory limit counts activations without checkpointing, in units of one microbatch on one rank. `compare` and
    `simulate` include checkpointing.

    \b
    Examples:
      zbpipe validate mine.csv --memory-limit 4
      zbpipe validate ZBV -p 4 -m 8
    """
    if memory_limit is not None and memory_limit.unit == "bytes":
        raise ValueError(
            f"memory_limit = {memory_limit.written!r} is in bytes, but these costs are not: write {_IN_SHARES}"
        )
    if isinstance(name, str):
        schedule, _ = Request(name, ranks, microbatches, Costs(CostModel.uniform, words=""), stages_per_rank).make()
        findings, how = findings_of(schedule, memory_limit), ""
    else:
        try:
            schedule, findings, how = check_table(read_text(name), str(name), memory_limit)
        except ValueError as error:
            click.echo(f"table: {one_line(str(error))}")
            raise SystemExit(1) from None
        for given, own, what in (
            (ranks, schedule.num_ranks, "ranks"),
            (microbatches, schedule.num_microbatches, "microbatches"),
            (stages_per_rank, len(schedule.placement.stages_on(0)), "stages per rank"),
        ):
            if given not in (None, own):
                raise ValueError(f"{schedule.name} is a table for {own} {what}, not {given}: omit that option")
    for finding in findings:
        click.echo(str(finding))
    if findings:
        click.echo(how, nl=bool(how))
        raise SystemExit(1)
    click.echo(
        f"{schedule.name}: valid; {count_noun(schedule.num_ranks, 'rank')},"
        f" {count_noun(schedule.placement.num_stages, 'stage')}, {count_noun(schedule.num_microbatches, 'microbatch')},"
        f" {count_noun(sum(map(len, schedule)), 'op')}"
    )
    click.echo(how, nl=bool(how))
