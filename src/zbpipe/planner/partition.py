"""Which layers each stage gets: first by work, then by what short searches for a schedule make of a split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from types import MappingProxyType

from zbpipe.costs import least_room, shares_within
from zbpipe.ir import Placement
from zbpipe.layer_costs import LayerCosts, Split, even_sizes, require_enough, split_of
from zbpipe.planner.plan import (
    DEFAULT_PLACEMENTS,
    Limit,
    Objective,
    Plan,
    limits_of,
    named_placements,
    plan,
    problem_of,
)
from zbpipe.planner.search import Progress
from zbpipe.transport import Transport

_MOST_TRIES, _LEAST_TRIES, _OPS = 60, 12, 100_000
"""Splits of a placement that are looked at by a short search; the fewer the more ops a schedule has."""
_EFFORT = 200
"""How often a short search may time each op."""
_FINALISTS, _SECOND_EFFORT = 6, 4000
"""So many of the best splits get a second search, which may time each op so often."""
_RANKS = 8
"""So many ranks with the most work give layers, and so many with the least take some."""
_NEAR = 1 - 1e-9

_Sizes = tuple[int, ...]


@dataclass(frozen=True)
class LayerPlan:
    """The best split found, and the best schedule for it."""

    plan: Plan
    costs: LayerCosts
    splits: Mapping[Placement, Split]
    """The best one found on each placement that has no more stages than there are layers."""
    even: Plan | None
    """What the same search finds for TorchTitan's even split; None if that one does not keep to the limit."""

    @property
    def split(self) -> Split:
        """That of the plan: by stage the layers that it holds."""
        return self.splits[self.plan.schedule.placement]

    @property
    def module_fqns_per_model_part(self) -> list[list[str]]:
        """The split as TorchTitan's config field of this name: names of modules by stage."""
        return self.costs.modules(self.split)


def plan_layers(
    ranks: int,
    microbatches: int,
    costs: LayerCosts,
    memory_limit: Limit | None = None,
    *,
    placements: Iterable[str | Placement] = DEFAULT_PLACEMENTS,
    objective: Objective = "makespan",
    budget: float | None = None,
    seed: int = 0,
    exact: bool = False,
    transport: Transport | str = Transport.IDEAL,
    progress: Progress | None = None,
) -> LayerPlan:
    """Cut a model into stages, and search for the schedule with the shortest step.

    Args:
        ranks: pipeline ranks, from 1 on.
        microbatches: from 1 on.
        costs: of the layers.
        memory_limit: as for `zbpipe.plan`, but numbers are in units of what a rank keeps of one microbatch on the
            average, so that a rank with more layers has no more room.
        placements, objective, budget, seed, exact, transport, progress: as for `zbpipe.plan`. The budget is for the
            split found and once more for the even split; the looks at other splits come on top, and do not look at the
            transport.

    Raises:
        ValueError: as `zbpipe.plan`, or fewer layers than stages on all placements.
    """
    limit = as_limit(costs, ranks, memory_limit)
    wanted = dict.fromkeys(placement for _, placement in named_placements(ranks, placements))
    possible = [placement for placement in wanted if placement.num_stages <= len(costs.layers)]
    if wanted and not possible:
        require_enough(len(costs.layers), min(placement.num_stages for placement in wanted))
    report = progress or (lambda share, best: None)
    splits: dict[Placement, Split] = {}
    for number, placement in enumerate(possible):
        part = _part(report, number / len(possible) / 2, 1 / len(possible) / 2)
        splits[placement] = split_layers(
            costs, placement, microbatches, limit, objective=objective, seed=seed, progress=part
        )
    even = {placement: split_of(even_sizes(len(costs.layers), placement.num_stages)) for placement in possible}
    fitting = {placement: split for placement, split in even.items() if _fits(costs, placement, split, limit)}

    def planned(splits: Mapping[Placement, Split], report: Progress) -> Plan:
        return plan(
            ranks,
            microbatches,
            lambda placement: costs.stages(splits[placement]),
            limit,
            placements=splits,
            objective=objective,
            budget=budget,
            seed=seed,
            exact=exact,
            transport=transport,
            progress=report,
        )

    best = planned(splits, _part(report, 0.5, 0.25))
    rival = planned(fitting, _part(report, 0.75, 0.25)) if fitting else None
    # A long search may find for the even split what the short ones did not see.
    if rival is not None and getattr(rival, objective) < getattr(best, objective):
        best, splits = rival, splits | {rival.schedule.placement: even[rival.schedule.placement]}
    return LayerPlan(best, costs, MappingProxyType(splits), rival)


