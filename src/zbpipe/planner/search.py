"""The way to a good schedule: many starts, of which the better ones are annealed for longer and longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from zbpipe.costs import CostModel
from zbpipe.ir import Placement, Schedule
from zbpipe.planner.compiled import PLAIN, Engine
from zbpipe.planner.greedy import ListScheduler, Shape
from zbpipe.planner.kernel import NEVER
from zbpipe.planner.problem import Problem
from zbpipe.simulate import Timeline, simulate

Progress = Callable[[float, float], None]
"""Called with the share of the budget that is used up, and the shortest time found so far in seconds."""

_LISTING = 10
"""What it takes to place one op by list scheduling, in ops that annealing times anew."""
_HEAT = 0.3
"""What annealing may lose in one move at the beginning, in mean times of an op."""
_NEAR = 1 + 1e-9


@dataclass(frozen=True)
class Found:
    """A sound order within the limits of its problem."""

    problem: Problem
    order: tuple[int, ...]
    length: float
    """Seconds: what is to be short."""
    by: str
    """The searches that led to it."""


class Search:
    """One search over several placements, with a budget that counts ops placed and timed."""

    def __init__(self, problems: Sequence[Problem], budget: float, seed: int, engine: Engine, progress: Progress) -> None:
        self.problems = problems
        self.engine = engine
        self.budget = budget
        self.left = budget
        self.random = Random(seed)
        self.progress = progress
        self.target = min(problem.lower_bound for problem in problems) * _NEAR
        self.best = NEVER

    def run(self, seeds: Iterable[tuple[Problem, Schedule]]) -> Found:
        """The best order found."""
        found = [self.seed(problem, schedule) for problem, schedule in seeds]
        share = 0.25 * self.budget / len(self.problems)
        for problem in self.problems:
            found += self.shapes(problem, share)
        return self.race(found)

    def seed(self, problem: Problem, schedule: Schedule) -> Found:
        """A known schedule, as it is."""
        return self.keep(problem, problem.order(schedule), schedule.name)

    def shapes(self, problem: Problem, budget: float) -> list[Found]:
        """List scheduling: shapes at random, then more and more shapes like the best one."""
        scheduler = ListScheduler(problem, self.engine)
        cost = _LISTING * problem.num_ops
        best: tuple[float, list[int]] = (NEVER, [])
        shape: Shape | None = None
        tries = max(int(budget / cost), 20)
        for number in range(tries):
            if best[0] <= problem.lower_bound * _NEAR:
                break
            fresh = shape is None or number < tries / 4 or self.random.random() < 0.1
            trial = Shape.random(scheduler.legs, self.random) if fresh or shape is None else shape.vary(self.random)
            length, order = scheduler.run(trial, best[0] * _NEAR)
            self.spend(_LISTING * len(order))
            if length <= best[0] < NEVER or length < best[0]:
                best, shape = (length, order), trial
        return [self.keep(problem, best[1], "list scheduling")] if shape else []

    def race(self, found: list[Found]) -> Found:
        """Anneal all for a while, then the better half of them for longer, and the best as long as the budget lasts."""
        rounds = max(len(found) - 1, 1).bit_length()
        for rest in range(rounds, -1, -1):
            found = sorted({each.order: each for each in found}.values(), key=lambda each: each.length)
            found = [each for each in found if each.problem.lower_bound * _NEAR < found[0].length] or found[:1]
            if found[0].length <= self.target or self.left <= 0:
                break
            if rest < rounds:
                found = found[: max((len(found) + 1) // 2, 1)]
            if rest == 0:
                found = found[:1]
            work = self.left / (rest + 1) / len(found) if rest else self.left
            found = [self.anneal(each, work) for each in found]
        return min(found, key=lambda each: each.length)

    def anneal(self, start: Found, work: float) -> Found:
        """The same or a better order."""
        problem = start.problem
        mean = sum(problem.job.seconds) / len(problem.job.seconds)
        _, order, done = self.engine.anneal(
            self.engine.prepare(problem.job),
            self.engine.integers(start.order),
            problem.lower_bound * _NEAR,
            problem.by_span,
            _HEAT * mean,
            max(int(work), 1),
            self.random.randrange(1, 2**31 - 1),
        )
        self.spend(done)
        by = start.by if start.by.endswith("annealing") else f"{start.by}, annealing"
        better = self.keep(problem, problem.in_time(order), by)
        return better if better.length < start.length else start

    def keep(self, problem: Problem, order: list[int], by: str) -> Found:
        found = Found(problem, tuple(order), problem.length(order), by)
        self.best = min(self.best, found.length)
        return found

    def spend(self, work: float) -> None:
        self.left -= work
        self.progress(min(1 - self.left / self.budget, 1.0), self.best)


def best_within(
    name: str,
    placement: Placement,
    num_microbatches: int,
    limit: float,
    costs: CostModel | None = None,
    seeds: Iterable[Schedule] = (),
) -> Schedule:
    """List scheduling by kind, and `seeds`: the one with the shortest synchronous step. Takes no time to speak of.

    Among equally long ones that with the shortest span of a single rank wins, which counts without synchronisation.

    Args:
        name: of the result.
        placement: where the stages are.
        num_microbatches: from 1 on.
        limit: peak activations per rank, in units of the rank's share of one microbatch; at least 1.
        costs: for the placement's stages; default: F, I and W take equal time and communication none.
        seeds: schedules with this placement to try besides; those that do not fit into the limit are passed over.
    """
    costs = costs or CostModel.uniform(placement)
    problem = Problem("", placement, costs, num_microbatches, absolute(limit, placement, costs))
    orders = [order for _, order in ListScheduler(problem, PLAIN).by_kind()]
    found = [problem.schedule(name, order) for order in orders]
    found += [replace(seed, name=name) for seed in seeds if problem.fits(seed)]

    def length(timeline: Timeline) -> tuple[float, float]:
        return timeline.makespan, timeline.longest_rank_span

    return min((simulate(schedule, costs) for schedule in found), key=length).schedule


def absolute(limit: float, placement: Placement, costs: CostModel) -> tuple[float, ...]:
    """By rank, what so many of its shares of one microbatch take, in the unit of `costs.activations`."""
    return tuple(
        limit * sum(costs.activations[stage] for stage in placement.stages_on(rank))
        for rank in range(placement.num_ranks)
    )
