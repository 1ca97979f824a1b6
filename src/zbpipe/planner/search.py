"""Search for a good schedule: many starts by list scheduling, the better ones annealed for longer.

List scheduling takes priorities, an urgency for each op: its start in a simple model, in which microbatches follow each
other at a regular interval, each as a *block* of the same shape (Pipeline Parallelism with Controllable Memory,
2405.15362, section 3). Blocks only set priorities: the kernel keeps the ranks busy and within the limits, so every
shape works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from operator import itemgetter
from random import Random

from zbpipe.costs.job import least_room
from zbpipe.costs.model import ROUNDING, CostModel
from zbpipe.planner.engine import Engine, at_hand
from zbpipe.planner.kernel import NEVER, Job
from zbpipe.planner.problem import Problem
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.simulator.simulation import simulate

Progress = Callable[[float, float], None]
"""Called with the completed share of the work, and the shortest time so far in seconds."""


def report_nothing(share: float, best: float) -> None:
    """Ignore the progress of a search."""


# On 6 jobs of 4 to 8 ranks, with 3 seeds each and a budget of 1e7, the mean gap to the bound is 0.92%, and 0.92 to
# 1.19% if one of the constants is halved or doubled.
_LISTING = 10
"""Work of placing one op by list scheduling, in ops timed by annealing. With numba: 6 to 16."""
_JUSTIFYING = 40
"""Work of justifying one op, in the same unit. With numba: 19 or more."""
_LEAST_CLIMB = 2 * (_LISTING + _JUSTIFYING)
"""Least work of a climb per op, with any budget."""
_SHARE_OF_SHAPES = 0.4
"""Share of the budget for list scheduling."""
_PROMISING, _WORTH = 1.04, 1.1
"""Lists up to this ratio to the shortest are justified, and orders up to this ratio to the best are annealed."""
_MOST_HEAT = 0.4
"""Largest accepted loss of a move, in mean times of an op."""


@dataclass(frozen=True)
class PriorityParams:
    """The shape of a block. A *leg* is one stage of every rank: on a V there are two, down the ranks and up again."""

    forward: tuple[float, ...]
    """Offset of each leg from a stage's F to the next stage's F, in times of that F; `backward` of the I."""
    backward: tuple[float, ...]
    turn_forward: tuple[float, ...]
    """Offset added at the end of each leg, in times of F, or before its start, in times of I (`turn_backward`)."""
    turn_backward: tuple[float, ...]
    turn_loss: float
    """Offset from the last F to the first I, in times of that I."""
    weight: tuple[float, ...]
    """Offset of each leg from the end of I to W, in intervals between microbatches."""
    patience: float = 0.0
    """Longest wait of a rank for an op that is more urgent, in times of a W."""
    pace: float = 0.0
    """Interval between microbatches that enter the first stage, in times of a rank's work on one."""
    spare: float = 0.0
    """Memory kept free for the last leg, in activations of one microbatch there."""
    lean: tuple[float, ...] = ()
    """Memory kept free for each leg, in activations of its stage. B replaces I and W that would leave less."""

    @classmethod
    def plain(cls, legs: int) -> PriorityParams:
        """A shape without waits, with W one interval after I."""
        return cls((1.0,) * legs, (1.0,) * legs, (0.0,) * legs, (0.0,) * legs, 0.0, (1.0,) * legs, lean=(0.0,) * legs)

    @classmethod
    def random(cls, legs: int, random: Random, *, merges: bool = False) -> PriorityParams:
        """A random shape, in ranges chosen by hand. It is lean if B `merges` I and W."""

        def draw(low: float, high: float) -> tuple[float, ...]:
            return tuple(random.uniform(low, high) for _ in range(legs))

        return cls(
            forward=draw(0, 4),
            backward=draw(0, 4),
            turn_forward=draw(-1, 4),
            turn_backward=draw(-1, 4),
            turn_loss=random.uniform(-1, 6),
            weight=draw(0, 3),
            patience=_perhaps(random, 0.5, 0, 1),
            pace=_perhaps(random, 0.8, 0.4, 0.9),
            spare=_perhaps(random, 0.3, 0, 2),
            lean=tuple(_leanness(random) for _ in range(legs)) if merges else (0.0,) * legs,
        )

    def vary(self, random: Random, *, merges: bool = False) -> PriorityParams:
        """A similar shape: about a quarter of its numbers change, by steps chosen by hand."""

        def near(numbers: tuple[float, ...], by: float) -> tuple[float, ...]:
            return tuple(each + random.uniform(-by, by) if random.random() < 0.25 else each for each in numbers)

        return PriorityParams(
            forward=near(self.forward, 0.7),
            backward=near(self.backward, 0.7),
            turn_forward=near(self.turn_forward, 1),
            turn_backward=near(self.turn_backward, 1),
            turn_loss=near((self.turn_loss,), 1)[0],
            weight=near(self.weight, 1),
            patience=self.patience if random.random() < 0.8 else _perhaps(random, 0.6, 0, 1),
            pace=self.pace if random.random() < 0.8 else _perhaps(random, 0.9, 0.4, 0.8),
            spare=self.spare if random.random() < 0.9 else _perhaps(random, 0.5, 0, 2),
            lean=tuple(_leanness(random) if random.random() < 0.2 else each for each in self.lean)
            if merges
            else self.lean,
        )


