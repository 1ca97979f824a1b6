"""Passes over schedules that limit deferred gradients: W runs sooner, or a whole backward replaces I and W.

Under activation checkpointing, I keeps far more for W than F kept for I: x and dY of all layers of a stage. A whole
backward B frees them layer by layer but makes the previous stage wait, so it is only used where memory is short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from zbpipe.costs.model import ROUNDING, CostModel, highest
from zbpipe.schedule.ir import Op, OpKind, Schedule


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
        weights, stage = op._replace(kind=OpKind.W), op.stage
        alone = self._held + sum(self._costs.of(*each).adds for each in self._waiting)
        fits = alone + highest(self._costs, ((stage, OpKind.I), (stage, OpKind.W))) <= self._limit
        saves = self._costs.saved_by_b(stage) > 0
        if op.kind is OpKind.I and (fits or not saves):
            self._run(op, then=weights)
            self._waiting.append(weights)
        elif saves:
            self._run(op._replace(kind=OpKind.B))
        else:
            self._run(op._replace(kind=OpKind.I), then=weights)
            self._run(weights)

    def _run(self, op: Op, then: Op | None = None) -> None:
        """Run W as needed, then `op`, so that `op` fits, and after it any single W that is deferred or is `then`."""
        while self._waiting:
            coming = {(each.stage, each.kind) for each in ((*self._waiting, then) if then else self._waiting)}
            if self._held + max(highest(self._costs, (op[:2], each)) for each in coming) <= self._limit:
                break
            self._append(self._waiting.popleft())
        self._append(op)

    def _append(self, op: Op) -> None:
        self._held += self._costs.of(*op).adds
        self._ops.append(op)
