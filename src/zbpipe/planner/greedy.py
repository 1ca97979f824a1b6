"""Priorities for list scheduling: an urgency for each op, from a few numbers.

The urgency of an op is its start in a simple model: microbatches follow each other at a regular interval, each as a
*block* of the same shape (Pipeline Parallelism with Controllable Memory, 2405.15362, section 3). Blocks only set
priorities: list scheduling (`kernel`) keeps the ranks busy and within the limits, so every shape works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from zbpipe.planner.engine import Engine
from zbpipe.planner.kernel import NEVER, Job
from zbpipe.planner.problem import Problem


@dataclass(frozen=True)
class PriorityParams:
    """The shape of a block. A *leg* is one stage of every rank: on a V there are two, down the ranks and up again."""

    forward: tuple[float, ...]
    """Offset of each leg from a stage's F to the next stage's F, in times of that F; `backward` of the I."""
    backward: tuple[float, ...]
    turn_forward: tuple[float, ...]
    """Offset added at the end of each leg, in times of F, or before its start, in times of I (`turn_backward`)."""
    turn_backward: tuple[float, ...]
    turn_loss: tuple[float]
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
        zeros, ones = (0.0,) * legs, (1.0,) * legs
        return cls(ones, ones, zeros, zeros, (0.0,), ones, lean=zeros)

    def new(self, random: Random, *, merges: bool = False) -> PriorityParams:
        """A random shape with as many legs. It is lean if B `merges` I and W."""

        def draw(low: float, high: float, count: int) -> tuple[float, ...]:
            return tuple(random.uniform(low, high) for _ in range(count))

        offsets: dict[str, Any] = {
            name: draw(low, high, len(getattr(self, name))) for name, (low, high, _) in _OFFSETS.items()
        }
        extras: dict[str, Any] = {name: _perhaps(random, *ways) for name, (ways, _, _) in _EXTRAS.items()}
        lean = tuple(_leanness(random) if merges else 0.0 for _ in self.lean)
        return PriorityParams(**offsets, **extras, lean=lean)

    def vary(self, random: Random, *, merges: bool = False) -> PriorityParams:
        """A similar shape: about a quarter of its numbers change."""

        def near(numbers: tuple[float, ...], by: float) -> tuple[float, ...]:
            return tuple(each + random.uniform(-by, by) if random.random() < 0.25 else each for each in numbers)

        offsets: dict[str, Any] = {name: near(getattr(self, name), by) for name, (_, _, by) in _OFFSETS.items()}
        extras: dict[str, Any] = {
            name: getattr(self, name) if random.random() < stays else _perhaps(random, *ways)
            for name, (_, stays, ways) in _EXTRAS.items()
        }
        lean = tuple(_leanness(random) if merges and random.random() < 0.2 else each for each in self.lean)
        return PriorityParams(**offsets, **extras, lean=lean)


_OFFSETS = {
    "forward": (0, 4, 0.7),
    "backward": (0, 4, 0.7),
    "turn_forward": (-1, 4, 1),
    "turn_backward": (-1, 4, 1),
    "turn_loss": (-1, 6, 1),
    "weight": (0, 3, 1),
}
"""Range of the offsets of random shapes, and their largest change in similar ones. Chosen by hand."""
_EXTRAS = {
    "patience": ((0.5, 0, 1), 0.8, (0.6, 0, 1)),
    "pace": ((0.8, 0.4, 0.9), 0.8, (0.9, 0.4, 0.8)),
    "spare": ((0.3, 0, 2), 0.9, (0.5, 0, 2)),
}
"""Chance and range of the other numbers of random shapes; chance to stay in similar ones, else chance and range."""


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
        now += shape.turn_loss[0] * nodes[3 * last + 1].seconds
        for stage in reversed(range(last + 1)):
            urgency[3 * stage + 1] = now
            urgency[3 * stage + 2] = now + nodes[3 * stage + 1].seconds + shape.weight[leg[stage]] * self.interval
            now += shape.backward[leg[stage]] * nodes[3 * stage + 1].seconds
            if stage:
                now += nodes[3 * stage - 2].lag
                if leg[stage - 1] != leg[stage]:
                    now += shape.turn_backward[leg[stage]] * nodes[3 * stage + 1].seconds
        return urgency
