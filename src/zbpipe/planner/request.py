"""The checked arguments of a plan, except the costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from zbpipe.costs.model import Transport
from zbpipe.costs.numbers import number
from zbpipe.schedule.ir import Placement, require_whole

Objective = Literal["makespan", "period"]

PLACEMENTS: Mapping[str, Callable[[int], Placement]] = MappingProxyType(
    {
        "single": Placement.loop,
        "loop": lambda ranks: Placement.loop(ranks, 2),
        "v": Placement.v,
        "wave": lambda ranks: Placement.v(ranks, 4),
    }
)
"""Placements by name, also those to try by default: one stage per rank, two in a loop, two on a V, four on two Vs."""

_MOST_BUDGET = 1e13
"""Largest budget: about 28 hours of one core, at some 1e8 ops per second."""


@dataclass(frozen=True)
class Request:
    ranks: int
    microbatches: int
    placements: Mapping[str, Placement]
    limits: tuple[float, ...] | None = None
    """Memory limit of each rank, in the unit of the costs' activations. None means no limit."""
    objective: Objective = "makespan"
    budget: float | None = None
    """Number of ops that the search may time. None means about a second."""
    seed: int = 0
    transport: Transport = Transport.IDEAL
    share: float = 1.0
    """Share of the default budget, for one of several searches."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective has to be 'makespan' or 'period', got {self.objective!r}")
        require_whole(seed=self.seed)
        if self.budget is not None:
            usually = f"it is the number of ops to time, usually {1e8:g}"
            budget = number(self.budget, f"budget = {self.budget!r} is not a number: {usually}")
            if not budget > 0:
                raise ValueError(f"budget={budget:g} is too small for a search: {usually}")
            if budget > _MOST_BUDGET:
                raise ValueError(f"budget={budget:g} would take days: {usually}")
        if not self.placements:
            raise ValueError(f"no placement to try: name some of {', '.join(PLACEMENTS)}")


def name_placements(ranks: int, wanted: Any) -> dict[str, Placement]:
    """The `wanted` placements by name. A single one needs no list."""
    if isinstance(wanted, (str, Placement)):
        wanted = (wanted,)
    if not isinstance(wanted, Iterable):
        raise TypeError(f"placements = {wanted!r}: give zbpipe.Placements, or some of {', '.join(PLACEMENTS)}")
    found: dict[str, Placement] = {}
    for given in wanted:
        each = given
        if isinstance(each, str) and "-" in each and all(map(str.isdecimal, each.split("-"))):
            each = Placement(tuple(map(int, each.split("-"))))
        if isinstance(each, Placement):
            if each.num_ranks != ranks:
                raise ValueError(f"the placement {each.rank_of} is for {each.num_ranks} ranks, but the job has {ranks}")
            known = (name for name, place in PLACEMENTS.items() if place(ranks) == each)
            found[next(known, "-".join(map(str, each.rank_of)))] = each
        elif isinstance(each, str) and each in PLACEMENTS:
            found[each] = PLACEMENTS[each](ranks)
        else:
            raise ValueError(
                f"unknown placement {each!r}; give one of {', '.join(PLACEMENTS)}, the rank of each stage like 0-1-1-0,"
                " or a zbpipe.Placement"
            )
    return found
