"""Dependencies in a step, under each transport and with FSDP's collectives, and the times that follow.

Once the lists of all ranks are fixed, that is a static graph: ops and messages as in `Schedule.graph`, waits for
messages by transport, FSDP's gathers and reductions one after the other, and the begin of each rank if there is a
previous step. If gathers and reductions overlap, a stage's first F ends no earlier than its gather, and its
reduction starts with its last W or B. Otherwise the rank waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate, chain
from math import inf
from operator import itemgetter
from typing import Any, Literal

from zbpipe.costs.model import GATHER, REDUCE, SENDS, CostModel, Transport
from zbpipe.schedule.graph import CycleError, Graph
from zbpipe.schedule.ir import OpKind, Schedule
from zbpipe.schedule.tables import Cell
from zbpipe.simulator.actions import COMPUTE, WAITS, Action, Rows, message_of, other_end

Overlap = bool | Literal["gathers"]
"""Whether FSDP's collectives run during computations: all of them, only gathers, or none."""
HEAD, BEGIN, GATE = "HEAD", "BEGIN", "GATE"
"""The part of a gather before its first F, and the begins of a rank and of all ranks."""
_NO_OPS = frozenset((*SENDS, HEAD, BEGIN, GATE, *WAITS))
"""Nodes that are neither ops nor collectives."""


