"""Layers of each stage: split first by work, then by the step times from short searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from zbpipe.costs.layers import LayerCosts, Sizes, Split, balance, even_sizes, move_layer, require_enough, split_of
from zbpipe.costs.model import ROUNDING
from zbpipe.costs.transport import Transport
from zbpipe.planner.request import Request
from zbpipe.planner.result import Plan
from zbpipe.planner.search import Progress, report_nothing
from zbpipe.planner.stages import fits, make_problem, plan_stages
from zbpipe.schedule.ir import Placement

# Chosen by hand, so that a split for 8 ranks and 32 microbatches takes some seconds. Not tuned.
_MOST_TRIES, _LEAST_TRIES, _OPS = 60, 12, 100_000
"""Largest and smallest number of splits per placement for short searches, and their total number of ops."""
_EFFORT = 200
"""Number of times that a short search may time each op."""
_FINALISTS, _SECOND_EFFORT = 6, 4000
"""Number of best splits that get a second search, and the number of times that it may time each op."""
_RANKS = 8
"""Number of ranks with the most work that give layers, and of ranks with the least work that take some."""


def plan_layers(request: Request, layers: LayerCosts, progress: Progress) -> Plan:
    """Cut a model into stages, and search for the schedule with the shortest step.

    Placements with more stages than layers are omitted. ValueError if there are no others.
    """
    num_layers = len(layers.layers)
    possible = {name: each for name, each in request.placements.items() if each.num_stages <= num_layers}
    if not possible:
        require_enough(num_layers, min(each.num_stages for each in request.placements.values()))
    splits: dict[Placement, Split] = {}
    for number, placement in enumerate(possible.values()):
        part = _part(progress, number / len(possible) / 2, 1 / len(possible) / 2)
        splits[placement] = split_layers(request, layers, placement, progress=part)
    even = {placement: split_of(even_sizes(num_layers, placement.num_stages)) for placement in splits}

    def plan_split(splits: Mapping[Placement, Split], part: Progress) -> Plan:
        placements = {name: each for name, each in possible.items() if each in splits}
        found = plan_stages(
            replace(request, placements=placements), lambda placement: layers.stages(splits[placement]), part
        )
        return replace(found, layers=layers, split=splits[found.schedule.placement])

    best = plan_split(splits, _part(progress, 0.5, 0.25))
    fitting = {each: split for each, split in even.items() if fits(each, layers.stages(split), request.limits)}
    if not fitting:
        return best
    rival = plan_split(fitting, _part(progress, 0.75, 0.25))
    # A long search may find a better schedule for the even split than the short ones did.
    return replace(rival if rival.reached < best.reached else best, even=rival)


def split_layers(
    request: Request,
    layers: LayerCosts,
    placement: Placement,
    *,
    tries: int | None = None,
    progress: Progress = report_nothing,
) -> Split:
    """The split with the shortest step on one placement, according to short searches.

    They try `tries` splits, by default 60, and fewer in large jobs.
    """
    if tries is None:
        tries = min(_MOST_TRIES, max(_LEAST_TRIES, _OPS // (3 * placement.num_stages * request.microbatches)))
    trials = _Trials(request, layers, placement, tries)
    best = min((balance(layers, placement), even_sizes(len(layers.layers), placement.num_stages)), key=trials.length)
    while better := trials.find_better_neighbour(best, progress):
        best = better
    return split_of(trials.pick_winner())


class _Trials:
    """Step times of splits on one placement. Each split is searched once."""

    def __init__(self, request: Request, layers: LayerCosts, placement: Placement, tries: int) -> None:
        # Queues apply only to the final plan.
        self.request = replace(request, placements={"": placement}, transport=Transport.IDEAL)
        self.costs = layers
        self.placement = placement
        self.tries = tries
        self.known: dict[Sizes, float] = {}

    def bound(self, sizes: Sizes) -> float:
        """Lower bound of the step, in seconds. Infinite if not even one microbatch keeps to the limit."""
        stages = self.costs.stages(split_of(sizes))
        if not fits(self.placement, stages, self.request.limits):
            return inf
        return make_problem(self.request, "", self.placement, stages).lower_bound

    def length(self, sizes: Sizes) -> float:
        """Step time found by a short search, in seconds."""
        if sizes not in self.known:
            self.known[sizes] = self._search(sizes, _EFFORT)
        return self.known[sizes]

    def find_better_neighbour(self, sizes: Sizes, progress: Progress) -> Sizes | None:
        """The first neighbour found with a shorter step, lowest bounds first. None if there is none, or no try left."""
        length = self.length(sizes)
        neighbours = move_layer(sizes, *self._heavy_and_light(sizes))
        for bound, each in sorted((self.bound(each), each) for each in neighbours):
            if bound >= length * (1 - ROUNDING) or len(self.known) >= self.tries:
                return None
            progress(len(self.known) / self.tries, length)
            if self.length(each) < length * (1 - ROUNDING):
                return each
        return None

    def pick_winner(self) -> Sizes:
        """The best split after a longer search."""
        finalists = sorted(self.known, key=self.length)[:_FINALISTS]
        return min(finalists, key=lambda sizes: self._search(sizes, _SECOND_EFFORT))

    def _search(self, sizes: Sizes, effort: int) -> float:
        if self.bound(sizes) == inf:
            return inf
        stages = self.costs.stages(split_of(sizes))
        request = replace(self.request, budget=effort * 3 * stages.num_stages * self.request.microbatches)
        return plan_stages(request, lambda placement: stages).reached

    def _heavy_and_light(self, sizes: Sizes) -> tuple[list[int], list[int]]:
        """The stages of the ranks with the most work, and of those with the least."""
        seconds = [sum(self.costs.layers[layer].seconds for layer in stage) for stage in split_of(sizes)]
        work = self.placement.sum_by_rank(seconds)
        ranks = sorted(range(self.placement.num_ranks), key=work.__getitem__)
        light, heavy = ranks[:_RANKS], ranks[-_RANKS:]
        return (
            [stage for rank in heavy for stage in self.placement.stages_on(rank)],
            [stage for rank in light for stage in self.placement.stages_on(rank)],
        )


def _part(progress: Progress, begin: float, share: float) -> Progress:
    """Report the progress of a part of the work as progress of the whole."""
    return lambda done, best: progress(begin + share * done, best)
