"""One placement with its costs and limits, as flat numbers for the inner loops, and schedules made to fit into limits.

Under activation checkpointing, I keeps far more for W than F kept for I: x and dY of all layers of a stage. A whole
backward B frees them layer by layer but makes the previous stage wait, so it is only used where memory is short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import frexp, inf, ldexp
from typing import Any

from zbpipe.costs.job import most_room
from zbpipe.costs.model import ROUNDING, SENDS, CostModel, OpCosts, highest
from zbpipe.planner.kernel import NEVER, Job, Node
from zbpipe.schedule.graph import CycleError
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule, new_tuple
from zbpipe.simulator import lower_bound
from zbpipe.simulator.simulation import period, simulate
from zbpipe.simulator.time_graph import longest_path

KINDS = (OpKind.F, OpKind.I, OpKind.W)


@dataclass(frozen=True)
class Problem:
    name: str
    placement: Placement
    costs: CostModel
    num_microbatches: int
    limits: tuple[float, ...]
    """Memory limit of each rank, in the unit of `costs.activations`."""
    by_period: bool = False
    """Whether to minimise the period of steps that run ahead, instead of the makespan."""
    exact: CostModel | None = None
    """The costs with FSDP's collectives and the sizes of microbatches. The search omits the former, which add time to
    both ends of a step, and takes all microbatches for alike."""

    @property
    def num_ops(self) -> int:
        return 3 * self.placement.num_stages * self.num_microbatches

    @cached_property
    def lower_bound(self) -> float:
        return self.bound(self.costs)

    @property
    def full_costs(self) -> CostModel:
        return self.exact or self.costs

    def bound(self, costs: CostModel) -> float:
        below = lower_bound.period_bound if self.by_period else lower_bound.lower_bound
        return below(self.placement, costs, self.num_microbatches, self.limits)

    @cached_property
    def merges(self) -> tuple[bool, ...]:
        """Whether B helps on each stage: it needs less of a limited memory than I and W, or less time and no more."""
        most = most_room(self.placement, self.costs, self.num_microbatches)
        return tuple(
            (self._saved(stage) > 0 and self.costs.saved_by_b(stage) >= 0)
            or (self.costs.saved_by_b(stage) > 0 and self.limits[rank] < most[rank])
            for stage, rank in enumerate(self.placement.rank_of)
        )

    def _saved(self, stage: int) -> float:
        i, w, b = (self.costs.of(stage, kind).seconds for kind in (OpKind.I, OpKind.W, OpKind.B))
        return i + w - b

    @cached_property
    def job(self) -> Job:
        """The problem as flat numbers. `feeder` and `fed` repeat the rule of `ir.inputs`, and a test compares them.
        Times are multiples of a power of two, a billionth of the longest, so their sums are exact."""
        costs, rank_of, last = self.costs, self.placement.rank_of, self.costs.num_stages - 1
        _, exponent = frexp(max(costs.of(stage, kind).seconds for stage in range(last + 1) for kind in KINDS))

        def exact(time: float) -> float:
            return ldexp(round(ldexp(time, 30 - exponent)), exponent - 30)

        def transfer(sender: int, receiver: int) -> float:
            size = costs.of(sender, SENDS[sender > receiver]).message
            return exact(costs.transfer(rank_of[sender], rank_of[receiver], size))

        def node(stage: int, cost: OpCosts, feeder: int, fed: int, lag: float, **more: Any) -> Node:
            return Node(rank_of[stage], feeder, fed, lag, exact(cost.seconds), cost.adds, cost.needs, **more)

        nodes: list[Node] = []
        for stage in range(last + 1):
            f, i, _ = range(3 * stage, 3 * stage + 3)
            of_f, of_i, of_w, of_b = (costs.of(stage, kind) for kind in (*KINDS, OpKind.B))
            # Rounded separately, as the ops that it replaces.
            whole = exact(of_i.seconds) + exact(of_w.seconds) - exact(self._saved(stage))
            full = of_b.needs if self.merges[stage] else NEVER
            # Room for one microbatch to finish on the rank, and for W after its I. Otherwise all ranks could fill up
            # with microbatches that cannot continue. A microbatch that finishes leaves enough for the next one, so it
            # may use that room, unless ops other than F take memory.
            reserve = self._to_come(stage)
            ahead = reserve if self._plain(stage) else NEVER
            of_previous, of_next = (f - 3, i - 3) if stage else (-1, -1), (f + 3, i + 3) if stage < last else (i, f)
            to_f, to_i = transfer(stage - 1, stage) if stage else 0.0, transfer(min(stage + 1, last), stage)
            nodes += [
                node(stage, of_f, of_previous[0], of_next[0], to_f, reserve=reserve, ahead=ahead),
                node(stage, of_i, of_next[1], of_previous[1], to_i, whole=whole, full=full, reserve=of_w.needs),
                node(stage, of_w, i, -1, 0.0),
            ]
        return Job(
            ranks=self.placement.num_ranks,
            microbatches=self.num_microbatches,
            merges=any(self.merges),
            nodes=nodes,
            limit=[limit * (1 + ROUNDING) for limit in self.limits],
            origin=self._first_starts(exact, transfer) if self.by_period else [0.0] * self.placement.num_ranks,
        )

    @cached_property
    def mirrored(self) -> Job:
        """The job in reversed time: microbatches go from W and I of the first stage to its F, the last one first."""
        job = self.job
        return job._replace(
            origin=[max(job.origin) - origin for origin in job.origin],
            nodes=[
                replace(
                    node,
                    feeder=node.fed,
                    after=number + 1 if number % 3 == 1 else -1,
                    lag=job.nodes[node.fed].lag if node.fed >= 0 else 0.0,
                    fed=-1 if number % 3 == 2 else node.feeder,
                    takes=-node.takes,
                    needs=node.needs - node.takes,
                    full=NEVER if node.full == NEVER else node.full - node.takes - job.nodes[number + 1].takes,
                )
                for number, node in enumerate(job.nodes)
            ],
        )

    def schedule(self, name: str, order: Iterable[int]) -> Schedule:
        rows: list[list[Op]] = [[] for _ in self.limits]
        rank_of, microbatches, num_ops = self.placement.rank_of, self.num_microbatches, self.num_ops
        for number in order:
            stage, kind = divmod(number % num_ops // microbatches, 3)
            if number < num_ops:
                rows[rank_of[stage]].append(new_tuple(Op, (stage, KINDS[kind], number % microbatches)))
            elif KINDS[kind] is OpKind.I:  # the B's W has no op of its own
                rows[rank_of[stage]].append(new_tuple(Op, (stage, OpKind.B, number % microbatches)))
        return Schedule(name, self.placement, microbatches, tuple(map(tuple, rows)))

    def order(self, schedule: Schedule) -> list[int]:
        """Ops of a valid schedule in order of their starts. A B that cannot help becomes I and W."""
        run = schedule if all(self.merges) else replace(schedule, ops=tuple(map(tuple, map(self._as_run, schedule))))
        graph = run.graph
        try:
            starts, _ = longest_path(graph, [self._seconds.get(each[:2], 0.0) for each in graph.nodes])
            ops = (graph.nodes[each] for each in sorted(graph.order, key=starts.__getitem__))
            order = [number for op in ops if isinstance(op, Op) for number in self._numbers(op)]
        except CycleError:
            order = []
        if not len(order) == len(set(order)) == self.num_ops:
            raise ValueError(f"schedule {schedule.name} cannot run; zbpipe.validate lists the findings")
        return order

    def list_one_by_one(self) -> list[int]:
        """An order that fits whenever any does: one microbatch after the other."""
        stages, microbatches = range(self.placement.num_stages), range(self.num_microbatches)
        backward = [(stage, kind) for stage in reversed(stages) for kind in self._backward(stage)]
        one = [*((stage, OpKind.F) for stage in stages), *backward]
        ops = (Op(*each, microbatch) for microbatch in microbatches for each in one)
        return [number for op in ops for number in self._numbers(op)]

    @cached_property
    def _seconds(self) -> dict[tuple[int, str], float]:
        """The job's seconds of ops and messages, by stage and kind."""
        found = dict[tuple[int, str], float]()
        for number, node in enumerate(self.job.nodes):
            stage, kind = divmod(number, 3)
            found[stage, KINDS[kind]] = node.seconds
            if kind < 2:
                found[stage + 2 * kind - 1, SENDS[kind]] = node.lag
                found[stage, OpKind.B] = node.whole
        return found

    def length(self, order: Iterable[int]) -> float:
        """Seconds of the objective: makespan or period; at most the length in the inner loops."""
        schedule = self.schedule("", order)
        return period(schedule, self.costs) if self.by_period else simulate(schedule, self.costs).makespan

    def fits(self, schedule: Schedule) -> bool:
        """Whether all ranks keep their limits if I and W replace each B that saves no memory."""
        rows = zip(schedule, self.job.limit, strict=True)
        return all(highest(self.costs, self._as_run(ops)) <= limit for ops, limit in rows)

    def _first_starts(self, exact: Callable[[float], float], transfer: Callable[[int, int], float]) -> list[float]:
        """Arrival of the first microbatch on each rank if nothing delays it. The inner loops count from then on, so
        that an order can repeat at intervals of its length."""
        first: dict[int, float] = {}
        now = 0.0
        for stage, rank in enumerate(self.placement.rank_of):
            now += transfer(stage - 1, stage) if stage else 0.0
            first.setdefault(rank, now)
            now += exact(self.costs.of(stage, OpKind.F).seconds)
        return [first[rank] for rank in sorted(first)]

    def _to_come(self, stage: int) -> float:
        """Largest memory that a microbatch needs on its rank after this stage's F, if nothing there waits."""
        stages = self.placement.stages_on(self.placement.rank_of[stage])
        forward = [(other, OpKind.F) for other in stages if other > stage]
        backward = [(other, kind) for other in reversed(stages) for kind in self._backward(other)]
        return highest(self.costs, (*forward, *backward))

    def _plain(self, stage: int) -> bool:
        """Whether only F add memory on its rank, and no op needs working memory beyond that."""
        own, costs = self.placement.stages_on(self.placement.rank_of[stage]), self.costs
        return all(
            costs.of(each, kind).needs <= (costs.of(each, kind).adds if kind is OpKind.F else 0.0)
            for each in own
            for kind in KINDS
        )

    def _backward(self, stage: int) -> tuple[OpKind, ...]:
        return self.costs.least_backward(stage) if self.merges[stage] else (OpKind.I, OpKind.W)

    def _as_run(self, ops: Iterable[Op]) -> Iterator[Op]:
        """The ops, with I and W for each B that saves no memory."""
        for op in ops:
            if op.kind is OpKind.B and not self.merges[op.stage]:
                yield op._replace(kind=OpKind.I)
                yield op._replace(kind=OpKind.W)
            else:
                yield op

    def _numbers(self, op: Op) -> tuple[int, ...]:
        """An op's numbers in an order. A B has those of its I and W, marked."""
        if op.kind is not OpKind.B:
            return ((3 * op.stage + KINDS.index(op.kind)) * self.num_microbatches + op.microbatch,)
        first = self.num_ops + (3 * op.stage + 1) * self.num_microbatches + op.microbatch
        return first, first + self.num_microbatches


