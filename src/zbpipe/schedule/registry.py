"""Schedules by name: their functions, their numbers of stages per rank, and their placements.

A schedule is a function `(ranks, microbatches) -> Schedule`, registered under its name:

    @zbpipe.register("MySchedule", placement="v", stages_per_rank=2, summary="what it is good for")
    def my_schedule(ranks: int, microbatches: int) -> Schedule: ...

A function that also takes `stages_per_rank` runs with any number of stages, one with `costs` can adapt to measured
times, one with `memory_limit` to a `zbpipe.costs.MemoryLimit`, and one with `transport` to the transport of messages.
The planner starts from functions without costs, and from those with `search`: it passes False, for a schedule within
milliseconds. Installed packages offer functions through the entry-point group "zbpipe.algorithms". zbpipe's own are in
`zbpipe.algorithms`, which `import zbpipe` imports.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from zbpipe.schedule.ir import Placement, Schedule, count_noun, require_size, require_whole
from zbpipe.schedule.user_code import SEPARATOR, function_of, read_text

Generate = Callable[..., Schedule]


@runtime_checkable
class _Planned(Protocol):
    """A `zbpipe.Plan`, which this module does not import."""

    @property
    def schedule(self) -> Schedule: ...


_KEYWORDS = ("stages_per_rank", "costs", "memory_limit", "transport", "search")
"""Keywords that a schedule's function may take."""


