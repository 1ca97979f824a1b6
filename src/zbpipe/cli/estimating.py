"""`estimate` and `measure`: the gain of a job before it is launched."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli.base import COUNT, Command, OutputFile, in_one_line, json_option, print_json, transport_option
from zbpipe.costs.file import dump_costs, load_costs, require_ending
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.schedule.garbage import importing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zbpipe.costs.transport import Transport
    from zbpipe.estimation.rows import Estimate
    from zbpipe.estimation.workload import Workload

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
_TITANS = {"ignore_unknown_options": True, "allow_interspersed_args": True}
_titan_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHTITAN'S OPTIONS]")


def _link(context: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a bandwidth in GB/s; write for example 50, or 450,50") from None


@click.command(cls=Command, context_settings=_TITANS)
@click.option("--layers", type=_EXISTING, metavar="FILE", help="A model outside TorchTitan (docs/costs-file.md).")
@click.option("--gpus", type=COUNT, required=True, metavar="N", help="Number of GPUs of the whole job.")
@click.option(
    "--device", metavar="NAME", help="A100, H100, H200, B200, GB200, L40S, MI250X (one die), MI300X, MI325X or MI355X."
)
@click.option("--tflops", type=float, metavar="X", help="TFLOP/s that a GPU sustains, in place of the table's.")
@click.option(
    "--link",
    callback=_link,
    metavar="GB/S",
    help="Bandwidth of a GPU to other nodes, in one direction; or two numbers: within a node, between nodes.",
)
@click.option("--costs-file", type=_EXISTING, metavar="FILE", help="Measured times and bytes (`zbpipe measure`).")
@click.option(
    "--schedule",
    "only",
    multiple=True,
    metavar="NAME",
    help="Add a row for this schedule; `plan` stands for a plan on ZB's stages. Can be repeated.",
)
@transport_option
@click.option("--all", "everything", is_flag=True, help="Print all schedules and plans, and the sources of figures.")
@click.option(
    "-o",
    "--output",
    type=OutputFile(ending=".csv"),
    metavar="FILE.csv",
    help="Write the recommended schedule, or the last one that --schedule names, as a file that a job loads.",
)
@click.option("--ranks", is_flag=True, help="Only the memory of each rank, with the job's own schedule; no --device.")
@click.option(
    "--search", is_flag=True, help="Compare all layouts: pipeline, tensor and context parallelism, FSDP, checkpointing."
)
@click.option("--float8", is_flag=True, help="Estimate products of blocks in float8.")
@click.option("--async-tp", is_flag=True, help="Estimate asynchronous tensor parallelism.")
@json_option
@_titan_arguments
def estimate(
    layers: Path | None,
    gpus: int,
    device: str | None,
    tflops: float | None,
    link: tuple[float, ...] | None,
    costs_file: Path | None,
    only: tuple[str, ...],
    transport: Transport | None,
    everything: bool,
    output: Path | None,
    ranks: bool,
    search: bool,
    float8: bool,
    async_tp: bool,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Estimate what schedule a job should run before it is launched, without a GPU.

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
    from zbpipe.cli.estimates import lines, list_searched, record
    from zbpipe.estimation.devices import find
    from zbpipe.estimation.estimate import estimate as estimated
    from zbpipe.estimation.layouts import search as searched
    from zbpipe.estimation.rows import PLAN
    from zbpipe.estimation.workload import ASYNC_TENSOR

    _require(
        ranks or device is not None or costs_file is not None, "name a --device, or give measured costs: --costs-file"
    )
    _require(not (search and (only or output)), "--search has its own schedules: omit --schedule and --output")
    _require(not (search and (costs_file or device is None)), "--search needs a --device, and no --costs-file")
    if device is not None:
        find(device)  # before the import of TorchTitan, which takes seconds
    workload = _workload(layers, gpus, arguments)
    hidden = ASYNC_TENSOR if async_tp else workload.hidden_tensor
    workload = replace(workload, float8=float8 or workload.float8, hidden_tensor=hidden)
    if ranks:
        _show_ranks(workload, as_json)
        return
    how: dict[str, Any] = {"tflops": tflops, "link": link, "transport": transport}
    if search and device is not None:
        found = searched(workload, device, **how)
    else:
        costs, names = load_costs(costs_file) if costs_file else None, [each for each in only if each.lower() != PLAN]
        found = [estimated(workload, device, costs=costs, only=None if everything else names, **how)]
    if output is not None:
        _write(found[0], only[-1] if only else None, output)
    if as_json:
        print_json([record(each) for each in found] if search else record(found[0]))
    else:
        shown = lines(found[0], everything=everything, named=only)
        click.echo("\n".join(list_searched(found, found[0]) if search else shown))
    for name, reason in found[0].left_out if everything or search or only else ():
        click.echo(f"skipped {name}: {reason}", err=True)


def _write(found: Estimate, name: str | None, output: Path) -> None:
    """Write the row of this schedule, or the best one that fits."""
    named = (step for step in found.steps if name and step.schedule.lower() == name.lower())
    step = found.best if name is None else next(named, None)
    if step is None or step.timeline is None:
        raise ValueError(f"--output {output} has nothing to write: {name or 'no schedule that fits'} has no row above")
    output.write_text(step.timeline.schedule.to_csv(), encoding="utf-8")
    click.echo(f"wrote {step.name} to {output}", err=True)


def _workload(layers: Path | None, gpus: int, arguments: Sequence[str]) -> Workload:
    if layers is not None:
        from zbpipe.estimation.layers_file import load_layers

        _require(not arguments, f"unknown options: {' '.join(arguments)}; --layers takes no options of TorchTitan")
        return load_layers(layers, gpus)
    from zbpipe.frameworks.titan.command_line import read_workload

    _require_job(arguments)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # TorchTitan's warnings concern running jobs
    try:
        with in_one_line(ImportError), importing():
            return read_workload(arguments, gpus)
    finally:
        logging.disable(disabled)


def _require_job(arguments: Sequence[str]) -> None:
    ways = "--module and --config, --job.config_file for TorchTitan 0.2, or a file of --layers"
    _require(bool(arguments), f"name the job: {ways}")


def _show_ranks(workload: Workload, as_json: bool) -> None:
    from zbpipe.cli.estimates import rank_lines, rank_record
    from zbpipe.estimation.estimate import memory_by_rank

    found = memory_by_rank(workload)
    if as_json:
        print_json(rank_record(found))
    else:
        click.echo("\n".join((*workload.warnings, *rank_lines(found))))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise click.UsageError(otherwise, click.get_current_context())


@click.command(cls=Command, context_settings=_TITANS)
@click.option("--steps", type=COUNT, default=3, show_default=True, metavar="N", help="Timed steps for each stage.")
@click.option("-o", "--output", type=OutputFile(), required=True, metavar="FILE", help="The cost file: .toml or .json.")
@_titan_arguments
def measure(steps: int, output: Path, arguments: tuple[str, ...]) -> None:
    """Measure the stages of a TorchTitan job, one after the other on this machine's one device.

    Measures times and memory of F, I, W and B without any other rank. Writes the cost file that `estimate` and `plan`
    take with --costs-file. Further options are TorchTitan's: --module and --config. It also works on the CPU.

    \b
    Example:
      zbpipe measure --module titan_integration.llama3 --config llama3_debug -o costs.toml
    """
    from zbpipe.views.report import costs as costs_table

    _require_job(arguments)
    require_ending(output)
    with in_one_line(ImportError):
        from zbpipe.frameworks.titan.command_line import parse, read_config

        config, options = read_config(arguments), parse(arguments)[0]
        from zbpipe.frameworks.titan.measure_stages import measure_stages

        costs = measure_stages(config, steps, MemoryLimit.parse(options.memory_limit))
    dump_costs(costs, output)
    click.echo(costs_table(costs))
    click.echo(f"wrote {output}")
