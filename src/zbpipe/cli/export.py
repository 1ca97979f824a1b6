"""Commands that write and check schedule files: `export`, `validate`."""

from __future__ import annotations

from pathlib import Path

import click

from zbpipe.cli.base import Command, OutputFile, one_line, size_options, stages_option
from zbpipe.cli.request import Costs, Request, limit_option, request_options
from zbpipe.costs.job import RELATIVE, MemoryLimit
from zbpipe.costs.model import CostModel
from zbpipe.schedule.user_code import read_text
from zbpipe.simulator.message_checks import check_table
from zbpipe.simulator.validation import validate as findings_of

_IN_SHARES = f"{RELATIVE}, or a number in units of a rank's share of one microbatch"


@click.command(cls=Command)
@request_options()
@click.option("-o", "--output", type=OutputFile(ending=".csv"), required=True, help="The .csv file to write.")
def export(request: Request, output: Path) -> None:
    """Write a schedule as torch's compute-only CSV.

    One row per rank, one cell per op. torch and TorchTitan load it unchanged, for example with
    --parallelism.pipeline_parallel_schedule_csv. Costs matter only to schedules that adapt to them.

    \b
    Example:
      zbpipe export ZBV -p 4 -m 8 -o zbv.csv
    """
    from zbpipe.schedule.ir import count_noun

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
    compute-only table, or its table with communication, whose sends and receives have to match as well. The other
    commands and jobs read only its computations. Prints one finding per line. The exit code is 1 if there is any. A
    memory limit counts activations as without checkpointing: 1 is a rank's share of one microbatch. The effect of
    checkpointing is in `compare` and `simulate`.

    \b
    Examples:
      zbpipe validate mine.csv --memory-limit 4
      zbpipe validate ZBV -p 4 -m 8
    """
    from zbpipe.schedule.ir import count_noun

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
