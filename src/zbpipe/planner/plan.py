"""The planner's front: costs and a limit in, the best schedule found and its distance from the best possible out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from zbpipe import registry
from zbpipe.costs import CostModel, least_room, shares_within
from zbpipe.ir import Placement, Schedule, require_size, require_whole
from zbpipe.planner.engine import PLAIN, Engine, fastest
from zbpipe.planner.problem import Problem
from zbpipe.planner.search import Found, Progress, Search, absolute
from zbpipe.simulation import simulate
from zbpipe.timeline import Timeline
from zbpipe.transport import Transport

Costs = CostModel | tuple[float, float, float] | Callable[[Placement], CostModel]
Limit = float | Sequence[float] | Callable[[Placement, CostModel], Sequence[float]]
"""Peak activations in a rank's share of one microbatch: for all ranks, by rank, or by rank from placement and costs."""
Objective = Literal["makespan", "longest_rank_span"]

PLACEMENTS: Mapping[str, Callable[[int], Placement]] = MappingProxyType(
    {
        "single": Placement.loop,
        "loop": lambda ranks: Placement.loop(ranks, 2),
        "v": Placement.v,
        "wave": lambda ranks: Placement.v(ranks, 4),
    }
)
"""By name: one stage a rank, two round and round, two on a V, and four on the V twice."""

_MOST_BUDGET = 1e13
_MOST_CANDIDATES = 64
"""That are simulated with a transport that has queues, which takes tens of milliseconds each."""

DEFAULT_PLACEMENTS = ("single", "loop", "v")
"""Those with at most two stages a rank: more stages mean smaller ones, which not every model can be cut into."""


