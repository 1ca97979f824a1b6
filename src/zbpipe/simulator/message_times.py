"""Times of computations and messages if messages wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zbpipe.costs.model import CostModel
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import KINDS, Placement
from zbpipe.simulator.actions import COMPUTE, SENDS, Action, Rows, other_end
from zbpipe.simulator.message_queues import MessageLoop


class Times(NamedTuple):
    """Times of computations."""

    start: Mapping[Action, float]
    end: Mapping[Action, float]
    """Seconds."""
    waited_for: Mapping[Action, Action]
    """The computation whose end each computation waited for, if it waited for one."""


class CycleError(ValueError):
    """Error for messages that wait for each other in a cycle."""


def run(
    rows: Rows,
    placement: Placement,
    costs: CostModel,
    transport: Transport,
    copies: Mapping[Action, Sequence[Action]] | None = None,
    earliest: Mapping[Action, float] | None = None,
    waits: Mapping[Action, float] | None = None,
) -> Times:
    """Times of everything in `rows` if messages wait for each other. CycleError if they do so in a cycle.

    `copies` to the host and back have their dependencies. Computations are in it with the copies that they wait for.
    No action starts before its `earliest` time. After those in `waits` their rank waits before it computes again.
    """
    rank_of = placement.rank_of
    loop = MessageLoop(rows, rank_of, transport is Transport.QUEUE_PER_PEER, transport is Transport.SHARED)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    behind: dict[Action, Action] = {}
    """The computation before each node."""
    for node, before in _insert_copies(loop, copies or {}):
        latest = max(before, key=end.__getitem__, default=None)
        start[node] = 0.0 if latest is None else end[latest]
        if waits and node.kind in COMPUTE:
            own = (each for each in before if each in waits and rank_of[each.stage] == rank_of[node.stage])
            start[node] = max([start[node], *(end[each] + waits[each] for each in own)])
        if earliest and start[node] < earliest.get(node, 0.0):
            start[node], latest = earliest[node], None
        end[node] = start[node] + _seconds(node, rank_of, costs)
        source = behind.get(latest) if latest and latest.kind not in COMPUTE else latest
        if source:
            behind[node] = source
    if loop.is_stuck():
        raise CycleError(
            f"with {transport} messages wait for each other: {' before '.join(map(str, loop.find_cycle()))}"
        )
    return Times(start, end, behind)


def _insert_copies(
    loop: MessageLoop, copies: Mapping[Action, Sequence[Action]]
) -> Iterator[tuple[Action, Sequence[Action]]]:
    """All items of the loop, and after each computation the copies that are issued there."""
    issued: dict[Action, list[Action]] = defaultdict(list)
    for copy, before in copies.items():
        if copy.kind not in COMPUTE:
            issued[next(each for each in reversed(before) if each.kind in COMPUTE)].append(copy)
    for node, before in loop:
        yield node, [*before, *copies.get(node, ())]
        yield from ((copy, copies[copy]) for copy in issued[node])


def _seconds(node: Action, rank_of: tuple[int, ...], costs: CostModel) -> float:
    if node.kind in KINDS:
        return costs.seconds(node.stage, KINDS[node.kind])
    return costs.transfer(rank_of[node.stage], rank_of[other_end(node).stage]) if node.kind in SENDS else 0.0
