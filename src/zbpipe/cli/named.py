"""Schedules by name, as the commands take them: made, validated and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli.base import Times, one_line

if TYPE_CHECKING:
    from zbpipe.costs import CostModel
    from zbpipe.ir import Placement, Schedule
    from zbpipe.timeline import Timeline

    CostsOf = Callable[[Placement], CostModel]
    """The costs of a placement's stages; raises ValueError where there are none."""


def uniform(times: Times, comm: float) -> CostsOf:
    """The same times on every rank."""
    from zbpipe.costs import CostModel

    return partial(CostModel.uniform, f=times.f, i=times.i, w=times.w, comm=comm)


def made(
    name: str, ranks: int | None, microbatches: int | None, costs_of: CostsOf, stages_per_rank: int | None = None
) -> tuple[Schedule, CostModel]:
    """The schedule of that name or file, which may be unable to run, and its costs."""
    from zbpipe.registry import generate, lookup

    algorithm = lookup(name)
    if algorithm.table is not None:
        ranks = algorithm.table.placement.num_ranks if ranks is None else ranks
        microbatches = algorithm.table.num_microbatches if microbatches is None else microbatches
    if ranks is None or microbatches is None:
        missing = "-p (pipeline ranks)" if ranks is None else "-m (microbatches)"
        raise ValueError(f"{algorithm.name} needs {missing}; for example: {algorithm.name} -p 4 -m 8")
    costs = costs_of(algorithm.place(ranks, stages_per_rank))
    schedule = generate(name, ranks, microbatches, stages_per_rank=stages_per_rank, costs=costs)
    # A registered function may give its schedule any name; people look for the one that they typed.
    return replace(schedule, name=algorithm.name), costs


def generated(
    name: str, ranks: int | None, microbatches: int | None, costs_of: CostsOf, stages_per_rank: int | None = None
) -> tuple[Schedule, CostModel]:
    """The schedule of that name or file, validated, and its costs."""
    from zbpipe.validation import validate

    schedule, costs = made(name, ranks, microbatches, costs_of, stages_per_rank)
    if findings := validate(schedule):
        more = f" (the first of {len(findings)} findings)" if len(findings) > 1 else ""
        raise ValueError(f"{schedule.name} cannot run: {findings[0]}{more}; `zbpipe validate` lists all findings")
    return schedule, costs


def simulated(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs_of: CostsOf,
    stages_per_rank: int | None = None,
    **how: Any,
) -> Timeline:
    """Its timeline; `how` is for `zbpipe.simulate`."""
    from zbpipe.simulation import simulate

    schedule, costs = generated(name, ranks, microbatches, costs_of, stages_per_rank)
    return simulate(schedule, costs, **how)


def all_simulated(
    ranks: int,
    microbatches: int,
    costs_of: CostsOf,
    has_costs: Callable[[Placement], bool] = lambda placement: True,
    **how: Any,
) -> Iterator[Timeline]:
    """The timelines of all named schedules whose placement has costs; `how` is for `zbpipe.simulate`.

    A schedule that cannot have these sizes, or fails in any other way, is left out with a line on stderr.

    Raises:
        ValueError: no schedule can have these numbers.
    """
    from zbpipe.ir import require_size
    from zbpipe.registry import schedules

    require_size(f"a pipeline of {ranks} ranks", ranks, microbatches)
    for algorithm in schedules().values():
        try:
            if has_costs(algorithm.place(ranks)):
                yield simulated(algorithm.name, ranks, microbatches, costs_of, **how)
        except ValueError as error:
            click.echo(f"left out {algorithm.name}: {one_line(str(error))}", err=True)
        except Exception as error:  # a broken function of an installed package is no reason to hide the others
            click.echo(f"left out {algorithm.name}: {type(error).__name__}: {one_line(str(error))}", err=True)
