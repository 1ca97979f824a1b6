"""ZB: F and I in slots, W in the gaps between them, for any number of stages per rank.

In the steady state a rank runs one F and one I in each *slot*, and a message goes on by one stage per slot. With
S = v p stages, stage s runs the k-th microbatch of the g-th group of p microbatches in

    F: slot g S + d k + s          I: slot g S + d k + 2 (S - 1) - s

In a loop d is 1, and the order of F and I is that of Interleaved1F1B (Megatron-LM, arXiv 2104.04473, section 2.2). In a
wave (down the ranks and up again, with an even v; Hanayo, arXiv 2308.15762) d is 2: the way down takes every other slot
of a rank, and the way up the slots between. All messages go to later slots, so ranks never wait for each other. Each
slot is a building block of Pipeline Parallelism with Controllable Memory (arXiv 2405.15362, section 3).

Without deferred gradients a loop keeps p + (p - 2) / v microbatches on the first rank, a wave p - 1 / v on each. With a
shorter warm-up a loop keeps p, too (GIS: PipeOffload, arXiv 2503.01328, section 3). W then runs in gaps, or where
memory is needed.

**Take ZB.** In your own loop compare ZBLoop under full checkpointing. Four stages per rank are shorter than two, if
there are as many layers, and if messages do not block computations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from operator import attrgetter, le
from typing import NamedTuple

from zbpipe.algorithms.interleaved_1f1b import interleave, interleaved_1f1b, split_into_groups
from zbpipe.algorithms.one_f_one_b import b_f
from zbpipe.algorithms.v_half import v_half
from zbpipe.algorithms.v_min import v_min
from zbpipe.algorithms.zbv import zbv
from zbpipe.costs.job import MemoryLimit, resolve_limits
from zbpipe.costs.model import ROUNDING, SENDS, CostModel, Transport, highest
from zbpipe.costs.transformer import typical_costs
from zbpipe.planner.engine import at_hand
from zbpipe.planner.problem import Problem, fit_within, make_leanest
from zbpipe.planner.search import Effort, Search
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule, new_tuple
from zbpipe.schedule.registry import register
from zbpipe.simulator.lower_bound import lower_bound
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline

_MOST_SEARCHED, _MOST_TWICE = 6_000, 24_000
"""Most ops for a search from the best fillings; and on a V, if these are far from the bound, for a second search from
the papers' schedules. Larger searches take seconds and gain next to nothing."""
_FAR = 1.03
_SEEDS = 3
"""Number of filled orders from which the search starts."""
_MOST_WITH_QUEUES = 3
"""Number of orders simulated if messages share queues with compute: each takes 0.2 seconds."""
_BUDGET = 5e5
"""Budget of one search in timed ops: some 0.2 seconds without numba."""
_interleaved = lru_cache(maxsize=16)(interleaved_1f1b)  # with its graph, which takes longer than its ops


class Timed(NamedTuple):
    makespan: float
    schedule: Schedule


@register(
    "ZB",
    placement="wave",
    stages_per_rank=2,
    summary="the shortest known step in 1F1B's memory; stages in a wave if each rank has an even number",
    by_checkpointing=True,
)
def zb(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 2,
    costs: CostModel | None = None,
    memory_limit: MemoryLimit | None = None,
    transport: Transport | None = None,
    search: bool = True,
) -> Schedule:
    """The shortest of several ways to fill W into the slots, improved by a short search.

    Even numbers of stages per rank run in a wave, odd ones in a loop. Costs default to typical ones under selective
    checkpointing. The limit defaults to the memory of 1F1B's worst rank, and to that of one microbatch if that is more.
    It defaults to Interleaved1F1B's memory if the step would otherwise be longer than Interleaved1F1B's.

    >>> print(zb(2, 2))
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2B0 1I0 1W0 2I1 2W1 1I1 1W1
    """
    placement = Placement.wave(ranks, stages_per_rank)
    return find_shortest("ZB", placement, microbatches, costs, memory_limit, transport, search=search).schedule