@dataclass(frozen=True)
class Algorithm:
    """The algorithm behind a name: a function that makes schedules, and its known properties.

    >>> zbv = resolve("ZBV")
    >>> zbv.name, zbv.placement, zbv.stages_per_rank, zbv.source
    ('ZBV', 'v', 2, 'zbpipe')
    """

    name: str
    placement: Literal["loop", "v", "wave", "table"]
    """See `register`; "table" for an existing schedule, such as a CSV file."""
    stages_per_rank: int
    """Default number of stages per rank."""
    generate: Generate
    """Call `make`, which checks sizes and result."""
    source: Literal["torch", "zbpipe"] = "zbpipe"
    """Owner of the class that runs it."""
    summary: str = ""
    table: Schedule | None = None
    keywords: frozenset[str] = frozenset()
    """Keywords that the function takes."""
    listed: bool = True
    by_checkpointing: bool = False
    """Whether a job without measured costs passes the default costs of its activation checkpointing."""

    @property
    def any_stages_per_rank(self) -> bool:
        return "stages_per_rank" in self.keywords

    @property
    def chooses_stages(self) -> bool:
        """Whether the number of stages per rank depends on the job, if the user gives none."""
        return self.any_stages_per_rank and "memory_limit" in self.keywords

    @property
    def class_name(self) -> str:
        """Name of its class on torch's executor, for logs."""
        if self.table is None:
            return f"Schedule{self.name}"
        return "ScheduleFromFile" if self.name.lower().endswith(".csv") else "ScheduleAsGiven"

    def require_limits(self, option: str) -> None:
        """Raise for a memory limit, which the user wrote as `option`, if this schedule does not adapt to one."""
        if "memory_limit" not in self.keywords:
            names = [each.name for each in _registered.values() if "memory_limit" in each.keywords]
            raise ValueError(
                f"{option} is only for {', '.join(sorted(names))}, which adapt to it: omit it for {self.name}"
            )

    def place(self, num_ranks: int, stages_per_rank: int | None = None) -> Placement:
        """The placement on `num_ranks` ranks. ValueError for numbers that it does not support."""
        stages = self.stages_per_rank if stages_per_rank is None else stages_per_rank
        num_ranks, stages = require_whole(1, num_ranks=num_ranks, stages_per_rank=stages)
        if stages != self.stages_per_rank and not self.any_stages_per_rank:
            runs = f"{self.name} runs {count_noun(self.stages_per_rank, 'stage')} per rank"
            raise ValueError(f"{runs}, got stages_per_rank={stages}: omit it, or take ZB or ZBLoop")
        if self.table is None:
            kinds = {"loop": Placement.loop, "v": Placement.v, "wave": Placement.wave}
            return kinds[self.placement](num_ranks, stages)
        placement = self.table.placement
        if num_ranks != placement.num_ranks:
            raise ValueError(
                f"{self.name} is a table for {count_noun(placement.num_ranks, 'rank')}, but the job has {num_ranks}:"
                f" {_PLAN.format(num_ranks, self.table.num_microbatches)}"
            )
        return placement

    def stages_of_cut(self, num_ranks: int, num_stages: int, cut: str) -> int:
        """Stages per rank of a user's cut into this many stages. ValueError if the schedule runs another number."""
        # `cut` names the config field and its effect.
        each, left = divmod(num_stages, num_ranks)
        own = self.place(num_ranks).num_stages
        if left or not each or (num_stages != own and not self.any_stages_per_rank):
            needed = f"a multiple of {num_ranks}" if self.any_stages_per_rank else str(own)
            raise ValueError(
                f"{cut} {num_stages} stages, but {self.name} on {num_ranks} ranks has {needed}: change or omit the"
                " field"
            )
        return each

    def make(
        self,
        ranks: int,
        microbatches: int,
        *,
        stages_per_rank: int | None = None,
        costs: object = None,
        memory_limit: object = None,
        transport: object = None,
        search: bool = True,
    ) -> Schedule:
        """The schedule of this size. The function gets those of the other arguments that it takes."""
        ranks, microbatches = require_whole(1, ranks=ranks, microbatches=microbatches)
        placement = self.place(ranks, stages_per_rank)
        if self.table is None:
            require_size(f"{self.name} on {ranks} ranks", placement.num_stages, microbatches)
        if memory_limit is not None:
            self.require_limits("memory_limit")
        values = (len(placement.stages_on(0)), costs, memory_limit, transport, search)
        given = dict(zip(_KEYWORDS, values, strict=True))
        made: object = self.generate(ranks, microbatches, **{name: given[name] for name in self.keywords})
        registered = f"the function registered as {self.name!r}"
        if not isinstance(made, Schedule):
            raise ValueError(f"{registered} has to return a zbpipe.Schedule, got {type(made)}")
        if made.placement != placement:
            raise ValueError(
                f"{self.name!r} is registered with a placement that puts its stages on the ranks {placement.rank_of},"
                f" but its function puts them on {made.placement.rank_of}"
            )
        if made.num_microbatches != microbatches:
            raise ValueError(
                f"{registered} has to return a schedule for {microbatches} microbatches, got one for"
                f" {made.num_microbatches}"
            )
        return made

    def make_on(self, placement: Placement, microbatches: int, **others: Any) -> Schedule | None:
        """The schedule on this placement, with the other arguments of `make`. None if it has another placement."""
        if not self.runs_on(placement):
            return None
        stages = len(placement.stages_on(0))
        return self.make(placement.num_ranks, microbatches, stages_per_rank=stages, **others)

    def runs_on(self, placement: Placement) -> bool:
        """Whether the schedule can have this placement."""
        stages = len(placement.stages_on(0)) if self.any_stages_per_rank else None
        return self.place(placement.num_ranks, stages) == placement


USUAL_STAGES = 4
"""Stages per rank of ZB and ZBLoop in models with as many layers per rank, and without a model."""
_registered: dict[str, Algorithm] = {}