def split_layers(
    costs: LayerCosts,
    placement: Placement,
    microbatches: int,
    memory_limit: Limit | None = None,
    *,
    objective: Objective = "makespan",
    seed: int = 0,
    tries: int | None = None,
    progress: Progress | None = None,
) -> Split:
    """The split with the shortest step on one placement, as far as short searches show.

    Args:
        costs: of the layers.
        placement: where the stages are.
        microbatches: from 1 on.
        memory_limit: as for `plan_layers`.
        objective: which time is to be short.
        seed: of the searches' random numbers.
        tries: how many splits to look at. Default: 60, fewer in large jobs.
        progress: called with the share of the tries that are made, and the shortest time so far.

    Returns:
        By stage the layers that it holds: at least one each, all in their order.

    Raises:
        ValueError: fewer layers than stages.
    """
    limit = as_limit(costs, placement.num_ranks, memory_limit)
    if tries is None:
        tries = min(_MOST_TRIES, max(_LEAST_TRIES, _OPS // (3 * placement.num_stages * microbatches)))
    trials = _Trials(costs, placement, microbatches, limit, objective, seed, tries)
    best = min((balanced(costs, placement), even_sizes(len(costs.layers), placement.num_stages)), key=trials.length)
    while better := trials.better_neighbour(best, progress or (lambda share, best: None)):
        best = better
    return split_of(trials.winner())


def balanced(costs: LayerCosts, placement: Placement) -> _Sizes:
    """Layers by stage, so that the rank with the most work has little, and the next one, too."""

    def loads(sizes: _Sizes) -> list[float]:
        return sorted(_work(costs, placement, sizes), reverse=True)

    best = even_sizes(len(costs.layers), placement.num_stages)
    while True:
        work = _work(costs, placement, best)
        heaviest = placement.stages_on(work.index(max(work)))
        trial = min(_moved(best, heaviest, range(placement.num_stages)), key=loads, default=best)
        if loads(trial) >= loads(best):
            return best
        best = trial


def as_limit(costs: LayerCosts, ranks: int, memory_limit: Limit | None) -> Limit | None:
    """The limit of `plan_layers` as `plan` takes it: a function of placement and costs."""
    if memory_limit is None or callable(memory_limit):
        return memory_limit
    mean = sum(layer.activations for layer in costs.layers) / ranks
    limits = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * ranks
    return partial(shares_within, tuple(limit * mean for limit in limits))


class _Trials:
    """How good splits are on one placement, each looked at once."""

    def __init__(
        self,
        costs: LayerCosts,
        placement: Placement,
        microbatches: int,
        limit: Limit | None,
        objective: Objective,
        seed: int,
        tries: int,
    ) -> None:
        self.costs = costs
        self.placement = placement
        self.microbatches = microbatches
        self.limit = limit
        self.objective: Objective = objective
        self.seed = seed
        self.tries = tries
        self.known: dict[_Sizes, float] = {}

    def bound(self, sizes: _Sizes) -> float:
        """Seconds below which no schedule can be; infinite if not even one microbatch keeps to the limit."""
        if not _fits(self.costs, self.placement, split_of(sizes), self.limit):
            return inf
        stages = self.costs.stages(split_of(sizes))
        return problem_of("", self.placement, stages, self.microbatches, self.limit, self.objective).lower_bound

    def length(self, sizes: _Sizes) -> float:
        """Seconds that a short search reaches."""
        if sizes not in self.known:
            self.known[sizes] = self._search(sizes, _EFFORT)
        return self.known[sizes]

    def better_neighbour(self, sizes: _Sizes, progress: Progress) -> _Sizes | None:
        """The first one found, those with the lowest bound before the others. None if there is none, or no try left."""
        length = self.length(sizes)
        moved = _moved(sizes, *self._heavy_and_light(sizes))
        for bound, each in sorted((self.bound(each), each) for each in moved):
            if bound >= length * _NEAR or len(self.known) >= self.tries:
                return None
            progress(len(self.known) / self.tries, length)
            if self.length(each) < length * _NEAR:
                return each
        return None

    def winner(self) -> _Sizes:
        """The best after a longer search."""
        finalists = sorted(self.known, key=self.length)[:_FINALISTS]
        return min(finalists, key=lambda sizes: self._search(sizes, _SECOND_EFFORT))

    def _search(self, sizes: _Sizes, effort: int) -> float:
        if self.bound(sizes) == inf:
            return inf
        found = plan(
            self.placement.num_ranks,
            self.microbatches,
            self.costs.stages(split_of(sizes)),
            self.limit,
            placements=[self.placement],
            objective=self.objective,
            budget=effort * 3 * self.placement.num_stages * self.microbatches,
            seed=self.seed,
        )
        return float(getattr(found, self.objective))

    def _heavy_and_light(self, sizes: _Sizes) -> tuple[list[int], list[int]]:
        """The stages of the ranks with the most work, and of those with the least."""
        work = _work(self.costs, self.placement, sizes)
        ranks = sorted(range(self.placement.num_ranks), key=work.__getitem__)
        light, heavy = ranks[:_RANKS], ranks[-_RANKS:]
        return (
            [stage for rank in heavy for stage in self.placement.stages_on(rank)],
            [stage for rank in light for stage in self.placement.stages_on(rank)],
        )


def _moved(sizes: _Sizes, givers: Iterable[int], takers: Iterable[int]) -> Iterator[_Sizes]:
    """One layer less on a stage and one more on another; all layers between the two move on by one."""
    for giver, taker in product(givers, takers):
        if giver != taker and sizes[giver] > 1:
            moved = list(sizes)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)


def _work(costs: LayerCosts, placement: Placement, sizes: _Sizes) -> list[float]:
    """Seconds of F, I and W of one microbatch by rank."""
    work = [0.0] * placement.num_ranks
    for rank, stage in zip(placement.rank_of, split_of(sizes), strict=True):
        work[rank] += sum(costs.layers[layer].seconds for layer in stage)
    return work


def _fits(costs: LayerCosts, placement: Placement, split: Split, limit: Limit | None) -> bool:
    """Whether every rank can hold one microbatch."""
    stages = costs.stages(split)
    least = shares_within(least_room(placement, stages), placement, stages)
    limits = limits_of(placement, stages, limit) or least
    return all(limit >= needed * (1 - 1e-9) for limit, needed in zip(limits, least, strict=True))


def _part(progress: Progress, begin: float, share: float) -> Progress:
    """Progress of a part of the work, told as that of the whole."""
    return lambda done, best: progress(begin + share * done, best)
