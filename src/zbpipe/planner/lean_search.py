"""List scheduling in which a rank chooses between I and a whole backward B by the room that it has.

`kernel` schedules I and W, for any costs. Here each rank takes what is most urgent of what is ready. If that is a
backward, it runs I if there is room for what waits for W then, and else B. If the room is taken by what waits
already, the rank runs W first. How urgent ops are, and how fast microbatches enter, is a matter of a few numbers
(`Habits`), of which some hundred combinations are tried: that takes a part of a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import NamedTuple

from zbpipe.bound import lower_bound
from zbpipe.costs import ROUNDING, CostModel, highest
from zbpipe.ir import COMPUTATIONS, Op, OpKind, Placement, Schedule
from zbpipe.simulation import simulate

F, I, W, B = COMPUTATIONS  # noqa: E741

_WORK = 30_000
"""Ops placed in one search: some 0.15 seconds."""
_FEWEST = 10
"""Habits that are tried however many ops there are."""
_MOST = 400
"""Habits that are tried however few ops there are: small jobs need no more, and their users ask for many."""
_CLOSE = 1.03
"""Habits with waits are simulated if they are at most so much longer than the best: without the waits they may be
shorter."""
_FINALISTS = 3
"""Habits that are tried with all microbatches, if fewer were enough to compare them."""


@dataclass(frozen=True)
class Habits:
    """What a rank goes by.

    The urgency of an op is when it would start if microbatches followed each other at a regular interval, all alike, as
    in Pipeline Parallelism with Controllable Memory (arXiv 2405.15362, section 3). A *leg* is one stage of every rank.
    """

    forward: tuple[float, ...]
    """By leg: from the F of a stage to the F of the next, in times of that F."""
    backward: tuple[float, ...]
    """By leg: from the I of a stage to the I of the one before, in times of that I."""
    turn_forward: float = 0.0
    """What is added from leg to leg, in times of F."""
    turn_loss: float = 0.0
    """From the last F to the first I, in times of that I."""
    turn_backward: float = 0.0
    """What is added from leg to leg, in times of I."""
    weight: float = 1.0
    """From the end of I to W, in intervals."""
    interval: float = 1.0
    """Between microbatches, in times of a rank's work on one."""
    pace: float = 0.0
    """Between microbatches that enter the first stage, in the same unit."""
    patience: float = 0.0
    """How long a rank waits for an op that is more urgent, in times of a W."""
    spare: float = 0.0
    """What I leaves free of a rank's limit, as a share of it, while F are to come. With 1 all backwards are whole."""

    @classmethod
    def usual(cls, legs: int) -> list[Habits]:
        """The first to try: by pace, which decides most where memory is short."""
        plain = cls((1.0,) * legs, (1.0,) * legs)
        paced = [replace(plain, pace=pace) for pace in (0.0, 1.0, 0.85, 1.15, 1.3, 1.5)]
        return [replace(each, spare=spare) for each in paced for spare in (0.0, 1.0)]

    @classmethod
    def random(cls, legs: int, random: Random) -> Habits:
        """Any that may be good; the ranges were chosen by hand, not tuned."""

        def draw() -> tuple[float, ...]:
            return tuple(random.uniform(0, 4) for _ in range(legs))

        return cls(
            draw(),
            draw(),
            turn_forward=random.uniform(-1, 4),
            turn_loss=random.uniform(-1, 6),
            turn_backward=random.uniform(-1, 4),
            weight=random.uniform(0, 3),
            interval=random.choice((1.0, 1.0, 0.8, 1.3)),
            pace=random.choice((0.0, random.uniform(0.7, 1.6))),
            patience=random.choice((0.0, 0.0, random.uniform(0, 1))),
            spare=random.choice((0.0, 0.0, 0.2, 1.0)),
        )

    def vary(self, random: Random) -> Habits:
        """Habits like these."""

        def near(number: float, by: float, chance: float = 0.5) -> float:
            # No normal distribution: its logarithms could differ between machines.
            return number + by * random.uniform(-2, 2) if random.random() < chance else number

        pace = near(self.pace, 0.08) if self.pace and random.random() < 0.8 else random.uniform(0.7, 1.6)
        return Habits(
            tuple(near(each, 0.5) for each in self.forward),
            tuple(near(each, 0.5) for each in self.backward),
            turn_forward=near(self.turn_forward, 0.6),
            turn_loss=near(self.turn_loss, 0.7),
            turn_backward=near(self.turn_backward, 0.6),
            weight=near(self.weight, 0.5),
            interval=max(near(self.interval, 0.2, 0.15), 0.0),
            pace=random.choice((self.pace, self.pace, max(pace, 0.0), 0.0)),
            patience=random.choice((self.patience, self.patience, self.patience, 0.0, random.uniform(0, 1))),
            spare=random.choice((self.spare, self.spare, self.spare, 0.0, 0.2, 1.0)),
        )


