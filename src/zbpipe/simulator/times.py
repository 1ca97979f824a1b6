"""The times of a graph: the longest path to each node. They are numbers, or arrays with a number for each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from math import inf
from typing import Any

from zbpipe.costs.model import CostModel
from zbpipe.schedule.graph import Graph
from zbpipe.schedule.ir import KINDS, OpKind
from zbpipe.simulator.actions import SENDS, other_end
from zbpipe.simulator.graph import TimeGraph


def longest_path(
    graph: Graph[Any],
    seconds: Callable[[int], Any],
    latest: Callable[[Any, Any], Any] = max,
    *,
    frees: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Start and end of each node. It starts when all that it waits for is over, or at 0 if it waits for nothing.

    Args:
        graph: the graph.
        seconds: duration of a node.
        latest: the later of two times.
        frees: whether to keep no starts, and only the ends for which no node waits: arrays are large.
    """
    before, starts, ends = graph.before, [0.0] * len(graph.nodes), [0.0] * len(graph.nodes)
    users = Counter(chain.from_iterable(before)) if frees else None
    for node in graph.order:
        waits = before[node]
        start = -inf if waits else 0.0
        for each in waits:
            start = latest(start, ends[each])
        ends[node] = start + seconds(node)
        if users is None:
            starts[node] = start
            continue
        for each in waits:
            users[each] -= 1
            if not users[each]:
                ends[each] = -inf
    return starts, ends


def durations(graph: TimeGraph, costs: CostModel) -> list[float]:
    """Seconds of each node."""
    rank_of = graph.schedule.placement.rank_of
    stages = range(len(rank_of))

    def seconds(stage: int, kind: str) -> float:
        if kind in KINDS:
            return costs.seconds(stage, KINDS[kind])
        if kind in SENDS:
            taker = other_end((stage, kind, 0)).stage
            return costs.transfer(rank_of[stage], rank_of[taker]) if taker in stages else 0.0
        match kind:
            case "UNSHARD":
                return costs.gathering(stage)
            case "HEAD":
                return max(costs.gathering(stage) - costs.seconds(stage, OpKind.F), 0.0)
            case "REDUCE_GRAD":
                return costs.reduction(stage)
        return 0.0

    known: dict[str, list[float]] = {}
    found = []
    for stage, kind, _ in graph.nodes:
        if kind not in known:
            known[kind] = [seconds(each, kind) for each in stages]
        found.append(known[kind][stage])
    return found
