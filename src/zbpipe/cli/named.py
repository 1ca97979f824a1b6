"""Schedules by name, as the commands take them: made, validated and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any

import click

from zbpipe.cli.base import name_argument, one_line, options, progress_line, size_options, stages_option
from zbpipe.cli.costs import Costs, cost_options, fitted_limit_option
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.model import CostModel
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import resolve, schedules
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import validate


@dataclass(frozen=True)
class Request:
    """One schedule, as the options of a command ask for it."""

    name: str
    """Name of a schedule, or path of a file."""
    ranks: int | None
    microbatches: int | None
    costs: Costs
    stages_per_rank: int | None = None
    memory_limit: MemoryLimit | None = None

    def make(self, transport: Transport | None = None) -> tuple[Schedule, CostModel]:
        """The schedule, not validated, and the costs of its stages."""
        algorithm = resolve(self.name)
        ranks, microbatches = self.ranks, self.microbatches
        if algorithm.table is not None:
            ranks = algorithm.table.placement.num_ranks if ranks is None else ranks
            microbatches = algorithm.table.num_microbatches if microbatches is None else microbatches
        ranks = self.costs.ranks(ranks)
        if ranks is None or microbatches is None:
            missing = "-p (pipeline ranks)" if ranks is None else "-m (microbatches)"
            raise ValueError(f"{algorithm.name} needs {missing}; for example: {algorithm.name} -p 4 -m 8")
        costs = self.costs.of(algorithm.place(ranks, self.stages_per_rank))
        limit, limits = self.memory_limit, None
        size = (self.costs.for_limits, ranks, microbatches)
        if limit is not None:
            algorithm.require_limits("--memory-limit")
            limits = MemoryLimit.parse(limit.resolve(*size))
        with limit.explain(*size) if limit else nullcontext():
            schedule = algorithm.make(
                ranks,
                microbatches,
                stages_per_rank=self.stages_per_rank,
                costs=costs,
                memory_limit=limits,
                transport=transport,
            )
        # A registered function may name its schedule anything. Users look for the name that they typed.
        return replace(schedule, name=algorithm.name), costs

    def make_valid(self, transport: Transport | None = None) -> tuple[Schedule, CostModel]:
        schedule, costs = self.make(transport)
        if findings := validate(schedule):
            more = f" (the first of {len(findings)} findings)" if len(findings) > 1 else ""
            raise ValueError(f"{schedule.name} cannot run: {findings[0]}{more}; `zbpipe validate` lists all findings")
        return schedule, costs

    def simulate(self, transport: Transport | None = None, **how: Any) -> Timeline:
        """Timeline of a schedule made for this transport. `how` goes to `zbpipe.simulate`."""
        overlaps = resolve(self.name).source != "torch"  # torch's own classes do not
        return simulate(*self.make_valid(transport), transport=transport or "ideal", overlaps_fsdp=overlaps, **how)


def request_options(times: str = "typical") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for the options of a `Request`, which the command gets as one argument. The default of `--costs` is
    `times`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_request(**given: Any) -> Any:
            request = Request(**{field.name: given.pop(field.name) for field in fields(Request)})
            return command(request=request, **given)

        return options(name_argument, size_options, stages_option, cost_options(times), fitted_limit_option)(
            with_request
        )

    return add


def simulate_all(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: MemoryLimit | None = None,
    stages_per_rank: int | None = None,
    **how: Any,
) -> Iterator[Timeline]:
    """Timelines of all named schedules whose placement has costs, with the limit and the stages that they can adapt to.

    A schedule that cannot have these sizes, or fails in any other way, is omitted with a line on stderr.
    """
    with progress_line() as show:
        known = schedules().values()
        for number, algorithm in enumerate(known):
            show(f"{number + 1} of {len(known)}: {algorithm.name}")
            stages = stages_per_rank if algorithm.any_stages_per_rank else None
            try:
                if costs.job is None or costs.has(algorithm.place(ranks, stages)):
                    limit = memory_limit if "memory_limit" in algorithm.keywords else None
                    yield Request(algorithm.name, ranks, microbatches, costs, stages, limit).simulate(**how)
            except Exception as error:  # a broken function of one installed package must not hide the others
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                click.echo(f"skipped {algorithm.name}: {kind}{one_line(str(error))}", err=True)