class TimeGraph(Graph[Cell]):
    """The dependencies in a step of a schedule that can run. Transports with queues need the lists with messages
    (`rows`). With the ideal transport there may be a previous step: `ahead` is the number of ops that each rank may
    start before all ranks are done with it."""

    # Callers need different subsets.
    def __init__(
        self,
        schedule: Schedule,
        transport: Transport = Transport.IDEAL,
        rows: Rows = (),
        *,
        ahead: Sequence[int] | None = None,
        has_fsdp: bool = False,
        overlaps_fsdp: Overlap = True,
    ) -> None:
        base = schedule.graph
        super().__init__(base.nodes.copy(), base.before.copy())
        self.schedule = schedule
        self.ops: list[range] = []
        for last, row in zip(accumulate(map(len, schedule)), schedule, strict=True):
            self.ops.append(range(last - len(row), last))
        self.begins: dict[int, list[int]] = {}
        """The begin of each rank, with its nodes that end the previous step."""
        self.collectives: list[list[tuple[int, int]]] = [[] for _ in schedule]
        """Gathers and reductions of each rank, in order, each with the op during, before or after which it runs."""
        self._first: list[list[int]] = [[] for _ in schedule]
        """Node before each rank's first op, if any."""
        self.arrivals: dict[int, int] = {}
        """Message for which the rank waits before its next op, by the op that sends it."""
        if ahead is not None:
            self._add_begins(ahead)
        if transport is Transport.BLOCKING:
            self._add_blocking()
        elif transport.has_queues:
            self._add_queues(rows, transport)
        if has_fsdp:
            self._add_collectives(bool(overlaps_fsdp), overlaps_fsdp is True)
        if len(self.nodes) == len(base.nodes) and not transport.has_queues:
            sent = self.arrivals
            # Each message right after its op.
            followed = ((op, sent[op]) if op in sent else (op,) for op in base.order if op < self.ops[-1].stop)
            self.order = list(chain.from_iterable(followed)) if sent else base.order

    def find_cycle(self) -> list[Action]:
        """Messages and computations that wait for each other, each for the previous one. Empty if none do. The cycle
        begins and ends with the same action, on its lowest rank."""
        try:
            self.order  # noqa: B018 -- which raises if there is none
        except CycleError as error:
            cycle = [Action(*each) for each in error.cycle]
        else:
            return []
        rank_of = self.schedule.placement.rank_of
        # Of consecutive computations on a rank, the first one waits for a message.
        pairs = zip([cycle[-1], *cycle], cycle, strict=False)
        cycle = [each for before, each in pairs if each.kind in SENDS or before.kind in SENDS]
        first = cycle.index(min(cycle, key=lambda each: rank_of[each.stage]))
        return [*cycle[first:], *cycle[: first + 1]]

    def _add(self, node: Cell, waits: Iterable[int]) -> int:
        self.nodes.append(node)
        self.before.append(list(waits))
        return len(self.nodes) - 1

    def _wait(self, node: int, others: Iterable[int]) -> None:
        """Let a node wait for others. The lists of `Schedule.graph` stay unchanged."""
        self.before[node] = [*self.before[node], *others]

    def _wait_from(self, ops: Iterable[int], other: int) -> None:
        """Let a rank wait before these ops: the first computation, and the copies before it."""
        for each in ops:
            self._wait(each, [other])
            if self.nodes[each][1] in COMPUTE:
                break

    def _add_begins(self, ahead: Sequence[int]) -> None:
        """Begin the step where a rank is done with the previous one, and after `ahead` ops where all ranks are."""
        begins = [self._add((rank, BEGIN, -1), ()) for rank in range(len(self.ops))]
        self.begins = {begin: [begin, *ops[-1:]] for begin, ops in zip(begins, self.ops, strict=True)}
        gate = self._add((-1, GATE, -1), begins)
        for rank, (ops, number) in enumerate(zip(self.ops, ahead, strict=True)):
            self._first[rank] = [begins[rank] if number else gate]
            self._wait_from(ops, *self._first[rank])
            self._wait_from(ops[number:], gate)

    def _add_blocking(self) -> None:
        """Let a rank wait for its message after an op."""
        first = self.ops[-1].stop
        self.arrivals = {giver: message for message, (giver,) in enumerate(self.schedule.graph.before[first:], first)}
        for ops in self.ops:
            for op in self.arrivals.keys() & ops[:-1]:
                self._wait_from(range(op + 1, ops.stop), self.arrivals[op])

    def _add_queues(self, rows: Rows, transport: Transport) -> None:
        """Let the messages of `rows` wait for each other. Waits for sends are nodes."""
        placement, per_peer = self.schedule.placement, transport is Transport.QUEUE_PER_PEER
        number = {node: place for place, node in enumerate(self.schedule.graph.nodes)}
        for rank, row in enumerate(rows):
            blocking: list[int] = []
            peers = [other for one, other in placement.hops if one == rank] if per_peer else [-1]
            last: dict[int, list[int]] = {peer: [] for peer in peers}
            for action in row:
                found = action if action.kind in COMPUTE else message_of(action)
                if found is None:
                    continue
                node = number[found]
                if action.kind in COMPUTE or action.kind in WAITS:
                    node = self._add(action, [node]) if action.kind in WAITS else node
                    self._wait(node, [*blocking, *(last[-1] if transport is Transport.SHARED else ())])
                    blocking = [node]
                else:
                    peer = placement.rank_of[other_end(action).stage] if per_peer else -1
                    self._wait(node, [*blocking, *last[peer]])
                    last[peer] = [node]

    def _add_collectives(self, gathers_overlap: bool, reductions_overlap: bool) -> None:
        for rank, ops in enumerate(self.ops):
            first = {self.nodes[op][0]: op for op in reversed(ops)}
            gathered = self._first[rank]
            for stage, op in sorted(first.items(), key=lambda each: each[1]):
                gather = self._add((stage, GATHER, -1), gathered)
                self._wait(op, [self._add((stage, HEAD, self.nodes[op][2]), gathered) if gathers_overlap else gather])
                gathered = [gather]
                self.collectives[rank].append((gather, op))
            last = {self.nodes[op][0]: op for op in ops if self.nodes[op][1] in ("W", "B")}
            reduced: list[int] = []
            for stage, op in sorted(last.items(), key=lambda each: each[1]):
                waits = self.before[op] if reductions_overlap else [self.arrivals.get(op, op)]
                reduction = self._add((stage, REDUCE, -1), [*waits, *reduced])
                if not reductions_overlap:
                    self._wait_from(range(op + 1, ops.stop), reduction)
                reduced = [reduction]
                self.collectives[rank].append((reduction, op))
            if self.begins:
                self.begins[list(self.begins)[rank]] += reduced


