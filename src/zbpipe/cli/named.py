"""Schedules by name, as the commands take them: made, validated and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli.base import one_line
from zbpipe.cli.costs import Costs

if TYPE_CHECKING:
    from zbpipe.costs import CostModel
    from zbpipe.ir import Schedule
    from zbpipe.memory_limit import MemoryLimit
    from zbpipe.timeline import Timeline


def made(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs: Costs,
    stages_per_rank: int | None = None,
    memory_limit: MemoryLimit | None = None,
) -> tuple[Schedule, CostModel]:
    """The schedule of that name or file, which may be unable to run, and its costs."""
    from zbpipe.registry import generate, lookup

    algorithm = lookup(name)
    if algorithm.table is not None:
        ranks = algorithm.table.placement.num_ranks if ranks is None else ranks
        microbatches = algorithm.table.num_microbatches if microbatches is None else microbatches
    ranks = costs.ranks(ranks)
    if ranks is None or microbatches is None:
        missing = "-p (pipeline ranks)" if ranks is None else "-m (microbatches)"
        raise ValueError(f"{algorithm.name} needs {missing}; for example: {algorithm.name} -p 4 -m 8")
    of_stages = costs.of(algorithm.place(ranks, stages_per_rank))
    if memory_limit is not None:
        algorithm.require_limits("--memory-limit")
    limits = memory_limit.resolve(costs.for_limits, ranks, microbatches) if memory_limit else None
    schedule = generate(
        name, ranks, microbatches, stages_per_rank=stages_per_rank, costs=of_stages, memory_limit=limits
    )
    # A registered function may give its schedule any name; people look for the one that they typed.
    return replace(schedule, name=algorithm.name), of_stages


def generated(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs: Costs,
    stages_per_rank: int | None = None,
    memory_limit: MemoryLimit | None = None,
) -> tuple[Schedule, CostModel]:
    """The schedule of that name or file, validated, and its costs."""
    from zbpipe.validation import validate

    schedule, of_stages = made(name, ranks, microbatches, costs, stages_per_rank, memory_limit)
    if findings := validate(schedule):
        more = f" (the first of {len(findings)} findings)" if len(findings) > 1 else ""
        raise ValueError(f"{schedule.name} cannot run: {findings[0]}{more}; `zbpipe validate` lists all findings")
    return schedule, of_stages


def simulated(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs: Costs,
    stages_per_rank: int | None = None,
    memory_limit: MemoryLimit | None = None,
    **how: Any,
) -> Timeline:
    """Its timeline; `how` is for `zbpipe.simulate`."""
    from zbpipe.simulation import simulate

    schedule, of_stages = generated(name, ranks, microbatches, costs, stages_per_rank, memory_limit)
    return simulate(schedule, of_stages, **how)


def all_simulated(
    ranks: int, microbatches: int, costs: Costs, memory_limit: MemoryLimit | None = None, **how: Any
) -> Iterator[Timeline]:
    """The timelines of all named schedules whose placement has costs; `how` is for `zbpipe.simulate`.

    Schedules that fit themselves to a memory limit keep to the given one. A schedule that cannot have these sizes, or
    fails in any other way, is left out with a line on stderr.
    """
    from zbpipe.registry import schedules

    for algorithm in schedules().values():
        try:
            if costs.job is None or costs.has(algorithm.place(ranks)):
                limit = memory_limit if "memory_limit" in algorithm.keywords else None
                yield simulated(algorithm.name, ranks, microbatches, costs, memory_limit=limit, **how)
        except ValueError as error:
            click.echo(f"left out {algorithm.name}: {one_line(str(error))}", err=True)
        except Exception as error:  # a broken function of an installed package is no reason to hide the others
            click.echo(f"left out {algorithm.name}: {type(error).__name__}: {one_line(str(error))}", err=True)