def found(
    name: str, placement: Placement, num_microbatches: int, costs: CostModel, limits: Sequence[float]
) -> Schedule | None:
    """The shortest schedule that list scheduling finds within the limits; None if there is none.

        >>> placement = Placement.v(2)
        >>> print(found("mine", placement, 2, CostModel.uniform(placement), limits=[2, 2]))
        rank 0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 0W0 3W1 0W1
        rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1

    Args:
        name: of the result.
        placement: where the stages are.
        num_microbatches: from 1 on.
        costs: of the placement's stages.
        limits: what each rank may hold, in the unit of `costs.activations`.
    """
    # What is good for twice as many microbatches as it takes to fill the pipeline is good for more.
    some = min(num_microbatches, 2 * placement.num_ranks + 8)
    search = _Search(name, placement, some, costs, limits)
    search.run()
    best = search.best[:_FINALISTS]
    if some < num_microbatches:
        search = _Search(name, placement, num_microbatches, costs, limits)
        for each in best:
            search.attempt(each.habits)
    return search.best[0].schedule if search.best else None


@dataclass(frozen=True)
class _Found:
    length: float
    habits: Habits
    schedule: Schedule


class _Search:
    """Usual habits first, then random ones, then more and more that are like the best."""

    def __init__(
        self, name: str, placement: Placement, num_microbatches: int, costs: CostModel, limits: Sequence[float]
    ) -> None:
        self._empty = Schedule(name, placement, num_microbatches, ((),) * placement.num_ranks)
        self._costs = costs
        self._scheduler = ListScheduler(placement, num_microbatches, costs, limits)
        self._bound = lower_bound(placement, costs, num_microbatches) * (1 + ROUNDING)
        self._legs = max(len(placement.stages_on(rank)) for rank in range(placement.num_ranks))
        self._random = Random(1)
        self._tried = 0
        self._work = 0
        self.best: list[_Found] = []
        """Each better than those behind it."""

    def run(self) -> None:
        for habits in Habits.usual(self._legs):
            if not self._goes_on():
                return
            self.attempt(habits)
        while self._goes_on():
            fresh = self._random.random() < (0.5 if self._spent() < 0.5 else 0.05)
            known = None if fresh or not self.best else self.best[0].habits
            self.attempt(known.vary(self._random) if known else Habits.random(self._legs, self._random))

    def _goes_on(self) -> bool:
        if self.best and self.best[0].length <= self._bound:
            return False
        return self._tried < _FEWEST or self._spent() < 1

    def _spent(self) -> float:
        """The share of the work that is done."""
        return max(self._work / _WORK, self._tried / _MOST)

    def attempt(self, habits: Habits) -> None:
        shortest = self.best[0].length if self.best else inf
        close = _CLOSE if habits.pace or habits.patience else 1.0
        length, rows = self._scheduler.run(habits, cutoff=shortest * close)
        self._tried += 1
        self._work += 20 + sum(map(len, rows))
        if length == inf:
            return
        schedule = replace(self._empty, ops=rows)
        length = simulate(schedule, self._costs).makespan
        if length < shortest:
            self.best.insert(0, _Found(length, habits, schedule))


