"""`plan`: the search for the best schedule, and its result beside the schedules with a name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
from click.core import ParameterSource

from zbpipe.cli.base import COUNT, Command, OutputFile, Times, cost_options, memory_limit_option, transport_option
from zbpipe.cli.named import all_simulated, uniform

if TYPE_CHECKING:
    from zbpipe.cli.named import CostsOf
    from zbpipe.costs import CostModel
    from zbpipe.costs_file import JobCosts
    from zbpipe.ir import Placement
    from zbpipe.layer_costs import LayerCosts
    from zbpipe.planner.partition import LayerPlan
    from zbpipe.planner.plan import Limit, Plan
    from zbpipe.timeline import Timeline
    from zbpipe.transport import Transport
    from zbpipe.views.report import ComparedSchedule

_STANDARD_OUTPUT = Path("-")


def _placements(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> list[str | Placement]:
    """Names, or the rank of each stage."""
    from zbpipe.ir import Placement
    from zbpipe.planner.plan import PLACEMENTS

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
@click.option("-p", "--ranks", type=COUNT, metavar="P", help="Pipeline ranks. A cost file with rank_of says it itself.")
@click.option("-m", "--microbatches", type=COUNT, metavar="M", required=True, help="Microbatches per step.")
@cost_options
@transport_option
@click.option(
    "--costs-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Times, bytes and links of stages or layers, in place of --costs and --comm (docs/costs-file.md).",
)
@memory_limit_option
@click.option(
    "--placement",
    "placements",
    multiple=True,
    callback=_placements,
    metavar="NAME",
    help="Where stages may be: single, loop, v, wave, or the rank of each stage, like 0-1-1-0. May be given several"
    " times; default: single, loop and v.",
)
@click.option(
    "--objective",
    type=click.Choice(["makespan", "longest_rank_span"]),
    default="makespan",
    show_default=True,
    help="What is to be short: the synchronous step, or the longest time of one rank, which counts when ranks run on"
    " into the next step.",
)
@click.option("--budget", type=float, metavar="N", help="Ops that the search may time; default: a second or so.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search's random numbers.")
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
    context: click.Context,
    ranks: int | None,
    microbatches: int,
    costs: Times,
    comm: float,
    transport: Transport,
    costs_file: Path | None,
    memory_limit: float | None,
    placements: list[str | Placement],
    objective: Literal["makespan", "longest_rank_span"],
    budget: float | None,
    seed: int,
    exact: bool,
    output: Path | None,
    json_file: Path | None,
) -> None:
    """Search for the best schedule for these times and this memory.

    Prints it beside the schedules with a name, and how much better any other schedule could be at most. With costs of
    layers it also tells which of them each stage should get.

    \b
    Examples:
      zbpipe plan -p 8 -m 32 --costs 1,1.2,0.8 --comm 0.05 --memory-limit 5.5 -o plan.csv
      zbpipe plan -p 4 -m 8 --costs 1,2,1 --placement v --placement wave --json plan.json
    """
    from zbpipe.planner.plan import DEFAULT_PLACEMENTS

    job = None if costs_file is None else _read(costs_file, context)
    if job is not None and job.placement is not None:
        if placements:
            raise click.UsageError(f"--placement and the rank_of in {costs_file} exclude each other", context)
        ranks, placements = ranks or job.placement.num_ranks, [job.placement]
    if ranks is None:
        raise click.UsageError("Missing option '-p' / '--ranks'", context)
    if job is not None:
        job.require_ranks(ranks)
    how: dict[str, Any] = {"objective": objective, "budget": budget, "seed": seed, "exact": exact}
    how["placements"] = placements or DEFAULT_PLACEMENTS
    is_given = context.get_parameter_source("transport") is not ParameterSource.DEFAULT
    how["transport"] = job.transport if job is not None and job.transport and not is_given else transport
    limit = job.memory_limit if job is not None and memory_limit is None else memory_limit
    of = uniform(costs, comm) if job is None else job.costs
    with _progress_bar() as progress:
        result = _search(ranks, microbatches, of, limit, **how, progress=progress)
    if output is not None:
        output.write_text(result.plan.schedule.to_csv(), encoding="utf-8")
    if json_file is None:
        click.echo("\n".join(_text(result)))
    else:
        with click.open_file(json_file, "w", encoding="utf-8") as file:
            file.write(json.dumps(_record(result), indent=2) + "\n")
    for written in (output, json_file):
        if written is not None and written != _STANDARD_OUTPUT:
            click.echo(f"wrote {written}", err=json_file == _STANDARD_OUTPUT)


def _read(file: Path, context: click.Context) -> JobCosts:
    from zbpipe.costs_file import load

    for name in ("costs", "comm"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name} and --costs-file {file} exclude each other: leave one out", context)
    return load(file)


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


class _Result(NamedTuple):
    plan: Plan
    named: list[ComparedSchedule]
    """The schedules with a name that have costs."""
    layers: LayerPlan | None
    """If there are layers to split."""


def _search(
    ranks: int, microbatches: int, costs: CostsOf | CostModel | LayerCosts, limit: Limit | None, **how: Any
) -> _Result:
    """The best schedule, beside those with a name: for the same stages, or those of the even split of the layers."""
    from zbpipe.costs import CostModel
    from zbpipe.layer_costs import LayerCosts
    from zbpipe.planner.plan import plan

    def among_named(costs_of: CostsOf, has_costs: Callable[[Placement], bool] = lambda _: True) -> Iterator[Timeline]:
        return all_simulated(ranks, microbatches, costs_of, has_costs, transport=how["transport"])

    if isinstance(costs, LayerCosts):
        from zbpipe.planner.partition import as_limit, plan_layers

        found = plan_layers(ranks, microbatches, costs, limit, **how)
        limit, num_layers = as_limit(costs, ranks, limit), len(costs.layers)
        named = among_named(costs.even, lambda placement: placement.num_stages <= num_layers)
        return _Result(found.plan, _standings(named, limit), found)
    if isinstance(costs, CostModel):
        of, num_stages = costs, costs.num_stages
        named = among_named(lambda _: of, lambda placement: placement.num_stages == num_stages)
    else:
        named = among_named(costs)
    return _Result(plan(ranks, microbatches, costs, limit, **how), _standings(named, limit), None)


def _standings(timelines: Iterable[Timeline], limit: Limit | None) -> list[ComparedSchedule]:
    """Whether they keep to the limit."""
    from zbpipe.planner.plan import limits_of
    from zbpipe.views.report import ComparedSchedule

    return [
        ComparedSchedule.of(timeline, limits_of(timeline.schedule.placement, timeline.costs, limit))
        for timeline in timelines
    ]


def _record(result: _Result) -> dict[str, Any]:
    """The keys of `simulate --json` and more; the lower bound holds for all placements tried, and knows the limit."""
    from zbpipe.views.report import record

    found, layers = result.plan, result.layers
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
        **({"module_fqns_per_model_part": layers.module_fqns_per_model_part} if layers else {}),
        "named": [standing.record() for standing in result.named],
    }


def _text(result: _Result) -> Iterator[str]:
    """What the search found, and the table."""
    from zbpipe.views.report import ComparedSchedule, beside
    from zbpipe.views.style import number, percent, summary

    found = result.plan
    yield summary(found.timeline)
    yield f"placement {found.placement}, found by {found.found_by}"
    what = "makespan" if found.objective == "makespan" else "longest time of a rank"
    yield (
        f"no schedule on {', '.join(found.bounds)} has a {what} below {number(found.lower_bound)}:"
        f" this one is at most {percent(found.gap)} above the best"
    )
    yield ""
    yield from beside(ComparedSchedule.of(found.timeline, found.limits), result.named)
    if result.layers is not None:
        yield "schedules with a name: with TorchTitan's even split of the layers"
        yield ""
        yield from _split(result.layers)


def _split(layers: LayerPlan) -> Iterator[str]:
    """How the layers are cut, and what that is worth."""
    from zbpipe.views.report import longer
    from zbpipe.views.style import number

    if layers.even is not None:
        reached, even = (getattr(plan, plan.objective) for plan in (layers.plan, layers.even))
        yield f"a plan for TorchTitan's even split takes {number(even)}, {longer(even, reached)} to this one"
    yield "layers by stage, as TorchTitan's parallelism.module_fqns_per_model_part:"
    yield "["
    for modules in layers.module_fqns_per_model_part:
        yield f"    {json.dumps(modules)},"
    yield "]"