def make_leanest(schedule: Schedule, costs: CostModel) -> Schedule:
    """The form of `schedule` with the least memory: all backwards whole, or I with its W right after it.

        >>> costs = CostModel((1,), (1,), (1,), activations=(1,), freed_by_i=-4)
        >>> print(make_leanest(Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1"), costs))
        rank 0: 0F0 0F1 0B0 0B1

    The order of its F, and of its I and B, stays unchanged. Copies to the host and back are omitted.
    """
    return fit_within(schedule, costs, [-inf] * schedule.num_ranks)


def fit_within(schedule: Schedule, costs: CostModel, limits: Sequence[float]) -> Schedule:
    """`schedule` with every W in its place, or earlier where deferred gradients do not fit.

    Where I does not fit even after all deferred W, B replaces I and W. So the result keeps the limits if
    `make_leanest(schedule, costs)` does.

        >>> costs = CostModel((1,), (1,), (1,), activations=(1,), freed_by_i=-1)
        >>> some = Schedule.from_csv("0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2")
        >>> print(fit_within(some, costs, limits=[4]))
        rank 0: 0F0 0F1 0F2 0I0 0W0 0I1 0I2 0W1 0W2
        >>> print(fit_within(some, costs, limits=[3]))
        rank 0: 0F0 0F1 0F2 0B0 0I1 0W1 0I2 0W2

    The order of its F, and of its I and B, stays unchanged. Copies to the host and back are omitted.
    """
    rows = (_Row(costs, limit * (1 + ROUNDING)) for limit in limits)
    return replace(schedule, ops=tuple(row.fit(ops) for row, ops in zip(rows, schedule, strict=True)))


