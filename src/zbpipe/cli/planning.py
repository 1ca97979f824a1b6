"""`plan`: the search for the best schedule, and its result next to the named schedules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli import base
from zbpipe.cli.base import JobCommand, OutputFile, print_json, progress_line
from zbpipe.cli.request import Costs, compare_all, cost_options, memory_limit_option

if TYPE_CHECKING:
    from zbpipe.planner.result import Plan
    from zbpipe.views.report import ComparedSchedule


@click.command(cls=JobCommand)
@base.size_options
@cost_options(of_job=True)
@base.transport_option
@memory_limit_option
@click.option(
    "--placement",
    "placements",
    multiple=True,
    metavar="NAME",
    help="A placement to try: single, loop, v, wave, or the rank of each stage, like 0-1-1-0. Can be repeated."
    " Default: ZB's in a job, else single, loop, v and wave, which has four stages per rank.",
)
@click.option(
    "--objective",
    type=click.Choice(["makespan", "period"]),
    default="makespan",
    show_default=True,
    help="The time to minimise: a synchronous step (makespan), or the period if zbpipe.OptimizerStep lets ranks run"
    " ahead of the validation.",
)
@click.option(
    "--budget", type=float, metavar="N", help="Number of ops that the search may time. Default: about one second."
)
@click.option(
    "--offload",
    type=click.Choice(["pairs", "activations", "all"]),
    help="Memory to offload to the host: deferred gradients (pairs), activations, or both. It needs"
    " --host-bandwidth, or [host] in the cost file.",
)
@click.option(
    "-o",
    "--output",
    type=OutputFile(ending=".csv"),
    metavar="FILE.csv",
    help="Write the plan as a schedule that torch, TorchTitan and zbpipe.titan.train load.",
)
@base.json_option
@click.pass_context
def plan(context: click.Context, /, *, costs: Costs, output: Path | None, as_json: bool, **asked: Any) -> None:
    """Search for the best schedule for these times and this memory.

    Prints the plan next to the named schedules, with its largest possible distance from the best schedule. With costs
    of layers it also shows the layers for each stage.

    \b
    Examples:
      zbpipe plan -p 8 -m 32 --memory-limit 1.0x -o plan.csv
      zbpipe plan -p 4 -m 8 --costs 1,2,1 --placement v --placement wave --json
      zbpipe plan --module titan_integration.llama3 --config llama3_70b --gpus 64 --device H200 --memory-limit 1.2x
    """
    from zbpipe.planner.plan import plan as search
    from zbpipe.views.report import comparison

    asked = _complete(context, costs, asked)
    with progress_line() as show:
        show("searching")
        found = search(
            costs=costs.job or costs.of,
            **asked | {"memory_limit": costs.limit(asked["memory_limit"])},
            progress=lambda share, best: show(f"searching: {share:.0%}, best {best:.6g}"),
        )
    if output is not None:
        output.write_text(found.schedule.to_csv(), encoding="utf-8")
    if not as_json:
        click.echo("\n".join(_sum_up(found)))
    limit, size = asked["memory_limit"], (asked["ranks"], asked["microbatches"])
    planned, *others = compare_all(*size, costs, limit, asked["transport"], besides=[found.timeline])
    if as_json:
        print_json(_record(found, planned, others))
    else:
        lines = ["", *comparison([planned, *others], planned), costs.words]
        if found.layers is not None:
            lines += ["named schedules have TorchTitan's even split of the layers", "", *_split(found)]
        click.echo("\n".join(lines))
    if output is not None:
        click.echo(f"wrote {output}", err=as_json)


def _complete(context: click.Context, costs: Costs, asked: dict[str, Any]) -> dict[str, Any]:
    job = costs.job
    if job is not None and job.placement is not None and asked["placements"]:
        raise click.UsageError(f"--placement and the rank_of in {costs.file} exclude each other: omit one", context)
    ranks, microbatches = costs.require_size(asked["ranks"], asked["microbatches"])
    return asked | {
        "ranks": ranks,
        "microbatches": microbatches,
        "transport": costs.transport(asked["transport"]),
        "placements": asked["placements"] or (costs.placement and [costs.placement]),
    }


def _record(found: Plan, planned: ComparedSchedule, others: Sequence[ComparedSchedule]) -> dict[str, Any]:
    parts = found.module_fqns_per_model_part
    return {
        **planned.figures,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "placement": found.placement,
        "rank_of": list(found.schedule.placement.rank_of),
        "limit": None if found.limits is None else list(found.limits),
        "objective": found.objective,
        "found_by": found.found_by,
        "bounds": dict(found.bounds),
        **({} if parts is None else {"module_fqns_per_model_part": parts}),
        "named": [each.record() for each in others],
    }


def _sum_up(found: Plan) -> Iterator[str]:
    from zbpipe.views.report import tell_fsdp
    from zbpipe.views.style import number, percent, summary

    yield summary(found.timeline)
    yield f"placement {found.placement}, found by {found.found_by}"
    yield (
        f"no schedule on {', '.join(found.bounds)} has a {found.objective} below {number(found.lower_bound)}:"
        f" this one is at most {percent(found.gap)} above the best"
    )
    yield from tell_fsdp(found.timeline)


def _split(found: Plan) -> Iterator[str]:
    from zbpipe.views.report import longer
    from zbpipe.views.style import number

    if found.even is not None:
        even = found.even.reached
        yield f"a plan for TorchTitan's even split takes {number(even)} ({longer(even, found.reached)})"
    yield "layers by stage, as TorchTitan's parallelism.module_fqns_per_model_part:"
    yield "["
    for modules in found.module_fqns_per_model_part or ():
        yield f"    {json.dumps(modules)},"
    yield "]"
