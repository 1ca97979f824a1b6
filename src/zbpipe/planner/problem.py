"""One placement with its costs and limits, in the flat numbers that the inner loops work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import frexp, ldexp
from typing import TypeVar

from zbpipe import bound
from zbpipe.costs import CostModel
from zbpipe.ir import Op, OpKind, Placement, Schedule
from zbpipe.planner.kernel import Job, starts
from zbpipe.simulation import simulate

T = TypeVar("T")
_KINDS = (OpKind.F, OpKind.I, OpKind.W)
_ROUNDING = 1e-9
"""Of a limit: by so much sums of activations may exceed it."""


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled, on one placement."""

    name: str
    """Of the placement."""
    placement: Placement
    costs: CostModel
    num_microbatches: int
    limits: tuple[float, ...]
    """What each rank may hold, in the unit of `costs.activations`."""
    by_span: bool = False
    """Whether to minimise the longest span of a rank, in place of the makespan."""

    @property
    def num_ops(self) -> int:
        return 3 * self.placement.num_stages * self.num_microbatches

    @cached_property
    def lower_bound(self) -> float:
        """Seconds below which no schedule can be."""
        below = bound.span_bound if self.by_span else bound.lower_bound
        return below(self.placement, self.costs, self.num_microbatches, self.limits)

    @cached_property
    def job(self) -> Job:
        """With times as multiples of a power of two, a billionth of the longest, so that sums of them are exact."""
        costs, stages = self.costs, range(self.costs.num_stages)
        rank_of, last = self.placement.rank_of, self.costs.num_stages - 1
        _, exponent = frexp(max(*costs.f, *costs.i, *costs.w))

        def exact(seconds: float) -> float:
            return ldexp(round(ldexp(seconds, 30 - exponent)), exponent - 30)

        def transfer(sender: int, receiver: int) -> float:
            return exact(costs.transfer(rank_of[sender], rank_of[receiver]))

        return Job(
            ranks=self.placement.num_ranks,
            microbatches=self.num_microbatches,
            rank=[rank_of[stage] for stage in stages for _ in _KINDS],
            feeder=_flat(
                (3 * stage - 3 if stage else -1, 3 * stage + 4 if stage < last else 3 * stage, 3 * stage + 1)
                for stage in stages
            ),
            fed=_flat(
                (3 * stage + 3 if stage < last else 3 * stage + 1, 3 * stage - 2 if stage else -1, -1)
                for stage in stages
            ),
            after=[-1] * 3 * len(stages),
            lag=_flat(
                (transfer(stage - 1, stage) if stage else 0.0, transfer(min(stage + 1, last), stage), 0.0)
                for stage in stages
            ),
            seconds=[exact(time) for times in zip(costs.f, costs.i, costs.w, strict=True) for time in times],
            takes=[costs.adds(stage, kind) for stage in stages for kind in _KINDS],
            # Room for a microbatch to go on through the rank's stages, or all ranks could fill up with microbatches of
            # which none can.
            reserve=_flat((self._to_come(stage), 0.0, 0.0) for stage in stages),
            limit=[limit * (1 + _ROUNDING) for limit in self.limits],
            origin=self._first_starts(exact, transfer) if self.by_span else [0.0] * self.placement.num_ranks,
        )

    @cached_property
    def mirrored(self) -> Job:
        """The job in reversed time: microbatches go from W and I of the first stage to its F, the last one first."""
        job = self.job
        return job._replace(
            feeder=job.fed,
            after=_flat((-1, node + 2, -1) for node in range(0, len(job.rank), 3)),
            lag=[job.lag[user] if user >= 0 else 0.0 for user in job.fed],
            fed=[-1 if node % 3 == 2 else feeder for node, feeder in enumerate(job.feeder)],
            takes=[-takes for takes in job.takes],
        )

    def schedule(self, name: str, order: Iterable[int]) -> Schedule:
        """The schedule in which every rank runs its ops in this order."""
        rows: list[list[Op]] = [[] for _ in self.limits]
        for number in order:
            node, microbatch = divmod(number, self.num_microbatches)
            stage, kind = divmod(node, 3)
            rows[self.placement.rank_of[stage]].append(Op(stage, _KINDS[kind], microbatch))
        return Schedule(name, self.placement, self.num_microbatches, tuple(map(tuple, rows)))

    def order(self, schedule: Schedule) -> list[int]:
        """The ops of a valid schedule in the order of their starts, every B as an I and a W.

        Raises:
            ValueError: the schedule is not valid.
        """
        rows = [[number for op in ops for number in self._numbers(op)] for ops in schedule]
        done: set[int] = set()
        order: list[int] = []
        position = [0] * len(rows)
        awake = list(range(len(rows)))
        while awake:
            rank = awake.pop()
            row = rows[rank]
            while position[rank] < len(row):
                number = row[position[rank]]
                node, microbatch = divmod(number, self.num_microbatches)
                feeder, user = self.job.feeder[node], self.job.fed[node]
                if feeder >= 0 and feeder * self.num_microbatches + microbatch not in done:
                    break
                done.add(number)
                order.append(number)
                position[rank] += 1
                if user >= 0 and self.job.rank[user] != rank:
                    awake.append(self.job.rank[user])
        if not len(order) == len(done) == self.num_ops:
            raise ValueError(f"schedule {schedule.name} cannot run; zbpipe.validate tells why")
        return self.in_time(order)

    def in_time(self, order: list[int]) -> list[int]:
        """The same schedule, with its ops sorted by when they start."""
        return [op for _, op in sorted(zip(starts(self.job, order), order, strict=True), key=lambda pair: pair[0])]

    def length(self, order: Iterable[int]) -> float:
        """The makespan in seconds, or the longest span of a rank if that is to be short."""
        timeline = simulate(self.schedule("", order), self.costs)
        return timeline.longest_rank_span if self.by_span else timeline.makespan

    def fits(self, schedule: Schedule) -> bool:
        """Whether no rank ever holds more than its limit, if each B runs as an I and a W."""
        takes, microbatches = self.job.takes, self.num_microbatches
        return all(
            max(accumulate(takes[number // microbatches] for op in ops for number in self._numbers(op)), default=0.0)
            <= limit
            for ops, limit in zip(schedule, self.job.limit, strict=True)
        )

    def _first_starts(self, exact: Callable[[float], float], transfer: Callable[[int, int], float]) -> list[float]:
        """By rank, when the first microbatch gets there if nothing holds it up.

        On loops and Vs every rank starts then, because its first op is the F of that microbatch. So its span is the end
        of its last op less this, and one engine minimises both times. On other placements a rank may start later, and
        its span is less than the search counts.
        """
        first: dict[int, float] = {}
        now = 0.0
        for stage, rank in enumerate(self.placement.rank_of):
            now += transfer(stage - 1, stage) if stage else 0.0
            first.setdefault(rank, now)
            now += exact(self.costs.f[stage])
        return [first[rank] for rank in sorted(first)]

    def _to_come(self, stage: int) -> float:
        """What a microbatch takes at the most after the F of this stage on its rank, if nothing there has to wait."""
        stages = self.placement.stages_on(self.placement.rank_of[stage])
        forward = [self.costs.adds(other, OpKind.F) for other in stages if other > stage]
        backward = [self.costs.adds(other, kind) for other in reversed(stages) for kind in (OpKind.I, OpKind.W)]
        return max(accumulate((*forward, *backward), initial=0.0))

    def _numbers(self, op: Op) -> list[int]:
        kinds = (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,)
        return [(3 * op.stage + _KINDS.index(kind)) * self.num_microbatches + op.microbatch for kind in kinds]


def _flat(rows: Iterable[tuple[T, ...]]) -> list[T]:
    return [each for row in rows for each in row]
