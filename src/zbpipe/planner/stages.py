"""Plans for stages with known costs, and for layers that are first cut into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from math import inf

from zbpipe.costs.job import CostsOf, LimitTooSmallError, MemoryLimit, most_room, require_room
from zbpipe.costs.layers import LayerCosts, Sizes, Split, balance, even_sizes, move_layer, require_enough, split_of
from zbpipe.costs.model import ROUNDING, CostModel, Transport
from zbpipe.planner.engine import Engine, fastest
from zbpipe.planner.problem import Problem, fit_within
from zbpipe.planner.request import Objective, Request
from zbpipe.planner.result import Plan
from zbpipe.planner.search import Found, Progress, Search, report_nothing
from zbpipe.schedule import registry
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule, require_size
from zbpipe.simulator.simulation import period_of, simulate
from zbpipe.simulator.timeline import Timeline

# Chosen by hand, so that a split for 8 ranks and 32 microbatches takes some seconds.
_MOST_CANDIDATES = 64
"""Number of candidates simulated with a transport that has queues: each takes tens of milliseconds."""
_MOST_TRIES, _LEAST_TRIES, _OPS = 60, 12, 100_000
"""Largest and smallest number of splits per placement for short searches, and their total number of ops."""
_EFFORT, _SECOND_EFFORT, _FINALISTS = 200, 4000, 6
"""Timings of each op in a short search, and in a second one, and the number of splits that get a second one."""
_RANKS = 8
"""Number of ranks, those with the most work, that give layers, and of ranks, those with the least, that take some."""


def plan_stages(request: Request, costs_of: CostsOf, progress: Progress = report_nothing) -> Plan:
    """The best schedule for these stages. ValueError for too many, or a limit too small for one microbatch."""
    problems = [
        make_problem(request, name, placement, costs_of(placement)) for name, placement in request.placements.items()
    ]
    engine = fastest()
    budget = request.budget or request.share * default_budget(problems, engine)
    search = Search(problems, budget, engine, seed=request.seed, progress=progress)
    found = search.run(make_named_schedules(problems))
    bounds = {problem.name: problem.bound(problem.full_costs) for problem in problems}
    found, timeline = _find_shortest([found, *search.kept], request.transport, request.objective)
    return Plan(timeline, found.problem.name, found.by, request.objective, request.limits, bounds)


def default_budget(problems: Sequence[Problem], engine: Engine) -> float:
    """About a second of one core for 8 ranks and 32 microbatches or less. Larger jobs get more."""
    most = max(problem.num_ops for problem in problems)
    return max(1e8, 7e4 * float(most**0.85)) / (1 if engine.compiled else 30)


def fits(placement: Placement, costs: CostModel, limits: Sequence[float] | None) -> bool:
    try:
        require_room(placement, costs, limits or (inf,) * placement.num_ranks)
    except LimitTooSmallError:
        return False
    return True


def make_problem(request: Request, name: str, placement: Placement, costs: CostModel) -> Problem:
    require_size(f"the placement {name}", placement.num_stages, request.microbatches)
    costs.require_microbatches(request.microbatches)
    exact = costs if costs.has_fsdp or costs.varies or costs.fill_waits != "off" else None
    costs = replace(costs.alike, gather=0.0, reduce=0.0, fill_waits="off")
    limits = request.limits or (inf,) * request.ranks
    require_room(placement, costs, limits)
    # Numbers that no order reaches mean no limit.
    most = most_room(placement, costs, request.microbatches)
    limits = tuple(limit if limit < inf else room for limit, room in zip(limits, most, strict=True))
    return Problem(name, placement, costs, request.microbatches, limits, request.objective == "period", exact)


def _find_shortest(candidates: Sequence[Found], transport: Transport, objective: Objective) -> tuple[Found, Timeline]:
    """The candidate with the shortest step under the transport, with FSDP's collectives."""

    def timeline_of(found: Found) -> Timeline:
        schedule = found.problem.schedule(f"plan-{found.problem.name}", found.order)
        costs = found.problem.full_costs
        return simulate(hide_reductions(schedule, costs), costs, transport=transport)

    def length(timeline: Timeline) -> float:
        return timeline.makespan if objective == "makespan" else period_of(timeline)

    best, timeline = candidates[0], timeline_of(candidates[0])
    if transport is Transport.IDEAL and not any(each.problem.exact for each in candidates):
        return best, timeline
    others = {(each.problem.name, each.order): each for each in candidates}
    for each in sorted(others.values(), key=lambda found: found.length)[:_MOST_CANDIDATES]:
        # Neither queues nor collectives shorten anything. Sizes and filled waits may.
        costs = each.problem.full_costs
        if each.length >= length(timeline) and not costs.varies and costs.fill_waits == "off":
            break
        trial = timeline_of(each)
        if length(trial) < length(timeline):
            best, timeline = each, trial
    return best, timeline