def register(
    name: str,
    *,
    placement: Literal["loop", "v", "wave"] = "loop",
    stages_per_rank: int = 1,
    source: Literal["torch", "zbpipe"] = "zbpipe",
    summary: str = "",
    listed: bool = True,
    by_checkpointing: bool = False,
) -> Callable[[Generate], Generate]:
    """Decorator that registers a schedule under `name`, in any case.

        >>> @zbpipe.register("AllAtOnce", summary="one rank, one backward a microbatch", listed=False)
        ... def all_at_once(ranks: int, microbatches: int) -> zbpipe.Schedule:
        ...     return zbpipe.generate("GPipe", ranks, microbatches)
        >>> print(zbpipe.generate("allatonce", 1, 2))
        rank 0: 0F0 0F1 0B0 0B1

    Args:
        name: the user-facing name.
        placement: "loop" (stage s on rank s modulo ranks), "v" (down the ranks and up again), or "wave" (a V for even
            numbers of stages per rank, and a loop for odd ones).
        stages_per_rank: stages of each rank, unless the caller chooses and the function takes the keyword.
        source: "torch" if torch's own class runs the schedule.
        summary: one line for listings.
        listed: whether listings and comparisons include it.
        by_checkpointing: whether jobs without measured costs pass the default costs of their activation checkpointing.

    ValueError for an impossible or taken name or an impossible placement, TypeError for another signature.
    """
    if not isinstance(name, str) or not name.isprintable() or name != name.strip() or not name or name[0] == "-":
        raise ValueError(
            f"{name!r} cannot be the name of a schedule: give one of printable characters, without spaces around it or"
            " a dash in front"
        )
    if name.lower().endswith(".csv"):
        raise ValueError(f"{name!r} cannot be registered: names ending in .csv are files")
    require_whole(1, stages_per_rank=stages_per_rank)
    if placement not in ("loop", "v", "wave"):
        raise ValueError(
            f"{name!r} with placement={placement!r} cannot be registered: a placement is 'loop', 'v' or 'wave'"
        )
    if source not in ("torch", "zbpipe") or not isinstance(summary, str):
        raise ValueError(
            f"{name!r} with source={source!r} and summary={summary!r} cannot be registered: a source is 'torch' or"
            " 'zbpipe', and a summary is one line of text"
        )

    def add(generate: Generate) -> Generate:
        if not callable(generate):
            raise TypeError(f"{generate!r} cannot be registered as {name!r}: give a function (ranks, microbatches)")
        known = _registered.get(name.lower())
        if known is not None and known.generate is not generate:
            raise ValueError(f"a schedule named {known.name!r} is already registered; choose another name")
        signature = inspect.signature(generate)
        keywords = frozenset(signature.parameters.keys() & set(_KEYWORDS))
        try:
            signature.bind(4, 8, **dict.fromkeys(keywords))
        except TypeError as error:
            raise TypeError(
                f"{generate!r} cannot be registered as {name!r}, {error}: a schedule is a function"
                f" (ranks, microbatches), and may take the keywords {', '.join(_KEYWORDS)}"
            ) from None
        about = (name, placement, stages_per_rank, generate, source, summary, None, keywords, listed, by_checkpointing)
        _registered[name.lower()] = Algorithm(*about)
        return generate

    return add


def schedules() -> Mapping[str, Algorithm]:
    """All schedules by their lower-case name, except `Auto`, which becomes one of them."""
    _load_installed()
    return MappingProxyType({name: algorithm for name, algorithm in _registered.items() if algorithm.listed})


def resolve(schedule: str | Schedule | _Planned | Algorithm) -> Algorithm:
    """The algorithm behind a name (in any case), the path of a CSV file, `file.py:function`, or an existing schedule.

        >>> resolve("zbv").place(num_ranks=2).rank_of
        (0, 1, 1, 0)
        >>> resolve(zbpipe.generate("ZBV", 2, 4)).placement
        'table'

    ValueError if there is none (the message lists the names, and a similar one), or the file holds no schedule.
    """
    match schedule:
        case Algorithm():
            return schedule
        case Schedule():
            return _stand_for(schedule)
        case _Planned():
            return _stand_for(schedule.schedule)
        case str() if schedule.lower().endswith(".csv"):
            return _read_table(schedule)
        case str() if SEPARATOR in schedule:
            return _find_function(schedule)
        case str():
            return _find_name(schedule)
    raise ValueError(
        f"a schedule is named by a string, for example 'ZBV', or is a zbpipe.Schedule or zbpipe.Plan, got {schedule!r}"
    )