class ListScheduler:
    """List scheduling of one job: what does not depend on habits."""

    def __init__(self, placement: Placement, num_microbatches: int, costs: CostModel, limits: Sequence[float]) -> None:
        stages, ranks = range(placement.num_stages), range(placement.num_ranks)
        self.placement, self.num_microbatches = placement, num_microbatches
        self.stages_on = [placement.stages_on(rank) for rank in ranks]
        self.leg = [self.stages_on[rank].index(stage) for stage, rank in enumerate(placement.rank_of)]
        self.seconds = {kind: [costs.seconds(stage, kind) for stage in stages] for kind in COMPUTATIONS}
        self.adds = {kind: [costs.adds(stage, kind) for stage in stages] for kind in COMPUTATIONS}
        self.needs = {kind: [costs.needs(stage, kind) for stage in stages] for kind in COMPUTATIONS}
        self.least: list[tuple[OpKind, ...]] = [costs.least_backward(stage) for stage in stages]
        self.whole = [kinds == (B,) for kinds in self.least]
        transfers = [costs.transfer(*placement.rank_of[stage : stage + 2]) for stage in stages[:-1]]
        self.lag_forward = [*transfers, 0.0]
        """To the next stage."""
        back = [costs.transfer(placement.rank_of[stage], placement.rank_of[stage - 1]) for stage in stages[1:]]
        self.lag_backward = [0.0, *back]
        """To the stage before."""
        rests = [[self._rest_of_way(stages, place) for place in range(2 * len(stages))] for stages in self.stages_on]
        self.to_come = [[highest(costs, rest) for rest in row] for row in rests]
        """By rank and place on a microbatch's way over it: the most that the rest of the way takes, at its leanest."""
        self.held = [[-sum(self.adds[kind][stage] for stage, kind in rest) for rest in row] for row in rests]
        """What the microbatch holds there."""
        self.limits = [max(limit, way[0]) * (1 + ROUNDING) for limit, way in zip(limits, self.to_come, strict=True)]
        """At least what one microbatch takes."""
        self.interval = max(
            sum(self.seconds[F][stage] + self.seconds[B][stage] for stage in stages) for stages in self.stages_on
        )

    def _rest_of_way(self, stages: Sequence[int], place: int) -> list[tuple[int, OpKind]]:
        """F of each stage, then the leanest backwards, without the first `place` of these."""
        way = [(stage, (F,)) for stage in stages] + [(stage, self.least[stage]) for stage in reversed(stages)]
        return [(stage, kind) for stage, kinds in way[place:] for kind in kinds]

    def run(self, habits: Habits, cutoff: float = inf) -> tuple[float, tuple[tuple[Op, ...], ...]]:
        """The length and the lists of the ranks; infinity if it comes to `cutoff`, or cannot go on."""
        return _Run(self, habits).run(cutoff)

    def urgency(self, habits: Habits) -> dict[OpKind, list[float]]:
        """By kind and stage, for the first microbatch; F has a row, I and B share one, and W has one."""
        last = len(self.leg) - 1
        forward, backward, weight = [0.0] * (last + 1), [0.0] * (last + 1), [0.0] * (last + 1)
        now = 0.0
        for stage, leg in enumerate(self.leg):
            forward[stage] = now
            turns = habits.turn_forward if stage < last and self.leg[stage + 1] != leg else 0.0
            now += (habits.forward[leg] + turns) * self.seconds[F][stage] + self.lag_forward[stage]
        now += habits.turn_loss * self.seconds[I][last]
        for stage in reversed(range(last + 1)):
            leg, seconds = self.leg[stage], self.seconds[I][stage]
            backward[stage] = now
            weight[stage] = now + seconds + habits.weight * self.interval
            turns = habits.turn_backward if stage and self.leg[stage - 1] != leg else 0.0
            now += (habits.backward[leg] + turns) * seconds + self.lag_backward[stage]
        return {F: forward, I: backward, W: weight}


class _Choice(NamedTuple):
    """An op that a rank may run."""

    urgency: float
    stage: int
    kind: OpKind
    arrival: float
    """When its input is there: at most the rank's patience from now."""
    fits: bool
    """Now; else once the W that wait are done."""