def _perhaps(random: Random, chance: float, low: float, high: float) -> float:
    return random.uniform(low, high) if random.random() < chance else 0.0


def _leanness(random: Random) -> float:
    return random.choice((0.0, random.uniform(0, 4), NEVER))


class ListScheduler:
    def __init__(self, problem: Problem, engine: Engine) -> None:
        self.engine = engine
        self.job: Job = engine.prepare(problem.job)
        self.mirrored: Job = engine.prepare(problem.mirrored)
        self.problem = problem
        placement = problem.placement
        self.leg = [placement.stages_on(rank).index(stage) for stage, rank in enumerate(placement.rank_of)]
        self.legs = max(self.leg) + 1
        nodes = problem.job.nodes
        self.interval = max(
            sum(node.seconds for node in nodes if node.rank == rank) for rank in range(placement.num_ranks)
        )
        self.weight = max(node.seconds for node in nodes[2::3])
        self.merges = any(problem.merges)

    def run(self, shape: PriorityParams, cutoff: float = NEVER) -> tuple[float, list[int]]:
        """The length and the order for a shape. Infinity for lengths of at least `cutoff`."""
        times = (self.interval, shape.patience * self.weight, shape.pace * self.interval)
        return self._schedule(self._urgency(shape), shape.lean, shape.spare, times, cutoff, False)

    def justify(self, order: Sequence[int]) -> tuple[float, list[int]]:
        """The length and the order after moving all ops to the end and back."""
        return self.engine.justify(self.job, self.mirrored, self.engine.integers(order))

    def anneal(self, order: Sequence[int], heat: float, work: int, seed: int) -> tuple[float, list[int], int]:
        """The length, the order, and the work done. See `kernel.anneal`."""
        target = self.problem.lower_bound * (1 + ROUNDING)
        return self.engine.anneal(self.job, self.engine.integers(order), target, heat, work, seed)

    def length(self, order: Sequence[int]) -> float:
        """Seconds of the objective if the ranks run their ops in this order."""
        if self.problem.by_period or self.problem.costs.has_fsdp:  # which the inner loops ignore
            return self.problem.length(order)
        return self.anneal(order, heat=0.0, work=0, seed=1)[0]

    def list_by_kind(self) -> list[tuple[float, list[int]]]:
        """Orders by kind only: I or F first, W last or before F, patience of 0, 0.5 and 1 W; where B saves memory, as
        few and as many B as possible."""
        rankings = ((1, 0, 2), (2, 0, 1), (0, 1, 2), (0, 2, 1))
        cases = [(ranking, patience, False) for patience in (0.0, 0.5, 1.0) for ranking in rankings]
        return [self._list(lean, *case) for lean in self._leannesses for case in cases]

    def list_around_the_first(self) -> list[tuple[float, list[int]]]:
        """Orders like those of the Zero Bubble paper, which have the shortest periods: I first, then F, then W."""
        cases = (((1, 0, 2), 0.0, True), ((1, 0, 2), 0.125, False))
        return [self._list(lean, *case) for lean in self._leannesses for case in cases]

    @property
    def _leannesses(self) -> tuple[float, ...]:
        return (0.0, NEVER) if self.merges else (0.0,)

    def _list(
        self, lean: float, ranking: tuple[int, int, int], patience: float, first: bool
    ) -> tuple[float, list[int]]:
        """The length and the order by kind alone. `ranking`: places of F, I and W. `patience`: in W."""
        stages = range(self.problem.placement.num_stages)
        urgency = [float(place * len(stages) - stage) for stage in stages for place in ranking]
        times = (0.0, patience * self.weight, 0.0)
        return self._schedule(urgency, (lean,) * self.legs, 0.0, times, NEVER, first)

    def _schedule(
        self,
        urgency: list[float],
        lean: Sequence[float],
        spare: float,
        times: tuple[float, float, float],
        cutoff: float,
        first: bool,
    ) -> tuple[float, list[int]]:
        """List scheduling with `kernel.list_schedule`'s period, patience and release (`times`). Each op keeps `spare`
        more memory free, if that leaves room for a microbatch."""
        job, floats = self.problem.job, self.engine.floats
        needs, margin = [node.needs for node in job.nodes], [0.0] * len(job.nodes)
        for stage, leg in enumerate(self.leg):
            node = job.nodes[3 * stage]
            margin[3 * stage + 1] = lean[leg] if lean[leg] == NEVER else lean[leg] * node.takes
            if leg < self.legs - 1 and node.needs + spare * node.takes <= job.limit[node.rank]:
                needs[3 * stage] += spare * node.takes
        return self.engine.list_schedule(
            self.job, floats(needs), floats(urgency), *times, floats(margin), cutoff, first
        )

    def _urgency(self, shape: PriorityParams) -> list[float]:
        nodes, leg = self.problem.job.nodes, self.leg
        last = len(leg) - 1
        urgency = [0.0] * len(nodes)
        now = 0.0
        for stage in range(last + 1):
            urgency[3 * stage] = now
            now += shape.forward[leg[stage]] * nodes[3 * stage].seconds
            if stage < last:
                now += nodes[3 * stage + 3].lag
                if leg[stage + 1] != leg[stage]:
                    now += shape.turn_forward[leg[stage]] * nodes[3 * stage].seconds
        now += shape.turn_loss * nodes[3 * last + 1].seconds
        for stage in reversed(range(last + 1)):
            urgency[3 * stage + 1] = now
            urgency[3 * stage + 2] = now + nodes[3 * stage + 1].seconds + shape.weight[leg[stage]] * self.interval
            now += shape.backward[leg[stage]] * nodes[3 * stage + 1].seconds
            if stage:
                now += nodes[3 * stage - 2].lag
                if leg[stage - 1] != leg[stage]:
                    now += shape.turn_backward[leg[stage]] * nodes[3 * stage + 1].seconds
        return urgency