def _find_name(name: str) -> Algorithm:
    if name.lower() not in _registered:
        _load_installed()
    if found := _registered.get(name.lower()):
        return found
    near = get_close_matches(name.lower(), _registered, n=1)
    meant = f"; did you mean {_registered[near[0]].name!r}? The" if near else ": the"
    names = ", ".join(sorted((each.name for each in _registered.values()), key=str.lower))
    raise ValueError(
        f"unknown schedule {name!r}{meant} schedules are {names}."
        " The path of a .csv file also works, and file.py:function. Your own schedules are known once their"
        " module is imported"
    )


def _find_function(source: str) -> Algorithm:
    function = function_of(source)
    for algorithm in _registered.values():
        if algorithm.generate is function:
            return algorithm
    name = source.rpartition(":")[2]
    raise ValueError(
        f"{source} is not registered: write @zbpipe.register({name!r}, placement=..., stages_per_rank=...) above it,"
        " with the placement of its stages"
    )


def _read_table(path: str) -> Algorithm:
    try:
        return _stand_for(Schedule.from_csv(read_text(path), name=path))
    except OSError as error:
        raise ValueError(f"schedule file {path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"schedule file {path!r} holds no schedule: {error}") from None


_PLAN = "make one by `zbpipe plan -p {} -m {} -o plan.csv`, or name a schedule that is made for any size"


def _stand_for(schedule: Schedule) -> Algorithm:
    def give_back(ranks: int, microbatches: int) -> Schedule:
        if microbatches != schedule.num_microbatches:
            raise ValueError(
                f"{schedule.name} is a table for {count_noun(schedule.num_microbatches, 'microbatch')}, but the job has"
                f" {microbatches}: {_PLAN.format(ranks, microbatches)}"
            )
        return schedule

    stages_per_rank = len(schedule.placement.stages_on(0))
    return Algorithm(schedule.name, "table", stages_per_rank, give_back, table=schedule)


def stages_for(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """Numbers of stages per rank for a model of this many layers, the one with the shortest step first.

    >>> stages_for(32, 8), stages_for(24, 8), stages_for(4, 8)
    ((4, 2, 1), (2, 1), (1,))
    """
    return (*(each for each in (USUAL_STAGES, 2) if each * num_ranks <= num_layers), 1)


def stage_indices(
    schedule: str | Schedule | _Planned,
    *,
    rank: int,
    num_ranks: int,
    stages_per_rank: int | None = None,
    layers: int | None = None,
) -> tuple[int, ...]:
    """Stages to build on `rank` for the schedule with this name, in ascending order.

        >>> zbpipe.stage_indices("ZBV", rank=1, num_ranks=4)
        (1, 6)
        >>> [zbpipe.stage_indices("ZB", rank=0, num_ranks=4, layers=layers) for layers in (32, 12)]
        [(0, 7, 8, 15), (0, 7)]

    Args:
        schedule: a name, in any case, the path of a CSV file, a Schedule, or a Plan.
        rank: pipeline rank, from 0.
        num_ranks: size of the pipeline group.
        stages_per_rank: for schedules that support any number. ZB runs even numbers in a wave, and ZBLoop in a loop.
            Default: by `layers`, or without these as many as `zbpipe.generate` gives them.
        layers: the model's layers. ZB and ZBLoop have 4 stages per rank, 2 if there are fewer than 4 layers per rank,
            and 1 if there are fewer than 2.

    ValueError for an unknown name, a rank outside the group, and numbers of stages that the schedule does not support.
    """
    algorithm = resolve(schedule)
    if stages_per_rank is None and algorithm.chooses_stages:
        known = () if layers is None else stages_for(*require_whole(1, layers=layers, num_ranks=num_ranks))
        stages_per_rank, *_ = (*known, USUAL_STAGES)
    return algorithm.place(num_ranks, stages_per_rank).stages_on(rank)


@cache
def _load_installed() -> None:
    """Load installed packages once, on demand, because other packages may be slow to import."""
    for entry_point in entry_points(group="zbpipe.algorithms"):
        try:
            entry_point.load()
        except Exception as error:  # one bad package must not disable the other schedules
            warnings.warn(
                f"the entry point {entry_point.name} = {entry_point.value} in the group zbpipe.algorithms cannot be"
                f" loaded, so its schedules are missing: {error!r}",
                stacklevel=2,
            )