def make_named_schedules(problems: Sequence[Problem]) -> Iterator[tuple[Problem, list[int], str]]:
    """Every named schedule on its placement, made lean within the limits: its problem, order, and description."""
    for problem, algorithm in product(problems, registry.schedules().values()):
        keywords, name = algorithm.keywords, algorithm.name
        # Searched schedules take as long as this search with less effort.
        if "costs" in keywords and "search" not in keywords:
            continue
        limit = MemoryLimit(problem.limits, "") if "memory_limit" in keywords else None
        costs = replace(problem.costs, fill_waits=problem.full_costs.fill_waits)
        known = {"costs": costs, "memory_limit": limit, "search": False}
        # A broken function of an installed package does not end the search.
        with suppress(Exception):
            schedule = algorithm.make_on(problem.placement, problem.num_microbatches, **known)
            if schedule is None:
                continue
            if not (fits := problem.fits(schedule)):
                schedule, name = fit_within(schedule, problem.costs, problem.limits), f"{name} made lean"
            if fits or problem.fits(schedule):
                yield problem, problem.order(schedule), name


def hide_reductions(schedule: Schedule, costs: CostModel) -> Schedule:
    """The schedule in which each rank ends as early as these changes allow, including its reductions:

    - The W at its end run stage by stage, so that all reductions but the last stage's have more time.
    - If only W follow the last I of stage 0, it moves behind them and becomes a B, which hides a longer reduction.

    >>> schedule = Schedule.from_csv("0F0,1F0,1I0,1W0,0F1,1F1,1I1,0I0,0I1,1W1,0W0,0W1", "table")
    >>> costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(1, 1), reduce=(2, 1))
    >>> print(hide_reductions(schedule, costs).to_csv().strip())
    0F0,1F0,1I0,1W0,0F1,1F1,1I1,0I0,1W1,0W0,0B1
    """
    if not costs.reduce:
        return schedule
    variants = [schedule, *(replace(schedule, ops=tuple(map(each, schedule))) for each in (_end_with_b, _sort_tail))]
    timelines = [simulate(each, costs) for each in variants]

    def pick(rank: int) -> tuple[Op, ...]:
        """The row that ends first. No op depends on the changed ones, so each rank can take its best row."""

        def end(timeline: Timeline) -> float:
            return max((row[-1].end for row in (timeline.spans[rank], timeline.reductions[rank]) if row), default=0.0)

        return min(timelines, key=end).schedule.ops[rank]

    return replace(schedule, ops=tuple(map(pick, range(schedule.num_ranks))))


def _end_with_b(row: Sequence[Op]) -> tuple[Op, ...]:
    begin = _find_tail(row)
    last = row[begin - 1] if begin else None
    if last is None or last.stage or last.kind is not OpKind.I:
        return tuple(row)
    own = last._replace(kind=OpKind.W)
    return (*row[: begin - 1], *(op for op in row[begin:] if op != own), last._replace(kind=OpKind.B))


def _sort_tail(row: Sequence[Op]) -> tuple[Op, ...]:
    begin = _find_tail(row)
    return (*row[:begin], *sorted(row[begin:], key=lambda op: -op.stage))