@register(
    "ZBLoop",
    stages_per_rank=2,
    summary="in place of Interleaved1F1B, with as many stages per rank: never longer",
    by_checkpointing=True,
)
def zb_loop(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 2,
    costs: CostModel | None = None,
    memory_limit: MemoryLimit | None = None,
    transport: Transport | None = None,
    search: bool = True,
) -> Schedule:
    """ZB in a loop for all numbers of stages. Interleaved1F1B is a candidate where it fits into the limit.

    Take it under full checkpointing, where a loop's step is shorter than a wave's.

    >>> print(zb_loop(2, 2))
    rank 0: 0F0 0F1 2F0 2F1 2B0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1
    """
    placement = Placement.loop(ranks, stages_per_rank)
    return find_shortest("ZBLoop", placement, microbatches, costs, memory_limit, transport, search=search).schedule


def find_shortest(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: CostModel | None = None,
    memory_limit: MemoryLimit | None = None,
    transport: Transport | None = None,
    *,
    search: bool = True,
) -> Timed:
    """`zb` on any loop or wave. Without a `search` the result may exceed the limit if no filling is within it.

    With a limit above the default one, the step is never longer than without a limit. A search within less memory may
    find a shorter order, so both are searched.
    """
    costs, transport = costs or typical_costs(placement), transport or Transport.IDEAL
    costs.require_microbatches(microbatches)
    limits = resolve_limits(memory_limit, placement, costs, microbatches, strict_for=name)
    standard = [limits if memory_limit is None else resolve_limits(None, placement, costs, microbatches)]
    if (stages_per_rank := placement.num_stages // placement.num_ranks) > 1:
        interleaved = _interleaved(placement.num_ranks, microbatches, stages_per_rank)
        most = max(highest(costs.alike, row) for row in interleaved)
        standard.append(tuple(max(limit, most) for limit in standard[0]))

    def within(limits: tuple[float, ...]) -> Timed:
        return _find_within(name, placement, microbatches, costs, limits, transport, search)

    found, others = within(limits), standard[1:]
    if memory_limit is not None:
        others = [each for each in standard if search and all(map(le, each, limits))]
    elif others and found.makespan <= simulate(interleaved, costs, transport=transport).makespan * (1 + ROUNDING):
        return found
    for each in others:
        if lower_bound(placement, costs, microbatches, each) < found.makespan:
            found = min(found, within(each), key=attrgetter("makespan"))
    return found


@lru_cache(maxsize=16)  # searches with a limit share those without one
def _find_within(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: CostModel,
    limits: tuple[float, ...],
    transport: Transport,
    search: bool,
) -> Timed:
    alike = costs.alike
    plain = replace(alike, fill_waits="off")  # what W takes besides filled waits is known for whole orders only
    papers, filled = _fill_orders(name, placement, microbatches, plain, limits, transport)
    is_ideal = transport is Transport.IDEAL and not costs.has_fsdp and not costs.varies
    if filled and not search and is_ideal and costs == plain:
        return filled[0]
    others, seeds = papers, [each.schedule for each in filled]
    if not filled:
        unlimited = _fill_orders(name, placement, microbatches, plain, (inf,) * len(limits), transport)[1]
        others = [each.schedule for each in unlimited]
    found = seeds.copy() if search and not is_ideal else seeds[:1]
    if alike != plain:
        refilled = _fill_orders(name, placement, microbatches, alike, limits, transport)[1]
        found += [each.schedule for each in refilled[:1]]
    if search and filled and is_searched(placement, microbatches):
        found.append(find_best(name, [*seeds[:_SEEDS], *papers], alike, limits, transport))

    def are_far() -> bool:
        shortest = min(simulate(each, plain).makespan for each in found)
        return shortest > _FAR * lower_bound(placement, plain, microbatches, limits)

    if not search:
        found = found or others[:1]
    elif not found or (papers and is_searched(placement, microbatches, _MOST_TWICE) and are_far()):
        found.append(find_best(name, others[:_SEEDS], alike, limits, transport))
    return _find_shortest(found, costs, transport)


def _find_shortest(schedules: Iterable[Schedule], costs: CostModel, transport: Transport) -> Timed:
    """The schedule with the shortest step. Messages only delay one, so few are simulated with slow transports."""
    ideal = sorted((Timed(simulate(each, costs).makespan, each) for each in schedules), key=attrgetter("makespan"))
    best = ideal[0] if transport is Transport.IDEAL else Timed(inf, ideal[0].schedule)
    for least, each in ideal:
        if least >= best.makespan:
            break
        best = min(best, Timed(simulate(each, costs, transport=transport).makespan, each), key=attrgetter("makespan"))
    return best


def find_best(
    name: str, seeds: Sequence[Schedule], costs: CostModel, limits: Sequence[float], transport: Transport
) -> Schedule:
    """The shortest schedule within `limits` that a short search finds from lean forms of `seeds`. Ties: the leanest.

    All seeds have the same placement and number of microbatches. If messages share queues with compute, steps are
    simulated under that transport. The search fills no waits for collectives, but the choice of what it found does.
    """
    placement, microbatches = seeds[0].placement, seeds[0].num_microbatches
    problem = Problem("", placement, replace(costs, fill_waits="off"), microbatches, tuple(limits))
    search = Search([problem], _BUDGET, at_hand(), effort=Effort.quick(_BUDGET, problem.num_ops))
    leanest = [make_leanest(seed, costs) for seed in seeds]
    forms = (
        form
        for seed, least in zip(seeds, leanest, strict=True)
        for form in (fit_within(seed, costs, problem.limits), least)
    )
    search.run((problem, problem.order(form), form.name) for form in dict.fromkeys(forms) if problem.fits(form))
    if transport is Transport.SHARED or costs.fill_waits != "off":
        found = sorted({each.order: each for each in search.kept}.values(), key=lambda each: each.length)
        most = _MOST_WITH_QUEUES if transport is Transport.SHARED else None
        best = [problem.schedule(name, each.order) for each in found[:most]]
        fitting = (*best, *(replace(each, name=name) for each in leanest if problem.fits(each)))
        return _find_shortest(fitting, costs, transport).schedule
    shortest = [each.order for each in search.kept if each.length <= search.shortest * (1 + ROUNDING)]
    schedules = [problem.schedule(name, order) for order in dict.fromkeys(shortest)]
    return min(schedules, key=lambda each: max(highest(costs, row) for row in each))


def is_searched(placement: Placement, microbatches: int, most: int = _MOST_SEARCHED) -> bool:
    return 3 * placement.num_stages * microbatches <= most


@lru_cache(maxsize=16)  # a choice of stages fills all, and searches from some of them
def _fill_orders(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: CostModel,
    limits: tuple[float, ...],
    transport: Transport,
) -> tuple[list[Schedule], list[Timed]]:
    """The papers' schedules on this placement, and the orders filled within the limits."""
    papers, orders = _list_orders(placement, microbatches, transport)
    return papers, _fill_all(orders, Filler(name, placement, microbatches, costs, limits))


@lru_cache(maxsize=16)
def _list_orders(placement: Placement, microbatches: int, transport: Transport) -> tuple[list[Schedule], list[Order]]:
    """The papers' schedules on this placement, and the orders of F and I, theirs last."""
    is_v = placement == Placement.v(placement.num_ranks)
    papers = [form(placement.num_ranks, microbatches) for form in (zbv, v_half, v_min)] if is_v else []
    orders = [in_slots(placement, microbatches)]
    if transport is not Transport.IDEAL:
        orders.append(in_slots(placement, microbatches, delay=1))
    if not _is_wave(placement):
        orders.append(with_short_warm_up(placement, microbatches))
    return papers, orders + [[[op for op in row if op.kind is not OpKind.W] for row in form] for form in papers]


def list_leanest(placement: Placement, microbatches: int, costs: CostModel) -> Iterator[Timeline]:
    """The orders that ZB fills and searches from, with whole backwards: its memory is at least that of one of these."""
    filler = Filler("", placement, microbatches, costs, (inf,) * placement.num_ranks)
    for order in _list_orders(placement, microbatches, Transport.IDEAL)[1]:
        if filled := filler.fill(order, 0):
            yield simulate(filled.schedule, costs)


def _fill_all(orders: Sequence[Order], filler: Filler) -> list[Timed]:
    """The shortest ways to fill W into the orders within the limits, the best first, and last the one without W."""
    ranks, microbatches = filler.placement.num_ranks, filler.microbatches
    ways = (0, 0.0), (ranks, 0.0), (microbatches, 0.5), (microbatches, 1.0)
    without_w, *others = [filler.fill(order, apart, patience) for order in orders for apart, patience in ways]
    shortest = sorted(filter(None, (without_w, *others)), key=attrgetter("makespan"))[:_SEEDS]
    if without_w and all(each is not without_w for each in shortest):
        shortest.append(without_w)
    return shortest


def with_short_warm_up(placement: Placement, microbatches: int) -> Order:
    """Interleaved1F1B's order in a loop, with (v - 1) g + p - r forwards before the first I of rank r."""
    return [
        b_f(forwards, inputs, warmup + placement.num_ranks - rank)
        for rank, (forwards, inputs, warmup) in enumerate(interleave(placement, microbatches, OpKind.I))
    ]


def in_slots(placement: Placement, microbatches: int, delay: int = 0) -> Order:
    """F and I of each rank by their slots, F first within a slot.

    `delay` starts each I that many slots later, which takes more memory and leaves more time for messages.
    """
    ranks, num_stages = placement.num_ranks, placement.num_stages
    stages_per_rank = num_stages // ranks
    is_wave = _is_wave(placement)
    groups = split_into_groups(microbatches, ranks)

    def pass_stage(number: int, size: int) -> int:
        """The slot in which a group's first microbatch passes its stage with this number."""
        leg, way = divmod(number, ranks)
        return leg // 2 * 2 * size + leg % 2 * ranks + way if is_wave else leg * size + way

    rows: list[list[tuple[int, bool, Op]]] = [[] for _ in range(ranks)]
    turn = pass_stage(num_stages - 1, max(ranks, len(groups[0]))) + delay
    for group in groups:
        begin, size = group.start * stages_per_rank, max(ranks, len(group))
        for stage, rank in enumerate(placement.rank_of):
            forth = begin + pass_stage(stage, size)
            back = begin + turn + pass_stage(num_stages - 1 - stage, size)
            for entered, microbatch in enumerate(group):
                later = entered * (2 if is_wave else 1)
                rows[rank] += [
                    (forth + later, False, Op(stage, OpKind.F, microbatch)),
                    (back + later, True, Op(stage, OpKind.I, microbatch)),
                ]
    return [[op for _, _, op in sorted(row)] for row in rows]


def _is_wave(placement: Placement) -> bool:
    return placement != Placement.loop(placement.num_ranks, placement.num_stages // placement.num_ranks)


Order = Sequence[Sequence[Op]]
"""The F and I of each rank, in the order in which the rank runs them."""
F, I, W, B = _KINDS = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741 -- torch's letter for the input gradient


class Filler:
    """Fills W into orders of F and I for one placement, number of microbatches, costs and memory limits."""

    def __init__(
        self, name: str, placement: Placement, microbatches: int, costs: CostModel, limits: Sequence[float]
    ) -> None:
        stages = range(placement.num_stages)
        self.name, self.placement, self.microbatches, self._costs = name, placement, microbatches, costs
        self._limits = [limit * (1 + ROUNDING) for limit in limits]
        rank_of, last = placement.rank_of, placement.num_stages - 1
        known = {kind: [costs.of(stage, kind) for stage in stages] for kind in _KINDS}
        self.of = {kind: [(each.seconds, each.adds, each.needs) for each in row] for kind, row in known.items()}
        """Seconds, memory that is added, and memory that is needed, by kind and stage."""
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

    def fill(self, order: Order, apart: int, patience: float = 0.0) -> Timed | None:
        """Run each op as soon as possible, and W where its rank would wait, or where an F or I finds no room.

        An I without room even then becomes a B. Returns seconds with the ideal transport, and the schedule; None if
        there is no room for an F or a B.

        Args:
            order: F and I of each rank.
            apart: number of the first and of the last microbatches that run I and W. The others run B.
            patience: the part of a W that a gap may lack. 0 fills gaps of a whole W, 1 fills every gap.

        Raises:
            ValueError: ranks would wait for each other.
        """
        ranks = [_Rank(self, row, limit, patience) for row, limit in zip(order, self._limits, strict=True)]
        whole = range(apart, self.microbatches - apart)
        arrivals: dict[tuple[int, OpKind, int], float] = {(0, F, each): 0.0 for each in range(self.microbatches)}
        waiting = deque(ranks)
        while waiting:
            rank = waiting.popleft()
            left = rank.left
            while left and (arrival := arrivals.pop(left[-1], None)) is not None:
                stage, kind, microbatch = op = left.pop()
                if not rank.run(op, B if kind is I and microbatch in whole else kind, arrival):
                    return None
                after, kind_after = self._next[kind][stage]
                if after >= 0:
                    taker = after, kind_after, microbatch
                    arrivals[taker] = rank.clock + self._transfer[kind][stage]
                    other = ranks[self.placement.rank_of[after]]
                    if other is not rank and other.left[-1] == taker:
                        waiting.append(other)
        if any(rank.left for rank in ranks):
            raise ValueError("in this order of F and I, ranks wait for each other")
        for rank in ranks:
            rank.run_all_w()
        found = Schedule(self.name, self.placement, self.microbatches, tuple(tuple(rank.done) for rank in ranks))
        fills = self._costs.fill_waits != "off"
        return Timed(simulate(found, self._costs).makespan if fills else max(rank.clock for rank in ranks), found)


class _Rank:
    """One rank's ops so far and to come, its clock, its memory and its deferred W."""

    def __init__(self, filler: Filler, order: Sequence[Op], limit: float, patience: float) -> None:
        self._of, self._limit, self._share = filler.of, limit, 1 - patience
        self._room_of_w = max(needs for _, _, needs in (self._of[W][op.stage] for op in order))
        self.left = list(reversed(order))
        """Remaining F and I, the next one last."""
        self.done: list[Op] = []
        self.clock = self._held = 0.0
        self._deferred: deque[Op] = deque()

    def run(self, op: Op, kind: OpKind, arrival: float) -> bool:
        """Run an op once its input has arrived, and before it each W that fits. False if memory has no room for it."""
        stage, deferred = op.stage, self._deferred
        while deferred and self.clock + self._share * self._of[W][deferred[0].stage][0] <= arrival * (1 + ROUNDING):
            self._run(deferred.popleft())
        while not (has_room := self._has_room(stage, kind)) and deferred:
            self._run(deferred.popleft())
        if not has_room and kind is I:
            kind, has_room = B, self._has_room(stage, B)
        if not has_room:
            return False
        self.clock = max(self.clock, arrival)
        self._run(op if kind is op.kind else new_tuple(Op, (stage, kind, op.microbatch)))
        if kind is I:
            deferred.append(new_tuple(Op, (stage, W, op.microbatch)))
        return True

    def run_all_w(self) -> None:
        while self._deferred:
            self._run(self._deferred.popleft())

    def _has_room(self, stage: int, kind: OpKind) -> bool:
        _, adds, needs = self._of[kind][stage]
        then = self._room_of_w if kind is I or self._deferred else 0.0
        return self._held + needs <= self._limit and (not then or self._held + adds + then <= self._limit)

    def _run(self, op: Op) -> None:
        seconds, adds, _ = self._of[op.kind][op.stage]
        self.clock += seconds
        self._held += adds
        self.done.append(op)
