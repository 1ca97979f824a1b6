"""Fill W into a given order of F and I: into gaps, and where memory is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from zbpipe.costs.model import ROUNDING, SENDS, CostModel
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule

Order = Sequence[Sequence[Op]]
"""The F and I of each rank, in the order in which the rank runs them."""
F, I, W, B = _KINDS = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741 -- torch's letter for the input gradient


class Filled(NamedTuple):
    """A schedule and its length in seconds, with the ideal transport."""

    seconds: float
    schedule: Schedule


class Filler:
    """Fills W into orders of F and I for one placement, number of microbatches, costs and memory limits."""

    def __init__(self, placement: Placement, microbatches: int, costs: CostModel, limits: Sequence[float]) -> None:
        stages = range(placement.num_stages)
        self.placement, self.microbatches = placement, microbatches
        self._limits = [limit * (1 + ROUNDING) for limit in limits]
        rank_of, last = placement.rank_of, placement.num_stages - 1
        known = {kind: [costs.of(stage, kind) for stage in stages] for kind in _KINDS}
        self.seconds = {kind: [each.seconds for each in row] for kind, row in known.items()}
        self.adds = {kind: [each.adds for each in row] for kind, row in known.items()}
        self.needs = {kind: [each.needs for each in row] for kind, row in known.items()}
        self._next = {
            F: [(stage + 1, F) if stage < last else (stage, I) for stage in stages],
            I: [(stage - 1, I) for stage in stages],
        }
        """Stage and kind of the op that takes the result, by kind and stage. Stage -1 is none."""
        self._transfer = {
            kind: [
                costs.transfer(rank_of[stage], rank_of[after], costs.of(stage, send).message)
                for stage, (after, _) in enumerate(row)
            ]
            for (kind, row), send in zip(self._next.items(), SENDS, strict=True)
        }

    def fill(self, order: Order, apart: int, patience: float = 0.0) -> Filled | None:
        """Run each op as soon as possible, and W where its rank would wait, or where an F or I finds no room.

        An I without room even then becomes a B. None if there is no room for an F or a B.

        Args:
            order: F and I of each rank.
            apart: number of the first and of the last microbatches that run I and W. The others run B.
            patience: the part of a W that a gap may lack. 0 fills gaps of a whole W, 1 fills every gap.

        Raises:
            ValueError: ranks would wait for each other.
        """
        ranks = [_Rank(self, row, limit, patience) for row, limit in zip(order, self._limits, strict=True)]
        whole = range(apart, self.microbatches - apart)
        arrivals = {Op(0, F, microbatch): 0.0 for microbatch in range(self.microbatches)}
        waiting = deque(range(len(ranks)))
        while waiting:
            rank = ranks[waiting.popleft()]
            while rank.left and (arrival := arrivals.pop(rank.left[-1], None)) is not None:
                stage, kind, microbatch = op = rank.left.pop()
                if not rank.run(op, B if kind is I and microbatch in whole else kind, arrival):
                    return None
                after, kind_after = self._next[kind][stage]
                if after >= 0:
                    arrivals[Op(after, kind_after, microbatch)] = rank.clock + self._transfer[kind][stage]
                    waiting.append(self.placement.rank_of[after])
        if any(rank.left for rank in ranks):
            raise ValueError("in this order of F and I, ranks wait for each other")
        for rank in ranks:
            rank.run_all_w()
        ops = tuple(tuple(rank.done) for rank in ranks)
        return Filled(max(rank.clock for rank in ranks), Schedule("", self.placement, self.microbatches, ops))


class _Rank:
    """One rank's ops so far and to come, its clock, its memory and its deferred W."""

    def __init__(self, filler: Filler, order: Sequence[Op], limit: float, patience: float) -> None:
        self._seconds, self._adds, self._needs = filler.seconds, filler.adds, filler.needs
        self._limit, self._share = limit, 1 - patience
        self._room_of_w = max(self._needs[W][op.stage] for op in order)
        self.left = list(reversed(order))
        """Remaining F and I, the next one last."""
        self.done: list[Op] = []
        self.clock = self._held = 0.0
        self._deferred: deque[Op] = deque()

    def run(self, op: Op, kind: OpKind, arrival: float) -> bool:
        """Run an op as this kind once its input has arrived, after W that fits before it; False without room."""
        stage, deferred, of_w = op.stage, self._deferred, self._seconds[W]
        while deferred and self.clock + self._share * of_w[deferred[0].stage] <= arrival * (1 + ROUNDING):
            self._run(deferred.popleft())
        while deferred and not self._has_room(stage, kind):
            self._run(deferred.popleft())
        if kind is I and not self._has_room(stage, kind):
            kind = B
        if not self._has_room(stage, kind):
            return False
        self.clock = max(self.clock, arrival)
        self._run(op if kind is op.kind else Op(stage, kind, op.microbatch))
        if kind is I:
            deferred.append(Op(stage, W, op.microbatch))
        return True

    def run_all_w(self) -> None:
        while self._deferred:
            self._run(self._deferred.popleft())

    def _has_room(self, stage: int, kind: OpKind) -> bool:
        if self._held + self._needs[kind][stage] > self._limit:
            return False
        then = self._room_of_w if kind is I or self._deferred else 0.0
        return not then or self._held + self._adds[kind][stage] + then <= self._limit

    def _run(self, op: Op) -> None:
        self.clock += self._seconds[op.kind][op.stage]
        self._held += self._adds[op.kind][op.stage]
        self.done.append(op)