@dataclass(frozen=True)
class Plan:
    """The best schedule found. Times are in seconds, limits in a rank's share of one microbatch."""

    schedule: Schedule
    timeline: Timeline
    placement: str
    """Name of the placement that it chose."""
    found_by: str
    """The searches that led to it, for instance "VHalf, annealing"."""
    objective: Objective
    """Which time was to be short."""
    limits: tuple[float, ...] | None
    """What each rank may hold, on this placement."""
    bounds: Mapping[str, float]
    """For each placement tried a time below which no schedule can be, by the objective."""

    @property
    def makespan(self) -> float:
        """How long a synchronous step takes."""
        return self.timeline.makespan

    @property
    def longest_rank_span(self) -> float:
        """What a step costs if ranks run on into the next."""
        return self.timeline.longest_rank_span

    @property
    def lower_bound(self) -> float:
        """A time below which no schedule on any of the placements can be, by the objective."""
        return min(self.bounds.values())

    @property
    def gap(self) -> float:
        """How much longer the plan may be than the best possible one on these placements: 0.01 is one percent."""
        reached: float = getattr(self, self.objective)
        return max(reached / self.lower_bound - 1, 0.0) if self.lower_bound else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that there is nothing better."""
        return self.gap <= 1e-9


def plan(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: Limit | None = None,
    *,
    placements: Iterable[str | Placement] = DEFAULT_PLACEMENTS,
    objective: Objective = "makespan",
    budget: float | None = None,
    seed: int = 0,
    exact: bool = False,
    transport: Transport | str = Transport.IDEAL,
    progress: Progress | None = None,
) -> Plan:
    """Search for the schedule with the shortest step that keeps to the memory limit.

        zbpipe.plan(8, 32, (1.0, 1.2, 0.8), memory_limit=5.5)

    Args:
        ranks: pipeline ranks, from 1 on.
        microbatches: from 1 on.
        costs: seconds of F, I and W that a rank spends on one microbatch, all its stages together; or a function that
            gives a CostModel for a placement; or a CostModel, and then only placements with so many stages are tried.
        memory_limit: peak activations, one number or one per rank, in units of the rank's share of one microbatch (what
            all its stages keep of it after F); at least 1, and more where I takes more than it frees. Or a function
            that gives one per rank for a placement and its costs. Default: no limit.
        placements: names out of `PLACEMENTS`, or placements. "wave" is not tried unless it is named.
        objective: what is to be short: "makespan", the synchronous step, or "longest_rank_span", which counts when
            ranks run on into the next step.
        budget: of work, as the number of ops that the search may time, so that results do not depend on the machine.
            Default: `default_budget`.
        seed: of the search's random numbers.
        exact: whether to look for the provably best schedule with OR-Tools afterwards. For small cases.
        transport: what messages wait for (see `zbpipe.transport`). The search itself knows nothing of queues; of all
            that it found, and the schedules with a name, this takes the one with the shortest step there, with its
            receives where they are best. The bounds hold for every transport.
        progress: called with the share of the budget that is used, and the shortest time so far.

    Raises:
        ValueError: numbers that no schedule can have, an unknown placement or transport, costs for none of the
            placements, or a limit too small for even one microbatch.
    """
    transport = Transport.parse(transport)
    require_whole(ranks=ranks, microbatches=microbatches)
    if min(ranks, microbatches) < 1:
        raise ValueError(f"a plan needs at least 1 rank and 1 microbatch, got {ranks} and {microbatches}")
    require_size(f"a plan for {ranks} ranks", ranks, microbatches)
    if objective not in ("makespan", "longest_rank_span"):
        raise ValueError(f"objective has to be 'makespan' or 'longest_rank_span', got {objective!r}")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget={budget:g} leaves nothing to search with: it counts ops to time, {1e8:g} is usual")
    if budget is not None and budget > _MOST_BUDGET:
        raise ValueError(f"budget={budget:g} takes days: it counts ops to time, {1e8:g} is usual")
    wanted = list(named_placements(ranks, placements))
    if not wanted:
        raise ValueError(f"no placement to try: name some of {', '.join(PLACEMENTS)}")
    problems = [
        problem_of(name, placement, _cost_model(costs, placement), microbatches, memory_limit, objective)
        for name, placement in wanted
        if not isinstance(costs, CostModel) or costs.num_stages == placement.num_stages
    ]
    if not problems:
        stages = costs.num_stages if isinstance(costs, CostModel) else 0
        raise ValueError(
            f"the costs are for {stages} stages, and none of the placements puts so many on {ranks} ranks; name one"
            " that does, or pass a function that gives a CostModel for any placement"
        )
    engine = fastest()
    search = Search(problems, budget or default_budget(problems, engine), seed, engine, progress or _silent)
    found = search.run(_seeds(problems))
    bounds = {problem.name: problem.lower_bound for problem in problems}
    if exact:
        from zbpipe.planner.exact import prove

        found, proven = prove(search.by_placement)
        bounds |= proven
    found, timeline = _shortest([found, *search.kept], transport, objective)
    return Plan(
        schedule=timeline.schedule,
        timeline=timeline,
        placement=found.problem.name,
        found_by=found.by,
        objective=objective,
        limits=limits_of(found.problem.placement, found.problem.costs, memory_limit),
        bounds=MappingProxyType(bounds),
    )


def _shortest(candidates: Sequence[Found], transport: Transport, objective: Objective) -> tuple[Found, Timeline]:
    """The candidate with the shortest step under the transport; with the ideal one the first, which is the best."""

    def timeline_of(found: Found) -> Timeline:
        schedule = found.problem.schedule(f"plan-{found.problem.name}", found.order)
        return simulate(schedule, found.problem.costs, transport=transport)

    best, timeline = candidates[0], timeline_of(candidates[0])
    if transport is Transport.IDEAL:
        return best, timeline
    others = {(each.problem.name, each.order): each for each in candidates}
    for each in sorted(others.values(), key=lambda found: found.length)[:_MOST_CANDIDATES]:
        # Queues make nothing shorter.
        if each.length >= getattr(timeline, objective):
            break
        trial = timeline_of(each)
        if getattr(trial, objective) < getattr(timeline, objective):
            best, timeline = each, trial
    return best, timeline


def default_budget(problems: Sequence[Problem], engine: Engine = PLAIN) -> float:
    """A second or so of one core for 8 ranks and 32 microbatches, and no less; larger jobs get more."""
    most = max(problem.num_ops for problem in problems)
    return max(1e8, 7e4 * float(most**0.85)) / (1 if engine.compiled else 30)


def _silent(share: float, best: float) -> None:
    pass


def limits_of(placement: Placement, costs: CostModel, memory_limit: Limit | None) -> tuple[float, ...] | None:
    """A memory limit by rank.

    Raises:
        ValueError: another number of limits than ranks.
    """
    ranks = placement.num_ranks
    if memory_limit is None:
        return None
    limit = memory_limit(placement, costs) if callable(memory_limit) else memory_limit
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * ranks
    if len(limits) != ranks:
        raise ValueError(f"memory_limit has to be one number or one per rank, got {len(limits)} for {ranks} ranks")
    return limits


def named_placements(ranks: int, wanted: Iterable[str | Placement]) -> Iterator[tuple[str, Placement]]:
    """The placements that are wanted, with their names.

    Raises:
        ValueError: an unknown name, or a placement for another number of ranks.
    """
    for each in (wanted,) if isinstance(wanted, (str, Placement)) else wanted:
        if isinstance(each, Placement):
            if each.num_ranks != ranks:
                raise ValueError(f"the placement {each.rank_of} is for {each.num_ranks} ranks, but the job has {ranks}")
            known = (name for name, place in PLACEMENTS.items() if place(ranks) == each)
            yield next(known, "-".join(map(str, each.rank_of))), each
        elif each in PLACEMENTS:
            yield each, PLACEMENTS[each](ranks)
        else:
            raise ValueError(f"unknown placement {each!r}; give a zbpipe.Placement or one of {', '.join(PLACEMENTS)}")


def _cost_model(costs: Costs, placement: Placement) -> CostModel:
    if isinstance(costs, CostModel):
        return costs
    return costs(placement) if callable(costs) else CostModel.uniform(placement, *costs)


def problem_of(
    name: str,
    placement: Placement,
    costs: CostModel,
    microbatches: int,
    memory_limit: Limit | None,
    objective: Objective,
) -> Problem:
    """The search's problem on one placement, with the limits in the unit of `costs.activations`."""
    require_size(f"the placement {name}", placement.num_stages, microbatches)
    limits = limits_of(placement, costs, memory_limit)
    least = shares_within(least_room(placement, costs), placement, costs)
    for rank, (limit, needed) in enumerate(zip(limits or (), least, strict=False)):
        if not limit >= needed * (1 - 1e-9):
            raise ValueError(
                f"memory_limit={limit:g} on rank {rank} is less than one microbatch takes there at some time;"
                f" give at least {needed:g}, or cut the batch into more microbatches"
            )
    rooms = absolute(limits or [microbatches * needed for needed in least], placement, costs)
    return Problem(name, placement, costs, microbatches, rooms, objective == "longest_rank_span")


def _seeds(problems: Sequence[Problem]) -> Iterator[tuple[Problem, list[int], str]]:
    """Every named schedule that has one of the placements and keeps to the limits: its order, and its name."""
    for problem in problems:
        for traits in registry.schedules().values():
            if "costs" in traits.keywords:  # searched with less effort than this search makes
                continue
            if order := _order(problem, traits):
                yield problem, order, traits.name


def _order(problem: Problem, traits: registry.Algorithm) -> list[int] | None:
    """The named schedule for this problem, None if there is none."""
    placement = problem.placement
    stages = len(placement.stages_on(0)) if traits.any_stages_per_rank else None
    try:
        if traits.place(placement.num_ranks, stages) != placement:
            return None
        schedule = registry.generate(traits.name, placement.num_ranks, problem.num_microbatches, stages_per_rank=stages)
        return problem.order(schedule) if problem.fits(schedule) else None
    except Exception:  # whatever the function of an installed package does wrong, the search goes on without it
        return None