def longest_path(graph: Graph[Any], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Start and end of each node. A node starts when its dependencies are over, or at 0 without any."""
    before, starts, ends = graph.before, [0.0] * len(graph.nodes), [0.0] * len(graph.nodes)
    for node in graph.order:
        waits = before[node]
        start = -inf if waits else 0.0
        for each in waits:
            if ends[each] > start:  # noqa: PLR1730 -- a call of max takes as long as the rest here
                start = ends[each]
        starts[node] = start
        ends[node] = start + seconds[node]
    return starts, ends


def last_end(graph: Graph[Any], seconds: Callable[[int], Any], latest: Callable[[Any, Any], Any]) -> Any:
    """As `longest_path` for arrays of samples: the end of the last node. `latest` is the later of two times."""
    users = Counter(chain.from_iterable(graph.before))
    ends: dict[int, Any] = {}
    for node in graph.order:
        waits = graph.before[node]
        ends[node] = reduce(latest, [ends[each] for each in waits] or [0.0]) + seconds(node)
        for each in waits:
            users[each] -= 1
            if not users[each]:  # arrays are large
                del ends[each]
    return reduce(latest, ends.values())


def durations(graph: TimeGraph, costs: CostModel) -> list[float]:
    """Seconds of each node."""
    keys: list[Any] = graph.nodes if costs.sizes else [node[:2] for node in graph.nodes]  # all microbatches are alike
    examples = dict(zip(keys, graph.nodes, strict=True))
    known = {key: _seconds(graph.schedule, costs, node) for key, node in examples.items()}
    found = [known[key] for key in keys]
    fill_waits(graph, costs, found)
    return found


def _seconds(schedule: Schedule, costs: CostModel, node: Cell) -> float:
    stage, kind, microbatch = node
    if kind in SENDS:
        rank_of, size = schedule.placement.rank_of, costs.of(stage, kind, microbatch).message
        return costs.transfer(rank_of[stage], rank_of[other_end(node).stage], size)
    if kind == HEAD:
        return max(costs.of(stage, GATHER).seconds - costs.of(stage, OpKind.F, microbatch).seconds, 0.0)
    return 0.0 if kind in _NO_OPS else costs.of(stage, kind, microbatch).seconds


def fill_waits(graph: TimeGraph, costs: CostModel, seconds: list[float]) -> list[tuple[int, int, float]]:
    """Shorten W and B by the products that run in waits. An op's products can run in its own waits, after those that
    are older. That depends on the order of the ops, and not on times. Returns the number of each op with the stage and
    the seconds of the products in its waits."""
    ran: list[tuple[int, int, float]] = []
    if costs.fill_waits == "off" or graph.schedule.has_copies:  # which take the products' tensors away
        return ran
    pending: dict[tuple[int, int], float] = {}  # empty again after each rank
    for node, (stage, kind, microbatch) in enumerate(graph.nodes[: graph.ops[-1].stop]):
        w = costs.of(stage, OpKind.W, microbatch).seconds - costs.overhead
        if kind in ("I", "B"):
            pending[stage, microbatch] = w
        room = costs.of(stage, kind, microbatch).hides
        for key in sorted(pending, key=itemgetter(0)) if room else ():  # a stage's in the order of their I
            if costs.fill_waits == "all" or key[0] == stage:
                took = min(room, pending[key])
                pending[key], room = pending[key] - took, room - took
                if took:
                    ran.append((node, key[0], took))
        if kind in ("W", "B"):
            seconds[node] = max(seconds[node] - (w - pending.pop((stage, microbatch))), 0.0)
    return ran
