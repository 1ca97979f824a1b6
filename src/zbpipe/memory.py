"""What each rank of a pipeline holds at most: activations, what ops need while they run, and messages.

`Timeline.peak_memory` has the first two, which depend on the order of the ops alone and which plans keep within their
limits. Messages depend on the lists of sends and receives that the ranks run.
"""

from __future__ import annotations

from collections.abc import Iterable

from zbpipe.actions import COMPUTE, Action, Rows, op_of
from zbpipe.costs import CostModel
from zbpipe.passes import free_sends_early, messages_held, place_receives, with_messages, with_waits
from zbpipe.timeline import Timeline
from zbpipe.transport import Receives


def peak_bytes(timeline: Timeline, rows: Rows | None = None) -> tuple[float, ...]:
    """The most that each rank holds in a step, with its messages: what to compare with a GPU's memory.

        >>> costs = CostModel((1, 1), (1, 1), (1, 1), activations=(3e9, 1e9), message_bytes=1e8)
        >>> timeline = zbpipe.simulate(zbpipe.generate("1F1B", 2, 4), costs)
        >>> timeline.peak_memory, peak_bytes(timeline)
        ((6000000000.0, 1000000000.0), (6300000000.0, 1200000000.0))

    Where activations are offloaded, which depends on times, it is at most that much.

    Args:
        timeline: of costs in bytes, `message_bytes` among them. An op's costs begin with what it is given: what F
            leaves includes the stage's input, and what I leaves includes dY if a layer needs that for W.
        rows: the lists with messages and waits that run; default: those of zbpipe's schedules for this timeline.
    """
    if rows is None:
        rows = rows_of(timeline)
    messages, costs = messages_held(rows), timeline.costs
    if timeline.copies:
        most = (max(held, default=0) * costs.message_bytes for held in messages)
        return tuple(peak + beside for peak, beside in zip(timeline.peak_memory, most, strict=True))
    return tuple(_peak(costs, zip(row, held, strict=True)) for row, held in zip(rows, messages, strict=True))


def rows_of(timeline: Timeline) -> Rows:
    """The lists with messages and waits that zbpipe's schedules run, as long as the caller sets no options.

    >>> print(*rows_of(zbpipe.simulate(zbpipe.generate("1F1B", 2, 1), (1, 1, 1)))[0])
    0F0 0SEND_F0 0RECV_B0 0B0 0WAIT_SEND_F0
    """
    schedule = timeline.schedule
    rows = place_receives(with_messages(schedule), timeline.receives or Receives.TIMED, timeline)
    return free_sends_early(with_waits(rows), schedule.placement)


def _peak(costs: CostModel, row: Iterable[tuple[Action, int]]) -> float:
    """Of one rank, from its actions and the number of messages that it holds while each of them runs."""
    kept = most = 0.0
    for action, messages in row:
        held = kept + messages * costs.message_bytes
        if action.kind in COMPUTE:
            op = op_of(action)
            held += costs.needs(op.stage, op.kind)
            kept += costs.adds(op.stage, op.kind)
        most = max(most, held)
    return most
