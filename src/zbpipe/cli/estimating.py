"""`estimate` and `measure`: the gain of a job before it is launched."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zbpipe.cli.base import COUNT, Command, OutputFile, in_one_line, json_option, print_json
from zbpipe.costs.file import dump_costs, load_costs, require_ending
from zbpipe.costs.job import MemoryLimit
from zbpipe.schedule.garbage import importing

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    help="Estimate only this schedule, 1F1B and plans. Can be repeated.",
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
    ranks: bool,
    search: bool,
    float8: bool,
    async_tp: bool,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Estimate the gain of a job before it is launched, without a GPU.

    Prints each schedule and placement with its step time, bubble, tokens per second, MFU, and the memory of the worst
    rank, next to plans, 1F1B, and no pipeline at all on the same GPUs. Further options are TorchTitan's: --module and
    --config, or --job.config_file for TorchTitan 0.2. With --ranks, a job's --zbpipe.memory-limit counts.

    \b
    Examples:
      zbpipe estimate --module titan_integration.llama3 --config llama3_70b --gpus 64 --device MI300X
      zbpipe estimate --module llama3 --config llama3_8b --gpus 64 --device H100 --search
      zbpipe estimate --layers model.toml --gpus 64 --device H100
      zbpipe estimate --ranks --gpus 64 --module titan_integration.llama3 --config llama3_70b
    """
    from zbpipe.cli.estimates import lines, list_searched, record
    from zbpipe.estimation.devices import find
    from zbpipe.estimation.estimate import estimate as estimated
    from zbpipe.estimation.layouts import search as searched
    from zbpipe.estimation.workload import ASYNC_TENSOR

    _require(
        ranks or device is not None or costs_file is not None, "name a --device, or give measured costs: --costs-file"
    )
    _require(not (search and only), "--search compares degrees by its own schedules: omit --schedule")
    _require(not (search and (costs_file or device is None)), "--search needs a --device, and no --costs-file")
    if device is not None:
        find(device)  # before the import of TorchTitan, which takes seconds
    workload = _workload(layers, gpus, arguments)
    hidden = ASYNC_TENSOR if async_tp else workload.hidden_tensor
    workload = replace(workload, float8=float8 or workload.float8, hidden_tensor=hidden)
    if ranks:
        _show_ranks(workload, arguments, as_json)
        return
    costs, names = load_costs(costs_file) if costs_file else None, ("1F1B", *only) if only else None
    if search and device is not None:
        found = searched(workload, device, tflops=tflops, link=link)
    else:
        found = [estimated(workload, device, tflops=tflops, link=link, costs=costs, only=names)]
    if as_json:
        print_json([record(each) for each in found] if search else record(found[0]))
    else:
        click.echo("\n".join(list_searched(found, found[0]) if search else lines(found[0])))
    for name, reason in found[0].left_out:
        click.echo(f"skipped {name}: {reason}", err=True)


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


def _show_ranks(workload: Workload, arguments: Sequence[str], as_json: bool) -> None:
    from zbpipe.cli.estimates import rank_lines, rank_record
    from zbpipe.estimation.estimate import memory_by_rank
    from zbpipe.frameworks.titan.command_line import parse

    found = memory_by_rank(workload, MemoryLimit.parse(parse(arguments)[0].memory_limit))
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
