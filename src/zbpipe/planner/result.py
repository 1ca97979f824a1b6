"""The result of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zbpipe.costs.layers import LayerCosts, Split
from zbpipe.costs.model import ROUNDING
from zbpipe.costs.numbers import FrozenDict, set_fields
from zbpipe.planner.request import Objective
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.simulation import period_of
from zbpipe.simulator.timeline import Timeline


@dataclass(frozen=True, repr=False)
class Plan:
    """The best schedule that `zbpipe.plan` found. Times are in seconds.

    >>> import zbpipe
    >>> found = zbpipe.plan(2, 4, (1, 1, 1), memory_limit=2, placements=["single"], budget=1e4)
    >>> found.makespan, found.optimal, found.limits
    (13.0, True, (2.0, 2.0))
    """

    timeline: Timeline
    placement: str
    found_by: str
    """Searches that led to it, for example "VHalf, annealing"."""
    objective: Objective
    limits: tuple[float, ...] | None
    """Memory limit of each rank, in the unit of the costs' activations. None means no limit."""
    bounds: Mapping[str, float]
    """Lower bound of the objective on each placement tried."""
    layers: LayerCosts | None = None
    """Layers and their split into stages. None if the stages were given."""
    split: Split | None = None
    even: Plan | None = None
    """Plan for TorchTitan's even split. None without layers, or if the split exceeds the limit."""

    def __post_init__(self) -> None:
        set_fields(self, bounds=FrozenDict(self.bounds))

    def __repr__(self) -> str:
        return (
            f"Plan({self.schedule.name!r}, {self.placement!r}, p={self.schedule.num_ranks},"
            f" m={self.schedule.num_microbatches}, makespan={self.makespan:g}, gap={self.gap:.2%},"
            f" found_by={self.found_by!r})"
        )

    @property
    def schedule(self) -> Schedule:
        """The planned schedule: `to_csv()` writes it for torch and TorchTitan."""
        return self.timeline.schedule

    @property
    def module_fqns_per_model_part(self) -> list[list[str]] | None:
        """The split as this config field of TorchTitan: module names of each stage. None without layers."""
        return None if self.layers is None or self.split is None else self.layers.modules(self.split)

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @cached_property
    def period(self) -> float:
        """Seconds of a step where `zbpipe.OptimizerStep` lets ranks run ahead."""
        return period_of(self.timeline)

    @property
    def reached(self) -> float:
        return self.makespan if self.objective == "makespan" else self.period

    @property
    def lower_bound(self) -> float:
        """Lower bound of the objective over all tried placements."""
        return min(self.bounds.values())

    @property
    def gap(self) -> float:
        """Upper bound of the excess over the optimum on these placements: 0.01 is one percent."""
        return max(self.reached / self.lower_bound - 1, 0.0) if self.lower_bound else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that the plan is optimal."""
        return self.gap <= ROUNDING
