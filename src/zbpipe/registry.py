"""Names of schedules, and what has to be known of each before a stage is built: how many stages a rank, and where.

A schedule is a function `(ranks, microbatches) -> Schedule`, registered under its name:

    @zbpipe.register("MySchedule", placement="v", stages_per_rank=2, summary="what it is good for")
    def my_schedule(ranks: int, microbatches: int) -> Schedule: ...
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Literal

from zbpipe.ir import Placement, Schedule

Generate = Callable[[int, int], Schedule]


@dataclass(frozen=True)
class Traits:
    """What a name stands for."""

    name: str
    placement: Literal["loop", "v"]
    stages_per_rank: int
    """How many stages a rank holds when the caller does not choose."""
    any_stages_per_rank: bool = False
    """Whether the caller may choose another number of stages per rank."""
    generate: Generate | None = None
    """`(ranks, microbatches) -> Schedule`; None where only torch has the schedule."""
    source: Literal["torch", "zbpipe"] = "zbpipe"
    """Whose class runs it."""
    summary: str = ""

    def place(self, num_ranks: int, stages_per_rank: int | None = None) -> Placement:
        """The placement on `num_ranks` ranks, with the given or the usual number of stages on each.

        Raises:
            ValueError: fewer than one rank, or a number of stages that this schedule does not run.
        """
        stages = self.stages_per_rank if stages_per_rank is None else stages_per_rank
        if num_ranks < 1:
            raise ValueError(f"{self.name} needs at least 1 pipeline rank, got {num_ranks}")
        if stages < 1 or (stages != self.stages_per_rank and not self.any_stages_per_rank):
            raise ValueError(f"{self.name} runs {self.stages_per_rank} stage(s) per rank, got stages_per_rank={stages}")
        return (Placement.v if self.placement == "v" else Placement.loop)(num_ranks, stages)


def _torch(name: str, stages_per_rank: int, summary: str, placement: Literal["loop", "v"] = "loop") -> Traits:
    looped = placement == "loop" and stages_per_rank > 1
    return Traits(name, placement, stages_per_rank, looped, None, "torch", summary)


_TORCH_SCHEDULES = (
    _torch("GPipe", 1, "all forwards, then all backwards"),
    _torch("1F1B", 1, "one forward, one backward"),
    _torch("Interleaved1F1B", 2, "1F1B over several stages per rank"),
    _torch("LoopedBFS", 2, "breadth first over several stages per rank"),
    _torch("InterleavedZeroBubble", 2, "Interleaved1F1B with dW split off"),
    _torch("ZBVZeroBubble", 2, "torch's ZB-V", "v"),
    _torch("DualPipeV", 2, "DeepSeek's cut-in-half schedule", "v"),
)

_registered: dict[str, Traits] = {traits.name.lower(): traits for traits in _TORCH_SCHEDULES}


def register(
    name: str,
    *,
    placement: Literal["loop", "v"] = "loop",
    stages_per_rank: int = 1,
    source: Literal["torch", "zbpipe"] = "zbpipe",
    summary: str = "",
) -> Callable[[Generate], Generate]:
    """Decorator that makes a schedule known under `name` (case-insensitive).

    Args:
        name: what users write.
        placement: "loop" (stage s on rank s modulo ranks) or "v" (down the ranks and up again).
        stages_per_rank: stages that each rank holds.
        source: "torch" keeps torch's own class as the one that runs the schedule.
        summary: one line for listings.

    Raises:
        ValueError: the name is taken by another function.
    """

    def add(generate: Generate) -> Generate:
        known = _registered.get(name.lower())
        if known is not None and known.generate is not None and known.generate is not generate:
            raise ValueError(f"a schedule named {known.name!r} is registered already; choose another name")
        _registered[name.lower()] = Traits(
            name,
            placement,
            stages_per_rank,
            False,
            generate,
            source,
            summary or (known.summary if known else ""),
        )
        return generate

    return add


def schedules() -> Mapping[str, Traits]:
    """All schedules by their lower-case name."""
    _load()
    return MappingProxyType(_registered)


def lookup(name: str) -> Traits:
    """The schedule called `name`, in any case.

    Raises:
        ValueError: there is none; the message lists the names and the nearest one.
    """
    known = schedules()
    traits = known.get(name.lower())
    if traits is not None:
        return traits
    near = get_close_matches(name.lower(), known, n=1, cutoff=0)
    names = ", ".join(sorted((each.name for each in known.values()), key=str.lower))
    raise ValueError(f"unknown schedule {name!r}; did you mean {known[near[0]].name!r}? The schedules are: {names}")


def stage_indices(schedule: str, *, rank: int, num_ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """Which stages to build on `rank` for the schedule of that name, in ascending order.

    Args:
        schedule: a name, in any case.
        rank: pipeline rank, from 0.
        num_ranks: size of the pipeline group.
        stages_per_rank: for the looped schedules, which run with any number; default: the schedule's usual one.

    Raises:
        ValueError: unknown name, a rank outside the group, or a number of stages that the schedule does not run.
    """
    placement = lookup(schedule).place(num_ranks, stages_per_rank)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} is outside a pipeline of {num_ranks} ranks: use 0 to {num_ranks - 1}")
    return placement.stages_on(rank)


def generate(schedule: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule of that name for so many ranks and microbatches.

    Raises:
        ValueError: unknown name, a schedule that only torch can make, or a number below 1.
    """
    traits = lookup(schedule)
    if traits.generate is None:
        raise ValueError(f"{traits.name} is torch's own schedule; zbpipe has no generator for it")
    if ranks < 1 or microbatches < 1:
        raise ValueError(
            f"{traits.name} needs at least 1 rank and 1 microbatch, got {ranks} ranks and {microbatches} microbatches"
        )
    return traits.generate(ranks, microbatches)


@cache
def _load() -> None:
    importlib.import_module("zbpipe.algorithms")
