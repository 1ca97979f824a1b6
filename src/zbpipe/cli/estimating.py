"""`estimate` and `measure`: a job's gain before its launch."""

from __future__ import annotations

import atexit
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli import base
from zbpipe.cli.base import EXISTING, JobCommand, OutputFile, in_one_line, print_json
from zbpipe.cli.jobs import JobOptions, job_options, require_job, titan_arguments
from zbpipe.cli.request import sizes_option
from zbpipe.costs.file import dump_costs, load_costs, require_ending
from zbpipe.schedule.garbage import without_collections

if TYPE_CHECKING:
    from zbpipe.costs.model import Transport
    from zbpipe.estimation.rows import Estimate


@click.command(cls=JobCommand)
@job_options
@click.option("--costs-file", type=EXISTING, metavar="FILE", help="Measured times and bytes (`zbpipe measure`).")
@click.option(
    "--schedule",
    "only",
    multiple=True,
    metavar="NAME",
    help="Add a row for this schedule; `plan` is a plan on ZB's stages. Can be repeated.",
)
@base.transport_option
@click.option("--all", "everything", is_flag=True, help="Print all schedules and plans, and the sources of figures.")
@click.option(
    "-o",
    "--output",
    type=OutputFile(ending=".csv"),
    metavar="FILE.csv",
    help="Write the recommended schedule (in a search, of the best pipeline), or the last of --schedule, for a job.",
)
@click.option("--ranks", is_flag=True, help="Print only the memory of each rank with the job's schedule; no --device.")
@click.option("--search", is_flag=True, help="Compare all layouts: degrees of PP, TP, CP, EP, FSDP, and checkpointing.")
@click.option("--float8", is_flag=True, help="Estimate the blocks' products in float8.")
@click.option("--async-tp", is_flag=True, help="Estimate asynchronous tensor parallelism.")
@sizes_option
@base.json_option
@without_collections()
def estimate(
    job: JobOptions,
    costs_file: Path | None,
    only: tuple[str, ...],
    transport: Transport | None,
    everything: bool,
    output: Path | None,
    ranks: bool,
    search: bool,
    float8: bool,
    async_tp: bool,
    sizes: tuple[Any, ...] | None,
    as_json: bool,
) -> None:
    """Estimate before launch, without a GPU, which schedule a job should run.

    Prints one sentence: keep the schedule, change it, or drop the pipeline. A table follows with your schedule, the
    best that fits, ZB, 1F1B, Interleaved1F1B, and FSDP without a pipeline. Further options are TorchTitan's: --module
    and --config, or --job.config_file for TorchTitan 0.2. A job's --zbpipe.memory-limit counts.

    \b
    Examples:
      zbpipe estimate --module titan_integration.llama3 --config llama3_70b --gpus 64 --device MI300X
      zbpipe estimate --module llama3 --config llama3_8b --gpus 64 --device H100 --search
      zbpipe estimate --layers model.toml --gpus 64 --device H100 --schedule plan -o plan.csv
      zbpipe estimate --ranks --gpus 64 --module titan_integration.llama3 --config llama3_70b
    """
    from zbpipe.cli.estimates import best_pipeline, lines, list_searched, rank_lines, rank_record, record
    from zbpipe.estimation.estimate import estimate as estimated
    from zbpipe.estimation.estimate import memory_by_rank
    from zbpipe.estimation.layouts import search as searched
    from zbpipe.estimation.rows import PLAN

    atexit.register(gc.freeze)  # else Python searches all objects for garbage at exit, for half a second
    if not (ranks or job.device or costs_file):
        raise click.UsageError("name a --device, or give measured costs: --costs-file", click.get_current_context())
    if search and (only or costs_file or sizes or job.device is None):
        words = "--search needs a --device and has its own schedules: omit --schedule, --costs-file and --sizes"
        raise click.UsageError(words, click.get_current_context())
    workload = job.workload().having(float8, async_tp)
    if ranks:
        memory, limit = memory_by_rank(workload), workload.options.memory_limit.rstrip(' ="{}')
        if as_json:
            print_json(rank_record(memory))
        else:
            click.echo("\n".join((*workload.warnings, *rank_lines(memory, limit))))
        return
    how = job.rates | {"transport": transport}
    if search and job.device is not None:
        found = searched(workload, job.device, **how)
    else:
        costs = load_costs(costs_file) if costs_file else None
        names = None if everything else [each for each in only if each.lower() != PLAN]
        found = [estimated(workload, job.device, costs=costs, only=names, sizes=sizes or (), **how)]
    if output is not None:
        _write(best_pipeline(found) if search else found[0], only[-1] if only else None, output)
    if as_json:
        print_json([record(each) for each in found] if search else record(found[0]))
    else:
        shown = lines(found[0], everything=everything, named=only)
        click.echo("\n".join(list_searched(found, found[0]) if search else shown))
    for name, reason in found[0].left_out if everything or search or only else ():
        click.echo(f"skipped {name}: {reason}", err=True)


def _write(found: Estimate, name: str | None, output: Path) -> None:
    named = (step for step in found.steps if name and step.schedule.lower() == name.lower())
    advised = found.advice.step if found.advice and found.advice.step.timeline else found.best
    step = next(named, None) if name else found.on_these_degrees if found.job else advised
    if step is None or step.timeline is None:
        raise ValueError(f"--output {output} has nothing to write: the table has no {name or 'schedule that fits'}")
    output.write_text(step.timeline.schedule.to_csv(), encoding="utf-8")
    click.echo(f"wrote {step.name} to {output}", err=True)


@click.command(cls=JobCommand)
@click.option("--steps", type=base.COUNT, default=3, show_default=True, metavar="N", help="Timed steps for each stage.")
@click.option("-o", "--output", type=OutputFile(), required=True, metavar="FILE", help="The cost file: .toml or .json.")
@titan_arguments
def measure(steps: int, output: Path, arguments: tuple[str, ...]) -> None:
    """Measure the stages of a TorchTitan job, one after the other, on one device of this machine.

    Measures times and memory of F, I, W and B without any other rank, also on the CPU. Writes the cost file that
    `estimate` and `plan` take with --costs-file. Further options are TorchTitan's: --module and --config.

    \b
    Example:
      zbpipe measure --module titan_integration.llama3 --config llama3_debug -o costs.toml
    """
    from zbpipe.views.report import costs as costs_table

    require_job(arguments)
    require_ending(output)
    with in_one_line(ImportError):
        from zbpipe.frameworks.titan.command_line import parse, read_config

        config, options = read_config(arguments), parse(arguments)[0]
        from zbpipe.frameworks.titan.measure_stages import measure_stages

        costs = measure_stages(config, steps, options.memory_limit)
    dump_costs(costs, output)
    click.echo(costs_table(costs))
    click.echo(f"wrote {output}")