@dataclass(frozen=True)
class Effort:
    climbs: int = 4
    """Number of starts of list scheduling on each placement."""
    rounds: int = 3
    """Rounds of annealing before the last one: 8 orders, then 4, then 2."""
    heat: float = 0.08
    """Accepted loss of a move at the start of annealing, in mean times of an op, if each op is timed 1000 times. It
    grows with the root of that number, because longer cooling allows a hotter start."""

    @classmethod
    def quick(cls, budget: float, num_ops: int) -> Effort:
        """The effort for fractions of a second. It uses no heat: logarithms may differ between machines."""
        affordable = int(_SHARE_OF_SHAPES * budget / (_LEAST_CLIMB * num_ops))
        climbs = min(max(affordable, 1), cls.climbs)
        return cls(climbs, rounds=min(climbs - 1, 1), heat=0.0)


@dataclass(frozen=True)
class Found:
    """A sound order within the limits of its problem."""

    problem: Problem
    order: tuple[int, ...]
    length: float
    """Seconds of the objective."""
    by: str


@dataclass
class Search:
    """One search over several placements, with a budget that counts ops placed and timed."""

    problems: Sequence[Problem]
    budget: float
    engine: Engine
    seed: int = 1
    effort: Effort = Effort()
    progress: Progress = report_nothing
    best: Found | None = None
    kept: list[Found] = field(default_factory=list)
    """All orders that were timed."""

    def __post_init__(self) -> None:
        self.left = self.budget
        self.random = Random(self.seed)
        self.schedulers = {problem.name: ListScheduler(problem, self.engine) for problem in self.problems}

    def run(self, seeds: Iterable[tuple[Problem, list[int], str]]) -> Found:
        """The best order found from known orders, with their names, and from list scheduling."""
        found = [self.keep(*seed) for seed in seeds]
        # With more legs, climbs find equally good orders.
        for scheduler in (each for each in self.schedulers.values() if each.legs == 1):
            known = [order for length, order in scheduler.list_around_the_first() if length < NEVER]
            found += [self.keep(scheduler.problem, order, "list scheduling") for order in known]
        waiting = sorted(self.problems, key=lambda problem: problem.lower_bound)
        for climbs in reversed(range(1, self.effort.climbs + 1)):
            budget = (self.left - (1 - _SHARE_OF_SHAPES) * self.budget) / climbs
            for problem in waiting:
                if problem.lower_bound * (1 + ROUNDING) >= self.shortest:
                    break
                order = self.shapes(self.schedulers[problem.name], budget / len(waiting))
                found.append(self.keep(problem, order, "list scheduling"))
                self.spend(0)  # reports the best so far
            # A placement that is far behind after one climb does not catch up. The others get its share.
            reached = {each.problem.name: each.length for each in sorted(self.kept, key=lambda each: -each.length)}
            waiting = [each for each in waiting if reached.get(each.name, inf) < _WORTH * self.shortest]
        return self.race(found)

    def shapes(self, scheduler: ListScheduler, budget: float) -> list[int]:
        """The best order of list scheduling: random shapes, then more and more variations of the best one."""
        problem = scheduler.problem
        budget = max(budget, _LEAST_CLIMB * problem.num_ops)
        best, begin = PriorityParams.plain(scheduler.legs), self.left
        shortest, order = scheduler.run(best)
        if shortest == NEVER:
            order = problem.list_one_by_one()
            shortest = scheduler.length(order)
        length = shortest
        while (spent := begin - self.left) < budget and length > problem.lower_bound * (1 + ROUNDING):
            fresh = spent < budget / 4 or self.random.random() < 0.1
            shape = (
                PriorityParams.random(scheduler.legs, self.random, merges=scheduler.merges)
                if fresh
                else best.vary(self.random, merges=scheduler.merges)
            )
            listed, trial = scheduler.run(shape, shortest * _PROMISING)
            self.spend(_LISTING * len(trial))
            if listed > shortest * _PROMISING:
                continue
            shortest = min(shortest, listed)
            justified, trial = scheduler.justify(trial)
            self.spend(_JUSTIFYING * len(trial))
            if justified <= length:
                best, length, order = shape, justified, trial
        return order

    def race(self, found: list[Found]) -> Found:
        """Anneal the best 8 for a while, the better half for longer, and the best one until the budget ends."""
        for rest in reversed(range(self.effort.rounds + 1)):
            worth = [
                each
                for each in found
                if each.problem.lower_bound * (1 + ROUNDING) < self.shortest and each.length < _WORTH * self.shortest
            ]
            found = sorted({each.order: each for each in worth}.values(), key=lambda each: each.length)
            found = found[: 2**rest]
            if not found or self.left <= 0:
                break
            work = self.left / (rest + 2 if rest else 1) / len(found)
            found = [self.anneal(each, work) for each in found]
        assert self.best is not None
        return self.best

    def anneal(self, start: Found, work: float) -> Found:
        problem = start.problem
        mean = sum(node.seconds for node in problem.job.nodes) / len(problem.job.nodes)
        heat = mean * min(self.effort.heat * sqrt(max(work, 1) / problem.num_ops / 1000), _MOST_HEAT)
        scheduler, seed = self.schedulers[problem.name], self.random.randrange(1, 2**31 - 1)
        _, order, done = scheduler.anneal(start.order, heat, max(int(work), 1), seed)
        self.spend(done)
        by = start.by if start.by.endswith("annealing") else f"{start.by}, annealing"
        _, order = scheduler.justify(order)
        better = self.keep(problem, order, by)
        return better if better.length < start.length else start

    @property
    def shortest(self) -> float:
        return self.best.length if self.best else inf

    def keep(self, problem: Problem, order: list[int], by: str) -> Found:
        found = Found(problem, tuple(order), self.schedulers[problem.name].length(order), by)
        self.kept.append(found)
        if found.length < self.shortest:
            self.best = found
        return found

    def spend(self, work: float) -> None:
        self.left -= work
        self.progress(min(1 - self.left / self.budget, 1.0), self.shortest)