class _Row:
    def __init__(self, costs: CostModel, limit: float) -> None:
        self._costs, self._limit = costs, limit
        self._saved_by_b = cache(costs.saved_by_b)
        self._split = cache(lambda stage: highest(costs, ((stage, OpKind.I), (stage, OpKind.W))))
        self._ops: list[Op] = []
        self._held = 0.0
        self._waiting: deque[Op] = deque()
        """Deferred W in the order of their I."""

    def fit(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        for op in ops:
            match op.kind:
                case OpKind.F:
                    self._run(op)
                case OpKind.W if op in self._waiting:
                    self._waiting.remove(op)
                    self._run(op)
                case OpKind.I | OpKind.B:
                    self._run_backward(op)
        return tuple(self._ops)

    def _run_backward(self, op: Op) -> None:
        stage, kind, microbatch = op
        weights, saves = new_tuple(Op, (stage, OpKind.W, microbatch)), self._saved_by_b(stage) > 0
        adds = (self._costs.of(*each).adds for each in self._waiting)
        if kind is OpKind.I and (not saves or self._held + sum(adds) + self._split(stage) <= self._limit):
            self._run(op, then=weights)
            self._waiting.append(weights)
        elif saves:
            self._run(new_tuple(Op, (stage, OpKind.B, microbatch)))
        else:
            self._run(new_tuple(Op, (stage, OpKind.I, microbatch)), then=weights)
            self._run(weights)

    def _run(self, op: Op, then: Op | None = None) -> None:
        """Run W as needed, then `op`, so that `op` fits, and after it any single W that is deferred or is `then`."""
        cost = self._costs.of(*op[:2])
        while self._waiting:
            coming = {each.stage for each in ((*self._waiting, then) if then else self._waiting)}
            most = max(self._costs.of(stage, OpKind.W).needs for stage in coming)
            if self._held + max(cost.needs, cost.adds + most) <= self._limit:
                break
            self._append(self._waiting.popleft())
        self._append(op)

    def _append(self, op: Op) -> None:
        self._held += self._costs.of(*op).adds
        self._ops.append(op)
