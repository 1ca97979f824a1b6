"""What a search found: a schedule, its timeline, its distance from the best possible, and the layers of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from zbpipe.costs.layers import LayerCosts, Split
from zbpipe.costs.model import ROUNDING
from zbpipe.planner.request import Objective
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.post_validation import period_of
from zbpipe.simulator.timeline import Timeline

if TYPE_CHECKING:
    from zbpipe.simulator.jitter import StepTimes


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
    """Name of the placement that it chose."""
    found_by: str
    """The searches that led to it, for instance "VHalf, annealing"."""
    objective: Objective
    """The time that was minimised."""
    limits: tuple[float, ...] | None
    """By rank the activations that it may hold, in the unit of the costs' activations; None if there was no limit."""
    bounds: Mapping[str, float]
    """For each placement tried a time below which no schedule can be, by the objective."""
    layers: LayerCosts | None = None
    """The layers that it was to cut into stages; None if it was given stages."""
    split: Split | None = None
    """By stage the layers that it holds; None without layers."""
    even: Plan | None = None
    """What the same search finds for TorchTitan's even split; None without layers, or where that breaks the limit."""
    step_times: StepTimes | None = None
    """Of a robust plan, where times vary; None for others."""

    def __repr__(self) -> str:
        """Without its ops."""
        return (
            f"Plan({self.schedule.name!r}, {self.placement!r}, p={self.schedule.num_ranks},"
            f" m={self.schedule.num_microbatches}, makespan={self.makespan:g}, gap={self.gap:.2%},"
            f" found_by={self.found_by!r})"
        )

    def _repr_html_(self) -> str:
        """The picture, in notebooks."""
        return self.timeline._repr_html_()

    @property
    def schedule(self) -> Schedule:
        """What to run: `to_csv()` writes it for torch and TorchTitan."""
        return self.timeline.schedule

    @property
    def module_fqns_per_model_part(self) -> list[list[str]] | None:
        """The split as TorchTitan's config field of this name: names of modules by stage; None without layers."""
        return None if self.layers is None or self.split is None else self.layers.modules(self.split)

    @property
    def makespan(self) -> float:
        """How long a synchronous step takes."""
        return self.timeline.makespan

    @cached_property
    def period(self) -> float:
        """How long a step takes where `zbpipe.OptimizerStep` lets ranks run ahead."""
        return period_of(self.timeline)

    @property
    def reached(self) -> float:
        """The time that was minimised, by the objective."""
        return self.makespan if self.objective == "makespan" else self.period

    @property
    def lower_bound(self) -> float:
        """A time below which no schedule on any of the placements can be, by the objective."""
        return min(self.bounds.values())

    @property
    def gap(self) -> float:
        """How much longer the plan may be than the best possible one on these placements: 0.01 is one percent."""
        return max(self.reached / self.lower_bound - 1, 0.0) if self.lower_bound else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that there is nothing better."""
        return self.gap <= ROUNDING