def find_best_within(
    name: str,
    placement: Placement,
    num_microbatches: int,
    limit: float,
    costs: CostModel | None = None,
    seeds: Iterable[Schedule] = (),
) -> Schedule:
    """The best of list scheduling by kind and of `seeds`, by the synchronous step. Takes milliseconds. The shortest
    span of a rank, which is close to the period, breaks ties. Each rank may hold this `limit` of microbatches, and at
    least the memory that one microbatch needs."""
    costs = costs or CostModel.uniform(placement)
    weights = (limit * share for share in placement.sum_by_rank(costs.alike.activations))
    limits = tuple(map(max, weights, least_room(placement, costs)))
    problem = Problem("", placement, costs.alike, num_microbatches, limits)
    scheduler = ListScheduler(problem, at_hand())
    listed = [*scheduler.list_by_kind(), *scheduler.list_around_the_first()]
    listed = sorted((each for each in listed if each[0] < NEVER), key=itemgetter(0))
    # Lengths equal the simulation's up to rounding.
    orders = [order for length, order in listed if length <= listed[0][0] * (1 + 1e-6)] or [problem.list_one_by_one()]
    found = [problem.schedule(name, order) for order in orders]
    found += [replace(seed, name=name) for seed in seeds if problem.fits(seed)]
    timelines = [simulate(schedule, costs) for schedule in {each.ops: each for each in found}.values()]
    shortest = min(each.makespan for each in timelines) * (1 + ROUNDING)
    ties = [each for each in timelines if each.makespan <= shortest]
    return min(ties, key=lambda each: (each.longest_rank_span, each.makespan)).schedule