def _find_tail(row: Sequence[Op]) -> int:
    return len(row) - sum(1 for _ in takewhile(lambda op: op.kind is OpKind.W, reversed(row)))


def plan_layers(request: Request, layers: LayerCosts, progress: Progress) -> Plan:
    """The schedule with the shortest step, and the layers of its stages. ValueError for too few layers."""
    num_layers = len(layers.layers)
    possible = {name: each for name, each in request.placements.items() if each.num_stages <= num_layers}
    if not possible:
        require_enough(num_layers, min(each.num_stages for each in request.placements.values()))
    splits: dict[Placement, Split] = {}
    for number, placement in enumerate(possible.values()):
        part = _part(progress, number / len(possible) / 2, 1 / len(possible) / 2)
        splits[placement] = split_layers(request, layers, placement, part)
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
    # A long search may find a better schedule for the even split than the short ones.
    return replace(rival if rival.reached < best.reached else best, even=rival)


def split_layers(request: Request, layers: LayerCosts, placement: Placement, progress: Progress) -> Split:
    """The split with the shortest step on one placement, according to short searches."""
    tries = min(_MOST_TRIES, max(_LEAST_TRIES, _OPS // (3 * placement.num_stages * request.microbatches)))
    # Only the final plan simulates queues.
    request = replace(request, placements={"": placement}, transport=Transport.IDEAL)
    trials = _Trials(request, layers, placement, tries)
    best = min((balance(layers, placement), even_sizes(len(layers.layers), placement.num_stages)), key=trials.length)
    while better := trials.find_better_neighbour(best, progress):
        best = better
    finalists = sorted(trials.known, key=trials.length)[:_FINALISTS]
    best = min(finalists, key=lambda sizes: trials.search(sizes, _SECOND_EFFORT))
    return split_of(best)


@dataclass
class _Trials:
    """Step times of splits on one placement. Each split is searched once."""

    request: Request
    costs: LayerCosts
    placement: Placement
    tries: int
    known: dict[Sizes, float] = field(default_factory=dict)

    def bound(self, sizes: Sizes) -> float:
        """Lower bound of the step in seconds. Infinite if one microbatch exceeds the limit."""
        stages = self.costs.stages(split_of(sizes))
        if not fits(self.placement, stages, self.request.limits):
            return inf
        return make_problem(self.request, "", self.placement, stages).lower_bound

    def length(self, sizes: Sizes) -> float:
        if sizes not in self.known:
            self.known[sizes] = self.search(sizes, _EFFORT)
        return self.known[sizes]

    def find_better_neighbour(self, sizes: Sizes, progress: Progress) -> Sizes | None:
        """The first neighbour with a shorter step, lowest bounds first. None if none is found within the tries."""
        length = self.length(sizes)
        seconds = [sum(self.costs.layers[layer].seconds for layer in stage) for stage in split_of(sizes)]
        work = self.placement.sum_by_rank(seconds)
        # The ranks with the least work take a layer from those with the most.
        ranks = sorted(range(self.placement.num_ranks), key=work.__getitem__)
        heavy, light = (
            [stage for rank in some for stage in self.placement.stages_on(rank)]
            for some in (ranks[-_RANKS:], ranks[:_RANKS])
        )
        neighbours = move_layer(sizes, heavy, light)
        for bound, each in sorted((self.bound(each), each) for each in neighbours):
            if bound >= length * (1 - ROUNDING) or len(self.known) >= self.tries:
                return None
            progress(len(self.known) / self.tries, length)
            if self.length(each) < length * (1 - ROUNDING):
                return each
        return None

    def search(self, sizes: Sizes, effort: int) -> float:
        if self.bound(sizes) == inf:
            return inf
        stages = self.costs.stages(split_of(sizes))
        request = replace(self.request, budget=effort * 3 * stages.num_stages * self.request.microbatches)
        return plan_stages(request, lambda placement: stages).reached


def _part(progress: Progress, begin: float, share: float) -> Progress:
    """Report a part's progress as progress of the whole."""
    return lambda done, best: progress(begin + share * done, best)
