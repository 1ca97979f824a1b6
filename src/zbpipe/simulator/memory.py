"""Peak memory of each rank with its messages, which `Timeline.peak_memory` omits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zbpipe.costs.model import CostModel, Receives
from zbpipe.schedule.ir import Op, OpKind
from zbpipe.simulator.actions import COMPUTE, Action, Rows, op_of
from zbpipe.simulator.passes import add_messages, add_waits, free_sends_early, messages_held, place_receives
from zbpipe.simulator.timeline import Timeline


def peak_bytes(timeline: Timeline, rows: Rows | None = None) -> tuple[float, ...]:
    """Peak memory of each rank in a step, including messages, for comparison with a GPU's memory.

        >>> costs = CostModel((1, 1), (1, 1), (1, 1), activations=(3e9, 1e9), message_bytes=1e8)
        >>> timeline = zbpipe.simulate(zbpipe.generate("1F1B", 2, 4), costs)
        >>> timeline.peak_memory, peak_bytes(timeline)
        ((6000000000.0, 1000000000.0), (6300000000.0, 1200000000.0))

    The timeline has costs in bytes, including `message_bytes`. An op's costs include its input. `rows` are the lists
    with messages and waits; default: those of zbpipe's schedules. With offloading the result is an upper bound.
    """
    return tuple(held.total for held in peak_parts(timeline, rows))


@dataclass(frozen=True)
class Held:
    """Memory of a rank at its peak, by part, in the unit of the costs' activations."""

    activations: float = 0.0
    waiting: float = 0.0
    """Deferred gradients, from I to W."""
    working: float = 0.0
    messages: float = 0.0
    """Messages between their receive and use, or between their send and release."""
    op: Op | None = None
    """The running op. None between ops, and with offloading."""

    @property
    def total(self) -> float:
        return self.activations + self.waiting + self.working + self.messages


def peak_parts(timeline: Timeline, rows: Rows | None = None) -> tuple[Held, ...]:
    """The parts of each rank's `peak_bytes`."""
    if rows is None:
        rows = rows_of(timeline)
    messages, costs = messages_held(rows), timeline.costs
    if timeline.copies:
        most = (max(held, default=0) * costs.alike.message_bytes for held in messages)
        return tuple(Held(peak, messages=size) for peak, size in zip(timeline.peak_memory, most, strict=True))
    return tuple(_worst(costs, zip(row, held, strict=True)) for row, held in zip(rows, messages, strict=True))


def rows_of(timeline: Timeline) -> Rows:
    """The lists with messages and waits of zbpipe's schedules."""
    schedule = timeline.schedule
    rows = place_receives(add_messages(schedule), timeline.receives or Receives.TIMED, timeline)
    return free_sends_early(add_waits(rows), schedule.placement)


def _worst(costs: CostModel, row: Iterable[tuple[Action, int]]) -> Held:
    """Peak of a rank, from its actions and the number of messages that it holds during each."""
    activations = waiting = 0.0
    worst = Held()
    for action, number in row:
        stage, kind, microbatch = action
        messages = number * costs.alike.message_bytes
        if kind not in COMPUTE:
            if activations + waiting + messages > worst.total:
                worst = Held(activations, waiting, messages=messages)
            continue
        cost, waits = costs.of(*op_of(action)), costs.of(stage, OpKind.W, microbatch).frees
        size = costs.of(stage, OpKind.F, microbatch).adds
        held, deferred = activations, waiting
        # I turns activations into deferred gradients. The larger of the two counts during I.
        if kind == "F":
            held = activations = activations + size
        else:
            deferred += max(cost.adds, 0.0)
            activations -= 0.0 if kind == "W" else size
            waiting += {"I": waits, "W": -waits}.get(kind, 0.0)
        if held + deferred + cost.working + messages >= worst.total:  # of equal ones the last, which names its op
            worst = Held(held, deferred, cost.working, messages, op_of(action))
    return worst
