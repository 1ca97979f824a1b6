"""List scheduling: a clock runs, and a rank that is free takes the most urgent op that is ready and fits into memory.

The idea of the searched schedules of the zero-bubble paper (2401.10241, section 3.1): I first, because the rank before
waits for it, then F as far as memory allows, and W where nothing else is ready or memory is full.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from zbpipe.costs import CostModel
from zbpipe.ir import Op, OpKind, Placement, Schedule


@dataclass(frozen=True)
class Policy:
    """What a rank prefers when several ops are ready."""

    patience: float = 0.0
    """Rather than start a W, wait for an F or I that is on its way and arrives within this share of the W's time."""
    weights_before_forwards: bool = False
    """Whether W comes before F in the steady state."""
    forward_first: bool = False
    """Whether F comes before I."""


def list_schedule(
    name: str,
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    limits: tuple[float, ...],
    policy: Policy,
) -> Schedule:
    """A schedule in which no rank ever holds more activations than its limit.

    Args:
        name: of the schedule.
        placement: where the stages are.
        num_microbatches: from 1 on.
        costs: for the placement's stages.
        limits: by rank, in the unit of `costs.activations`; at least what one microbatch takes on the rank.
        policy: what to prefer.
    """
    return _Run(placement, num_microbatches, costs, limits, policy).schedule(name)


class _Run:
    """The state of all ranks while the clock runs."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: CostModel,
        limits: tuple[float, ...],
        policy: Policy,
    ) -> None:
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.costs = costs
        self.policy = policy
        self.free = list(limits)
        self.ops: list[list[Op]] = [[] for _ in limits]
        # Per stage the ops whose inputs have arrived or are on their way: (arrival, microbatch), in order.
        self.forwards: list[deque[tuple[float, int]]] = [deque() for _ in placement.rank_of]
        self.inputs: list[deque[tuple[float, int]]] = [deque() for _ in placement.rank_of]
        self.weights: list[deque[int]] = [deque() for _ in placement.rank_of]
        self.forwards[0].extend((0.0, microbatch) for microbatch in range(num_microbatches))
        # What has to stay free on a rank when a stage takes a microbatch: room for one to go on through the rank's
        # later stages, or all ranks could fill up with microbatches of which none can.
        self.reserve = [
            sum(costs.activations[later] for later in placement.stages_on(rank) if later > stage)
            for stage, rank in enumerate(placement.rank_of)
        ]

    def schedule(self, name: str) -> Schedule:
        """Run the clock until every op has run."""
        total = 3 * self.num_microbatches
        todo = [total * len(self.placement.stages_on(rank)) for rank in range(len(self.ops))]
        # (when a rank may act again, rank); a rank can stand in the queue several times, which does no harm.
        queue = [(0.0, rank) for rank in range(len(self.ops))]
        busy_until = [0.0] * len(self.ops)
        while queue:
            now, rank = heapq.heappop(queue)
            if now < busy_until[rank] or not todo[rank]:
                continue
            op, wake = self.choose(rank, now)
            if op is None:
                if wake is not None:
                    heapq.heappush(queue, (wake, rank))
                continue
            end = now + self.costs.seconds(op.stage, op.kind)
            busy_until[rank] = end
            todo[rank] -= 1
            self.ops[rank].append(op)
            heapq.heappush(queue, (end, rank))
            for arrival, receiver in self.run(op, rank, end):
                heapq.heappush(queue, (max(arrival, busy_until[receiver]), receiver))
        assert not any(todo), f"list scheduling got stuck: {self.ops}"
        return Schedule(name, self.placement, self.num_microbatches, tuple(map(tuple, self.ops)))

    def choose(self, rank: int, now: float) -> tuple[Op | None, float | None]:
        """The op to start now, or when to look again (None: when something arrives)."""
        ready: list[tuple[tuple[float, ...], Op]] = []
        coming: list[float] = []
        waiting: list[Op] = []
        forward_rank, input_rank = (0.0, 1.0) if self.policy.forward_first else (1.0, 0.0)
        for stage in self.placement.stages_on(rank):
            if self.inputs[stage]:
                arrival, microbatch = self.inputs[stage][0]
                if arrival <= now:
                    ready.append(((input_rank, microbatch, -stage), Op(stage, OpKind.I, microbatch)))
                else:
                    coming.append(arrival)
            if self.forwards[stage] and self.fits(rank, stage):
                arrival, microbatch = self.forwards[stage][0]
                if arrival <= now:
                    ready.append(((forward_rank, -stage, microbatch), Op(stage, OpKind.F, microbatch)))
                else:
                    coming.append(arrival)
            if self.weights[stage]:
                waiting.append(Op(stage, OpKind.W, self.weights[stage][0]))
        urgent = min(ready)[1] if ready else None
        weight = min(waiting, key=lambda op: (op.microbatch, -op.stage)) if waiting else None
        if urgent is not None and not (
            weight is not None and self.policy.weights_before_forwards and urgent.kind is OpKind.F
        ):
            return urgent, None
        if weight is not None:
            wake = min(coming, default=None)
            if wake is not None and wake - now < self.policy.patience * self.costs.w[weight.stage] and urgent is None:
                return None, wake
            return weight, None
        return urgent, min(coming, default=None)

    def fits(self, rank: int, stage: int) -> bool:
        return self.costs.activations[stage] + self.reserve[stage] <= self.free[rank] + 1e-9

    def run(self, op: Op, rank: int, end: float) -> list[tuple[float, int]]:
        """Account for `op`, and tell which ranks get something from it, and when."""
        stage, kind, microbatch = op
        last = self.placement.num_stages - 1
        size = self.costs.activations[stage]
        if kind is OpKind.W:
            self.weights[stage].popleft()
            self.free[rank] += size * (1 - self.costs.freed_by_i)
            return []
        if kind is OpKind.F:
            self.forwards[stage].popleft()
            self.free[rank] -= size
            return [
                self.send(self.forwards if stage < last else self.inputs, stage, min(stage + 1, last), end, microbatch)
            ]
        self.inputs[stage].popleft()
        self.free[rank] += size * self.costs.freed_by_i
        self.weights[stage].append(microbatch)
        return [self.send(self.inputs, stage, stage - 1, end, microbatch)] if stage else []

    def send(
        self, queues: list[deque[tuple[float, int]]], stage: int, to: int, end: float, microbatch: int
    ) -> tuple[float, int]:
        receiver = self.placement.rank_of[to]
        arrival = end + self.costs.transfer(self.placement.rank_of[stage], receiver)
        queues[to].append((arrival, microbatch))
        return arrival, receiver
