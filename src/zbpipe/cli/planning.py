"""`plan`: the search for the best schedule, and its result next to the named schedules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli.base import Command, OutputFile, compared_size, transport_option
from zbpipe.cli.costs import Costs, cost_options, is_given, memory_limit_option
from zbpipe.cli.named import simulate_all
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Placement
from zbpipe.simulator.timeline import Timeline

if TYPE_CHECKING:
    from zbpipe.planner.result import Plan
    from zbpipe.views.report import ComparedSchedule

_STANDARD_OUTPUT = Path("-")
_SHORT = 2e7
"""Budget of the search for a wave, in timed ops: a fraction of a second."""
_WORTH_A_LINE = 0.995
"""Largest step time of a wave, relative to the plan's, at which the wave is mentioned."""


def _placements(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> list[str | Placement]:
    """Parse `--placement`: names, or the rank of each stage."""
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
            raise click.BadParameter(f"{text!r} is not one of {names}, nor the rank of each stage, for example 0-1-1-0")
    return found


@click.command(cls=Command)
@compared_size
@cost_options()
@transport_option
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
    type=click.Choice(["makespan", "period"]),
    default="makespan",
    show_default=True,
    help="The time to minimise: of a synchronous step, or from step to step where zbpipe.OptimizerStep lets ranks run"
    " ahead of the validation.",
)
@click.option(
    "--budget", type=float, metavar="N", help="Number of ops that the search may time; default: about one second."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@click.option(
    "--offload",
    type=click.Choice(["pairs", "activations", "all"]),
    help="Memory that may be offloaded to the host: deferred gradients (pairs), activations, or both. It needs"
    " --host-bandwidth, or [host] in the cost file.",
)
@click.option(
    "-o",
    "--output",
    type=OutputFile(ending=".csv"),
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
    /,
    *,
    costs: Costs,
    output: Path | None,
    json_file: Path | None,
    **asked: Any,
) -> None:
    """Search for the best schedule for these times and this memory.

    Prints it next to the named schedules, with its largest possible distance from the best schedule. With costs of
    layers it also shows which layers each stage should get.

    \b
    Examples:
      zbpipe plan -p 8 -m 32 --memory-limit 1.0x -o plan.csv
      zbpipe plan -p 4 -m 8 --costs 1,2,1 --placement v --placement wave --json plan.json
    """
    from zbpipe.views.style import number

    asked = _complete(context, costs, asked)
    named = _Neighbours(costs, asked)
    others = list(named.compare(searched=False))
    fitting = [each for each in others if each.runs and each.broken is None]
    if json_file is None and fitting:
        first = min(fitting, key=lambda each: each.sort_key).figures
        click.echo(f"best without a search: {first['schedule']}, makespan {number(first['makespan'])}\n")
    found = _search(costs, asked)
    if output is not None:
        output.write_text(found.schedule.to_csv(), encoding="utf-8")
    if json_file is None:
        click.echo("\n".join(_sum_up(found)))
    table = named.around(found, others)
    if json_file is None:
        click.echo("\n".join(_text(found, table)))
    else:
        with click.open_file(json_file, "w", encoding="utf-8") as file:
            file.write(json.dumps(_record(found, table), indent=2) + "\n")
    for written in (output, json_file):
        if written is not None and written != _STANDARD_OUTPUT:
            click.echo(f"wrote {written}", err=json_file == _STANDARD_OUTPUT)


@dataclass(frozen=True)
class _Named:
    """The plan as a table entry, and the named schedules."""

    plan: ComparedSchedule
    others: list[ComparedSchedule]
    words: str
    """Source of the costs."""
    wave: Plan | None
    """A better plan on the placement with four stages per rank, unless that placement was requested."""


def _complete(context: click.Context, costs: Costs, asked: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `zbpipe.plan` from the command line, checked before anything is printed."""
    from zbpipe.planner.request import DEFAULT_PLACEMENTS, Request, name_placements, require_job

    job = costs.job
    if job is not None and job.placement is not None and asked["placements"]:
        raise click.UsageError(f"--placement and the rank_of in {costs.file} exclude each other: omit one", context)
    ranks, microbatches = require_job(costs.require_ranks(asked["ranks"]), asked["microbatches"])
    placements = name_placements(ranks, asked["placements"] or DEFAULT_PLACEMENTS)
    Request(ranks, microbatches, placements, budget=asked["budget"])
    return asked | {
        "ranks": ranks,
        "placements": asked["placements"] or None,
        "transport": asked["transport"] if is_given(context, "transport") else None,
    }


def _search(costs: Costs, asked: Mapping[str, Any]) -> Plan:
    """Best schedule found."""
    from zbpipe.planner.plan import plan

    with _progress_bar() as progress:
        return plan(costs=costs.job or costs.of, **asked, progress=progress)


@dataclass(frozen=True)
class _Neighbours:
    """The named schedules that a plan is compared with."""

    costs: Costs
    asked: Mapping[str, Any]

    def compare(self, **which: bool) -> Iterator[ComparedSchedule]:
        """Named schedules for the same stages, or the even split of the layers. `which` goes to `simulate_all`."""
        ranks, microbatches, limit = (self.asked[name] for name in ("ranks", "microbatches", "memory_limit"))
        transport = self.asked["transport"] or (self.costs.job and self.costs.job.transport) or Transport.IDEAL
        for timeline in simulate_all(ranks, microbatches, self.costs, limit, transport=transport, **which):
            yield self.row(timeline)

    @cached_property
    def row(self) -> Callable[[Timeline], ComparedSchedule]:
        """Function that makes the row of a timeline. Limits and the memory of 1F1B are calculated once."""
        from zbpipe.views.report import ComparedSchedule

        ranks, microbatches, job = self.asked["ranks"], self.asked["microbatches"], self.costs.job
        limit = self.asked["memory_limit"] or (MemoryLimit.parse(job.memory_limit) if job else None)
        return partial(
            ComparedSchedule.of,
            limits=limit.resolve(self.costs.for_limits, ranks, microbatches) if limit else None,
            baseline=self.costs.baseline(ranks, microbatches),
            checkpointing=self.costs.checkpointing,
        )

    def around(self, found: Plan, others: Sequence[ComparedSchedule]) -> _Named:
        """The plan with all named schedules, of which `others` are known."""
        searches_wave = not (self.costs.job or self.asked["offload"])
        return _Named(
            self.row(found.timeline),
            [*others, *self.compare(searched=True)],
            self.costs.words,
            _better_wave(found, self.costs, **self.asked) if searches_wave else None,
        )


def _better_wave(found: Plan, costs: Costs, **asked: Any) -> Plan | None:
    """A short search with four stages per rank, possible for many models; None if it was requested, or is not
    better."""
    from zbpipe.planner.plan import plan

    if asked["placements"]:
        return None
    try:
        wave = plan(costs=costs.of, **asked | {"placements": "wave", "budget": asked["budget"] or _SHORT})
    except ValueError:  # too large for four stages per rank, or for the limit
        return None
    return wave if wave.reached < found.reached * _WORTH_A_LINE else None


@contextmanager
def _progress_bar() -> Iterator[Callable[[float, float], None] | None]:
    """Show the progress of the search, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("searching"), BarColumn(), TaskProgressColumn(), TextColumn("best {task.fields[best]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, best="")
        yield lambda share, best: bar.update(task, completed=share, best=f"{best:.6g}")


def _record(found: Plan, named: _Named) -> dict[str, Any]:
    """The keys of `simulate --json` and more. The lower bound covers all placements tried, and includes the limit."""
    parts = found.module_fqns_per_model_part
    return {
        **named.plan.figures,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "placement": found.placement,
        "rank_of": list(found.schedule.placement.rank_of),
        "limit": None if found.limits is None else list(found.limits),
        "objective": found.objective,
        "found_by": found.found_by,
        "bounds": dict(found.bounds),
        "wave": None if named.wave is None else named.wave.reached,
        **({} if parts is None else {"module_fqns_per_model_part": parts}),
        "named": [standing.record() for standing in named.others],
    }


def _sum_up(found: Plan) -> Iterator[str]:
    """Summary of the search's result."""
    from zbpipe.views.report import tell_fsdp
    from zbpipe.views.style import number, percent, summary

    yield summary(found.timeline)
    yield f"placement {found.placement}, found by {found.found_by}"
    yield (
        f"no schedule on {', '.join(found.bounds)} has a {found.objective} below {number(found.lower_bound)}:"
        f" this one is at most {percent(found.gap)} above the best"
    )
    yield from tell_fsdp(found.timeline)


def _text(found: Plan, named: _Named) -> Iterator[str]:
    """The table, with the result of the search for a wave."""
    from zbpipe.views.report import comparison
    from zbpipe.views.style import number

    if named.wave is not None:
        yield (
            f"with four stages per rank, a plan takes {number(named.wave.reached)}"
            f" ({named.wave.reached / found.reached - 1:+.1%}): --placement wave, if the model has enough layers"
        )
    yield ""
    yield from comparison([named.plan, *named.others], named.plan)
    yield named.words
    if found.layers is not None:
        yield "named schedules have TorchTitan's even split of the layers"
        yield ""
        yield from _split(found)


def _split(found: Plan) -> Iterator[str]:
    """The layer split, and its gain."""
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
