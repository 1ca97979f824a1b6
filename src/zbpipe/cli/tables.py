"""Commands that write and check schedule files: `export`, `validate`."""

from __future__ import annotations

from pathlib import Path

import click

from zbpipe.cli.base import (
    Command,
    OutputFile,
    Times,
    memory_limit_option,
    name_argument,
    one_line,
    size_options,
    stages_option,
)
from zbpipe.cli.named import generated, uniform


@click.command(cls=Command)
@name_argument
@size_options
@stages_option
@click.option("-o", "--output", type=OutputFile(), required=True, help="The CSV file to write.")
def export(name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, output: Path) -> None:
    """Write a schedule as torch's compute-only CSV.

    One row for each rank, one cell for each op. torch and TorchTitan load it unchanged, for example with
    --parallelism.pipeline_parallel_schedule_csv.

    \b
    Example:
      zbpipe export ZBV -p 4 -m 8 -o zbv.csv
    """
    from zbpipe.views.style import counted

    schedule, _ = generated(name, ranks, microbatches, uniform(Times(1, 1, 1), 0), stages_per_rank)
    output.write_text(schedule.to_csv(), encoding="utf-8")
    ops = sum(map(len, schedule))
    click.echo(f"wrote {output}: {schedule.name}, {counted(schedule.num_ranks, 'rank')}, {counted(ops, 'op')}")


@click.command(cls=Command)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@memory_limit_option
def validate(file: Path, memory_limit: float | None) -> None:
    """Check a schedule in a CSV file.

    It has to be complete, each rank has to be able to run its order, and no ranks may deadlock. The file is torch's
    compute-only table, or its table with communication, whose sends and receives have to match as well. Prints each
    finding on a line; the exit code is 1 if there is any.

    \b
    Example:
      zbpipe validate mine.csv --memory-limit 4
    """
    from zbpipe.actions import check_table
    from zbpipe.files import read_text
    from zbpipe.views.style import counted

    try:
        schedule, findings = check_table(read_text(file), str(file), memory_limit)
    except ValueError as error:
        click.echo(f"table: {one_line(str(error))}")
        raise SystemExit(1) from None
    for finding in findings:
        click.echo(str(finding))
    if findings:
        raise SystemExit(1)
    click.echo(
        f"{file}: valid; {counted(schedule.num_ranks, 'rank')}, {counted(schedule.placement.num_stages, 'stage')},"
        f" {counted(schedule.num_microbatches, 'microbatch')}, {counted(sum(map(len, schedule)), 'op')}"
    )
