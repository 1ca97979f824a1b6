"""`plan`: the search for the best schedule, and its result beside the named schedules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zbpipe.cli.base import COUNT, Command, OutputFile, cost_options, memory_limit_option, transport_option
from zbpipe.cli.named import all_simulated, uniform

if TYPE_CHECKING:
    from zbpipe.ir import Placement
    from zbpipe.job_costs import JobCosts
    from zbpipe.planner.result import Plan
    from zbpipe.views.report import Standing

_STANDARD_OUTPUT = Path("-")


def _placements(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> list[str | Placement]:
    """Parse `--placement`: names, or the rank of each stage."""
    from zbpipe.ir import Placement
    from zbpipe.planner.request import PLACEMENTS

    found: list[str | Placement] = []
    for text in texts:
        ranks = text.split("-")
        if text in PLACEMENTS:
            found.append(text)
        elif all(map(str.isdecimal, ranks)):
            try:
                found.append(Placement(tuple(map(int, ranks))))
            except ValueError as error:
                raise click.BadParameter(f"{text!r}: {error}") from None
        else:
            names = ", ".join(PLACEMENTS)
            raise click.BadParameter(f"{text!r} is none of {names}, nor the rank of each stage, for example 0-1-1-0")
    return found


@click.command(cls=Command)
@click.option("-p", "--ranks", type=COUNT, metavar="P", help="Pipeline ranks. A cost file with rank_of has its own.")
@click.option("-m", "--microbatches", type=COUNT, metavar="M", required=True, help="Microbatches per step.")
@cost_options
@transport_option
@click.option(
    "--costs-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    is_eager=True,  # --memory-limit asks whether it is there
    help="Times, bytes and links of stages or layers, in place of --costs and --comm (docs/costs-file.md).",
)
@memory_limit_option
@click.option(
    "--placement",
    "placements",
    multiple=True,
    callback=_placements,
    metavar="NAME",
    help="A placement to try: single, loop, v, wave, or the rank of each stage, like 0-1-1-0. Can be given several"
    " times; default: single, loop and v.",
)
@click.option(
    "--objective",
    type=click.Choice(["makespan", "longest_rank_span"]),
    default="makespan",
    show_default=True,
    help="The time to minimise: of a synchronous step, or the longest of one rank, which counts when each rank starts"
    " its next step as soon as it is done.",
)
@click.option(
    "--budget", type=float, metavar="N", help="How many ops the search may time; default: what takes a second or so."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@click.option("--exact", is_flag=True, help="Look for the provably best schedule, in small cases (needs OR-Tools).")
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE.csv",
    help="Write the plan as the schedule that torch, TorchTitan and zbpipe.titan.train load.",
)
@click.option(
    "--json",
    "json_file",
    type=OutputFile(allow_dash=True),
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Print JSON, or write it to a file.",
)
@click.pass_context
def plan(
    context: click.Context, /, *, costs_file: Path | None, output: Path | None, json_file: Path | None, **asked: Any
) -> None:
    """Search for the best schedule for these times and this memory.

    Prints it beside the named schedules, and how far it is at most from the best possible. With costs of layers it also
    says which layers each stage should get.

    \b
    Examples:
      zbpipe plan -p 8 -m 32 --costs 1,1.2,0.8 --comm 0.05 --memory-limit 5.5 -o plan.csv
      zbpipe plan -p 4 -m 8 --costs 1,2,1 --placement v --placement wave --json plan.json
    """
    job = None if costs_file is None else _read(costs_file, context)
    found, named = _search(context, job, **asked)
    if output is not None:
        output.write_text(found.schedule.to_csv(), encoding="utf-8")
    if json_file is None:
        click.echo("\n".join(_text(found, named)))
    else:
        with click.open_file(json_file, "w", encoding="utf-8") as file:
            file.write(json.dumps(_record(found, named), indent=2) + "\n")
    for written in (output, json_file):
        if written is not None and written != _STANDARD_OUTPUT:
            click.echo(f"wrote {written}", err=json_file == _STANDARD_OUTPUT)


def _read(file: Path, context: click.Context) -> JobCosts:
    """The cost file, unless other options contradict it."""
    from zbpipe.costs_file import load_costs

    for name in ("costs", "comm"):
        if _is_given(context, name):
            raise click.UsageError(f"--{name} and --costs-file {file} exclude each other: leave one out", context)
    job = load_costs(file)
    if job.placement is not None and _is_given(context, "placements"):
        raise click.UsageError(f"--placement and the rank_of in {file} exclude each other: leave one out", context)
    return job


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _search(context: click.Context, job: JobCosts | None, **asked: Any) -> tuple[Plan, list[Standing]]:
    """The best schedule, and the named ones: for the same stages, or those of the even split of the layers."""
    from zbpipe.planner.plan import plan
    from zbpipe.views.report import Standing

    by_rank = uniform(asked.pop("costs"), asked.pop("comm"))
    costs_of = by_rank if job is None else job.stages
    if job is not None and job.placement is not None:
        asked["ranks"] = asked["ranks"] or job.placement.num_ranks
    if asked["ranks"] is None:
        raise click.UsageError("Missing option '-p' / '--ranks'", context)
    asked["placements"] = asked["placements"] or None
    if not _is_given(context, "transport"):
        asked["transport"] = None
    with _progress_bar() as progress:
        found = plan(costs=job or costs_of, **asked, progress=progress)

    def has_costs(placement: Placement) -> bool:
        try:
            costs_of(placement)
        except ValueError:
            return False
        return True

    transport = found.timeline.transport
    named = all_simulated(asked["ranks"], asked["microbatches"], costs_of, has_costs, transport=transport)
    return found, [Standing.of(timeline, found.limits) for timeline in named]


@contextmanager
def _progress_bar() -> Iterator[Callable[[float, float], None] | None]:
    """For as long as the search runs, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("searching"), BarColumn(), TaskProgressColumn(), TextColumn("best {task.fields[best]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, best="")
        yield lambda share, best: bar.update(task, completed=share, best=f"{best:.6g}")


def _record(found: Plan, named: list[Standing]) -> dict[str, Any]:
    """The keys of `simulate --json` and more; the lower bound holds for all placements tried, and knows the limit."""
    from zbpipe.views.report import record

    parts = found.module_fqns_per_model_part
    return {
        **record(found.timeline),
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "placement": found.placement,
        "rank_of": list(found.schedule.placement.rank_of),
        "limit": None if found.limits is None else list(found.limits),
        "objective": found.objective,
        "found_by": found.found_by,
        "bounds": dict(found.bounds),
        **({} if parts is None else {"module_fqns_per_model_part": parts}),
        "named": [standing.record() for standing in named],
    }


def _text(found: Plan, named: list[Standing]) -> Iterator[str]:
    """What the search found, and the table."""
    from zbpipe.views.report import Standing, beside
    from zbpipe.views.style import number, percent, summary

    yield summary(found.timeline)
    yield f"placement {found.placement}, found by {found.found_by}"
    what = "makespan" if found.objective == "makespan" else "longest time of a rank"
    yield (
        f"no schedule on {', '.join(found.bounds)} has a {what} below {number(found.lower_bound)}:"
        f" this one is at most {percent(found.gap)} above the best"
    )
    yield ""
    yield from beside(Standing.of(found.timeline, found.limits), named)
    if found.layers is not None:
        yield "named schedules: with TorchTitan's even split of the layers"
        yield ""
        yield from _split(found)


def _split(found: Plan) -> Iterator[str]:
    """How the layers are cut, and what that gains."""
    from zbpipe.views.report import longer
    from zbpipe.views.style import number

    if found.even is not None:
        even = found.even.reached
        yield f"a plan for TorchTitan's even split takes {number(even)}, {longer(even, found.reached)} to this one"
    yield "layers by stage, as TorchTitan's parallelism.module_fqns_per_model_part:"
    yield "["
    for modules in found.module_fqns_per_model_part or ():
        yield f"    {json.dumps(modules)},"
    yield "]"