class _Run:
    """A clock runs, and a rank that is free takes the most urgent op that is ready and has room.

    No rank can fill up with microbatches that cannot go on: a rank runs F and I only if there is room after it for all
    its microbatches to come to their end one after the other, the oldest first, at their leanest.
    """

    def __init__(self, job: ListScheduler, habits: Habits) -> None:
        stages, ranks = range(len(job.leg)), range(len(job.stages_on))
        self._job, self._habits = job, habits
        self._urgency = job.urgency(habits)
        self._interval = habits.interval * job.interval
        self._patience = habits.patience * max(job.seconds[W])
        entering = [habits.pace * job.interval * microbatch for microbatch in range(job.num_microbatches)]
        self._arrived: dict[OpKind, list[list[float]]] = {
            F: [entering if stage == 0 else [] for stage in stages],
            I: [[] for _ in stages],
        }
        """By stage, when the input of each microbatch is there; I stands for I and B."""
        self._ran: dict[OpKind, list[int]] = {F: [0 for _ in stages], I: [0 for _ in stages]}
        self._waiting: list[deque[int]] = [deque() for _ in stages]
        """By stage the microbatches that wait for W."""
        self._held, self._waits = [0.0 for _ in ranks], [0.0 for _ in ranks]
        """By rank all that it holds, and the part of it that waits for W."""
        self._passed = [[0] * (2 * len(stages)) for stages in job.stages_on]
        """By rank and place on the way of microbatches over it, how many have passed."""
        self._rows: list[list[Op]] = [[] for _ in ranks]
        self._busy = [0.0 for _ in ranks]
        self._work = [
            job.num_microbatches * sum(job.seconds[F][stage] + job.seconds[B][stage] for stage in stages)
            for stages in job.stages_on
        ]
        """Seconds that each rank has left."""
        self._wake = [0.0 for _ in ranks]
        self._agenda = [(0.0, rank) for rank in ranks]

    def run(self, cutoff: float) -> tuple[float, tuple[tuple[Op, ...], ...]]:
        """See `ListScheduler.run`."""
        while self._agenda:
            now, rank = heappop(self._agenda)
            if now != self._wake[rank]:
                continue  # it has been woken sooner
            self._wake[rank] = inf
            if now + self._work[rank] >= cutoff:
                return inf, tuple(map(tuple, self._rows))
            choice, later = self._choose(rank, now)
            if choice is None:
                self._wake_at(rank, later)
            elif choice.arrival > now:
                self._wake_at(rank, choice.arrival)
            else:
                self._start(rank, now, choice)
        done = all(ran == self._job.num_microbatches for ran in self._ran[I]) and not any(self._waiting)
        return max(self._busy) if done else inf, tuple(map(tuple, self._rows))

    def _wake_at(self, rank: int, time: float) -> None:
        if time < self._wake[rank]:
            self._wake[rank] = time
            heappush(self._agenda, (time, rank))

    def _choose(self, rank: int, now: float) -> tuple[_Choice | None, float]:
        """What to run, and when to look again if that is nothing."""
        best, later = None, inf
        for stage in self._job.stages_on[rank]:
            for kind in (F, I):
                microbatch, arrived = self._ran[kind][stage], self._arrived[kind][stage]
                if microbatch >= len(arrived):
                    continue
                arrival = arrived[microbatch]
                if arrival - self._patience > now:
                    later = min(later, arrival - self._patience)
                    continue
                urgency = self._urgency[kind][stage] + self._interval * microbatch
                if best is None or urgency < best.urgency:
                    able = self._forward(rank, stage) if kind is F else self._backward(rank, stage)
                    if able is not None:
                        best = _Choice(urgency, stage, able[0], arrival, able[1])
        return self._weight_instead(rank, now, best) or best, later

    def _weight_instead(self, rank: int, now: float, best: _Choice | None) -> _Choice | None:
        """A W, if it makes room, fills idle time, or is more urgent."""
        waiting = [
            (self._urgency[W][stage] + self._interval * self._waiting[stage][0], stage)
            for stage in self._job.stages_on[rank]
            if self._waiting[stage]
        ]
        if not waiting:
            return None
        urgency, stage = min(waiting)
        weight = _Choice(urgency, stage, W, now, True)
        if best is None or not best.fits or urgency < best.urgency:
            return weight
        return weight if best.arrival >= now + self._job.seconds[W][stage] / 2 else None

    def _forward(self, rank: int, stage: int) -> tuple[OpKind, bool] | None:
        """F, and whether it fits now; None if it does not even without what waits."""
        job = self._job
        needs, adds = job.needs[F][stage], job.adds[F][stage]
        active = self._held[rank] - self._waits[rank]
        if active + needs > job.limits[rank] or not self._can_end(rank, job.leg[stage], active + adds):
            return None
        return F, self._fits(rank, needs, self._held[rank] + adds)

    def _backward(self, rank: int, stage: int) -> tuple[OpKind, bool] | None:
        """I if it fits now, and leaves free what it should; else what is leanest, as `_forward`."""
        job, limit = self._job, self._job.limits[rank]
        held, needs = self._held[rank], job.needs[I][stage]
        active, place = held - self._waits[rank], len(self._passed[rank]) - 1 - job.leg[stage]
        if not self._can_end(rank, place, active + job.adds[B][stage]):
            return None
        after = held + job.adds[I][stage]
        more_to_come = self._ran[F][job.stages_on[rank][0]] < job.num_microbatches
        spare = self._habits.spare * limit if more_to_come else 0.0
        own = job.needs[W][stage]
        if after + max(spare, own) <= limit and self._fits(rank, needs, after):
            return I, True
        if job.whole[stage]:
            needs = job.needs[B][stage]
            return (B, held + needs <= limit) if active + needs <= limit else None
        if active + max(needs, job.adds[I][stage] + own) > limit:
            return None
        return I, after + own <= limit and self._fits(rank, needs, after)

    def _fits(self, rank: int, needs: float, after: float) -> bool:
        """Whether there is room for an op, and after it for any W that waits already."""
        job, limit = self._job, self._job.limits[rank]
        if self._held[rank] + needs > limit:
            return False
        return all(after + job.needs[W][stage] <= limit for stage in job.stages_on[rank] if self._waiting[stage])

    def _can_end(self, rank: int, place: int, active: float) -> bool:
        """Whether the microbatches could still end one by one if one more had passed `place`; `active` is held then."""
        limit, passed = self._job.limits[rank], self._passed[rank]
        to_come, held = self._job.to_come[rank], self._job.held[rank]
        for here in range(len(passed) - 1, 0, -1):
            number = passed[here - 1] - passed[here] + (here - 1 == place) - (here == place)
            if number:
                if active + to_come[here] > limit:
                    return False
                active -= number * held[here]
        return True

    def _start(self, rank: int, now: float, choice: _Choice) -> None:
        job, stage, kind = self._job, choice.stage, choice.kind
        end = now + job.seconds[kind][stage]
        if kind is W:
            microbatch = self._waiting[stage].popleft()
            self._waits[rank] += job.adds[W][stage]
            if not any(self._waiting[each] for each in job.stages_on[rank]):
                self._waits[rank] = 0.0
        else:
            way = F if kind is F else I
            microbatch = self._ran[way][stage]
            self._ran[way][stage] += 1
            leg = job.leg[stage]
            self._passed[rank][leg if kind is F else len(self._passed[rank]) - 1 - leg] += 1
            self._hand_on(way, stage, end)
        if kind is I:
            self._waiting[stage].append(microbatch)
            self._waits[rank] -= job.adds[W][stage]
        self._held[rank] += job.adds[kind][stage]
        self._rows[rank].append(Op(stage, kind, microbatch))
        self._work[rank] -= job.seconds[kind][stage]
        self._busy[rank] = end
        self._wake_at(rank, end)

    def _hand_on(self, way: OpKind, stage: int, end: float) -> None:
        """Give the result to the next stage, and wake its rank."""
        job, last = self._job, len(self._job.leg) - 1
        if way is F:
            taker, taken, arrival = (stage + 1, F, end + job.lag_forward[stage]) if stage < last else (stage, I, end)
        elif stage:
            taker, taken, arrival = stage - 1, I, end + job.lag_backward[stage]
        else:
            return
        self._arrived[taken][taker].append(arrival)
        rank = job.placement.rank_of[taker]
        self._wake_at(rank, max(arrival - self._patience, self._busy[rank]))
