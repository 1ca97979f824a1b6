"""Commands that look at schedules (`list`, `show`, `simulate`, `compare`, `playground`), or write and check their files
(`export`, `validate`)."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from zbpipe.cli import base
from zbpipe.cli.base import EXISTING, Command, JobCommand, OutputFile, one_line, print_json
from zbpipe.cli.request import (
    Costs,
    Request,
    compare_all,
    cost_options,
    limit_option,
    memory_limit_option,
    request_options,
)
from zbpipe.costs.job import RELATIVE, MemoryLimit
from zbpipe.costs.model import Transport
from zbpipe.schedule.ir import count_noun, require_size
from zbpipe.schedule.registry import schedules
from zbpipe.schedule.user_code import read_text
from zbpipe.simulator.validation import validate_table

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
        timeline.svg(svg_file, costs.words)
    if html_file is not None:
        timeline.html(html_file, costs.words)
    if perfetto_file is not None:
        from zbpipe.views.perfetto import write_perfetto

        write_perfetto(perfetto_file, timeline)
    written = list(filter(None, (svg_file, html_file, perfetto_file)))
    if not written:
        timeline.show()
    words = f"drawn with {costs.words}"
    if click.get_current_context().get_parameter_source("costs") is ParameterSource.DEFAULT and costs.file is None:
        words += ". Equal times are those of the papers; `zbpipe compare` has --costs typical"
    click.echo("\n".join([summary(timeline), words, *(f"wrote {file}" for file in written)]))


@click.command(cls=Command)
@request_options()
@base.transport_option
@base.json_option
def simulate(request: Request, transport: Transport | None, as_json: bool) -> None:
    """Simulate a schedule: makespan, bubble, memory.

    Also prints the idle time of each rank, and a lower bound of the makespan for this placement and these times.

    \b
    Examples:
      zbpipe simulate ZBV -p 8 -m 32 --costs 1,1.2,0.8 --comm 0.05
      zbpipe simulate ZBH2 -p 8 -m 32 --json
    """
    from zbpipe.views.report import record, report

    costs = request.costs
    transport = costs.transport(transport)
    timeline = request.simulate(transport=transport)
    baseline = costs.baseline(timeline.schedule.num_ranks, timeline.schedule.num_microbatches)
    if as_json:
        print_json(record(timeline, baseline))
        return
    click.echo(report(timeline, baseline))
    click.echo(f"\n{costs.words}")


@click.command(cls=JobCommand)
@base.size_options
@base.stages_option
@cost_options(of_job=True)
@base.transport_option
@memory_limit_option
@base.json_option
def compare(
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    costs: Costs,
    transport: Transport | None,
    memory_limit: MemoryLimit | None,
    as_json: bool,
) -> None:
    """Compare all schedules, the shortest step first.

    Equally fast schedules are sorted by memory. The recommended schedule has the shortest step within 1F1B's memory, or
    within the memory limit; it is ZB if that is at most 2 % longer. ZB and ZBLoop have 4 stages per rank, as in jobs
    with 4 layers per rank, or as many as they choose in your job. Its limit is what the weights leave of the device.
    Schedules over the limit follow with a mark. Schedules that cannot run are last: torch's own split fails under
    selective checkpointing.

    \b
    Examples:
      zbpipe compare -p 8 -m 32
      zbpipe compare -p 8 -m 32 --stages-per-rank 4
      zbpipe compare -p 8 -m 32 --checkpointing full --memory-limit 1.2x
      zbpipe compare -p 8 -m 32 --costs 1,1.2,0.8 --memory-limit 6
      zbpipe compare --module titan_integration.llama3 --config llama3_70b --gpus 64 --device H200
    """
    from zbpipe.views import report

    ranks, microbatches = costs.require_size(ranks, microbatches)
    transport = costs.transport(transport)
    require_size(f"a pipeline of {ranks} ranks", ranks, microbatches)
    how = (memory_limit, transport, stages_per_rank)
    compared = compare_all(ranks, microbatches, costs, *how, with_period=as_json)
    standings = sorted(compared, key=lambda each: each.sort_key)
    if as_json:
        print_json(report.records(standings))
    else:
        click.echo(f"{ranks} ranks, {microbatches} microbatches; {costs.words}\n")
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

    One row per rank, one cell per op: its stage, F, I, W or B, and its microbatch, like 15I0. torch and TorchTitan load
    the file unchanged, for example with --parallelism.pipeline_parallel_schedule_csv. ZB and other schedules that adapt
    to costs use the cost options.

    \b
    Example:
      zbpipe export ZBV -p 4 -m 8 -o zbv.csv
    """
    schedule, _ = request.make()
    output.write_text(schedule.to_csv(), encoding="utf-8")
    sizes = (sum(map(len, schedule)), "op"), (len(schedule.placement.stages_on(0)), "stage")
    ops, stages = (count_noun(*each) for each in sizes)
    ranks = count_noun(schedule.num_ranks, "rank")
    click.echo(f"wrote {output}: {schedule.name}, {ranks} with {stages} each, {ops}")


@click.command(cls=Command)
@click.argument("file", type=EXISTING)
@limit_option("Memory limit of a rank", _IN_SHARES)
def validate(file: Path, memory_limit: MemoryLimit | None) -> None:
    """Check the schedule in a CSV file.

    It has to be complete, each rank has to be able to run its order, and no ranks may deadlock. The file is torch's
    compute-only table, or its table with communication, whose sends and receives have to match as well. Other
    commands and jobs read only its computations. Prints one finding per line. The exit code is 1 if there is any.
    A memory limit counts activations without checkpointing, in units of one microbatch on one rank. `compare` and
    `simulate` include checkpointing.

    \b
    Example:
      zbpipe validate mine.csv --memory-limit 4
    """
    if memory_limit is not None and memory_limit.unit == "bytes":
        raise ValueError(
            f"memory_limit = {memory_limit.written!r} is in bytes, but these costs are not: write {_IN_SHARES}"
        )
    try:
        schedule, findings = validate_table(read_text(file), str(file), memory_limit)
    except ValueError as error:
        click.echo(f"table: {one_line(str(error))}")
        raise SystemExit(1) from None
    for finding in findings:
        click.echo(str(finding))
    if findings:
        raise SystemExit(1)
    click.echo(
        f"{schedule.name}: valid; {count_noun(schedule.num_ranks, 'rank')},"
        f" {count_noun(schedule.placement.num_stages, 'stage')}, {count_noun(schedule.num_microbatches, 'microbatch')},"
        f" {count_noun(sum(map(len, schedule)), 'op')}"
    )
