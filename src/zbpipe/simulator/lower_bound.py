"""Times that no schedule can beat: lower bounds from work, dependencies and memory.

Every rank has to do its work, and cannot always be busy:

- It waits for its first input.
- Before its first I it can only run F, at most as many as its memory holds. One microbatch needs its time to go down
  the stages and up again to this rank. If the F take less time, the rank idles.
- After its last F it can only run I and W of the microbatches that it holds. After its last I it can only run W, while
  the last microbatch goes on to the first stage.

The time before its first I and the time after its last I do not overlap. Neither do those before its first I and after
its last F, unless the rank can hold all microbatches. In addition, the product of activations and their lifetimes has
to fit into memory times time (Little's law).

The rules for an I also hold for a full backward B, which passes on its gradient later, but needs no W. Where I cannot
fit, every backward is a B.

FSDP's collectives add time at both ends: the first F of a stage ends no earlier than the gather of its parameters, and
a rank's last reduction takes longer than the last backward, which may hide it.

If W's products run in waits for collectives, a rank's work is F + I + max(W - waits, 0). A backward's own waits can
shorten its W. Waits of later ops shorten it by no more than these ops take themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import floor, inf
from typing import Any, NamedTuple

from zbpipe.costs.model import GATHER, REDUCE, ROUNDING, SENDS, CostModel, OpCosts
from zbpipe.schedule.ir import OpKind, Placement


def lower_bound(
    placement: Placement, costs: CostModel, num_microbatches: int, limits: Sequence[float] | None = None
) -> float:
    """Lower bound of a synchronous step, in seconds, for any order of the ops that keeps these limits.

    >>> placement = Placement.v(4)
    >>> lower_bound(placement, CostModel.uniform(placement), num_microbatches=8)
    25.5
    """
    if costs.varies:
        return _bound_of_sizes(lower_bound, placement, costs, num_microbatches, limits)
    least = _as_possible(placement, costs, limits)
    path, begun = _alone(placement, least), _alone(placement, least, _earliest(costs))
    # The last possible W after an I: of its own stage, or of a stage that the gradient still has to reach.
    finish = (end + least.of(stage, OpKind.W).seconds for stage, end in enumerate(path.input_end))
    behind = list(accumulate(finish, max))
    stages = range(costs.num_stages)

    def exposed_reduction(stage: int) -> float:
        """Seconds of a step after a rank's last op, a W or B of this stage."""
        reduction = costs.of(stage, REDUCE).seconds
        after_w, after_b = (reduction - costs.of(stage, kind).seconds for kind in (OpKind.W, OpKind.B))
        # After a B, the gradient still has to reach the first stage.
        onward = path.input_end[0] - path.input_end[stage] + (costs.of(0, OpKind.W).seconds if stage else 0.0)
        return max(min(after_w, max(after_b, onward)), 0.0)

    exposed = list(map(exposed_reduction, stages))
    window = _Window(0.0, behind, _behind_b(stages, behind, path), True, begun, exposed)
    ranks = _ranks(placement, limits)
    return max(behind[-1], *(_rank_bound(own, window, path, least, num_microbatches, limit) for own, limit in ranks))


def period_bound(
    placement: Placement, costs: CostModel, num_microbatches: int, limits: Sequence[float] | None = None
) -> float:
    """Lower bound of the period, if each rank begins the next step when it is done.

    Between its first and last op a rank does all its work. In that time later ranks do theirs, except for some W.

        >>> placement = Placement.loop(4)
        >>> period_bound(placement, CostModel.uniform(placement), num_microbatches=8)
        24.0
    """
    if costs.varies:
        return _bound_of_sizes(period_bound, placement, costs, num_microbatches, limits)
    least = _as_possible(placement, costs, limits)
    path = _alone(placement, least)
    ranks = _ranks(placement, limits)
    return max(
        _rank_bound(stages, _window_of(watched, stages, path, least), path, least, num_microbatches, limit)
        for watched, _ in ranks
        for stages, limit in ranks
        if watched[0] <= stages[0]
    )


def _bound_of_sizes(
    bound: Callable[..., float], placement: Placement, costs: CostModel, num_microbatches: int, *limits: Any
) -> float:
    """The bound for microbatches of the smallest size, or a rank's actual work after its first input."""
    least = costs.least
    begins = _alone(placement, _as_possible(placement, least, None)).forward_start
    begins = begins if bound is lower_bound else (0.0,) * len(begins)
    lengths = (begins[own[0]] + num_microbatches * _work(costs.alike, own) for own, _ in _ranks(placement, None))
    return max(bound(placement, least, num_microbatches, *limits), *lengths)


def _work(costs: CostModel, stages: Sequence[int]) -> float:
    """Least seconds of a rank for one microbatch."""
    ops = [costs.of(stage, kind) for stage in stages for kind in (OpKind.F, OpKind.B)]
    hidden = sum(_hidden(costs, stage) for stage in stages)
    if costs.fill_waits == "all":
        hidden = min(sum(_products(costs, stage) for stage in stages), sum(each.hides for each in ops))
    return sum(each.seconds for each in ops) - hidden


def _hidden(costs: CostModel, stage: int) -> float:
    """Most seconds of W's products in the waits of their own I or B."""
    return min(_products(costs, stage), costs.of(stage, OpKind.I).hides)


def _products(costs: CostModel, stage: int) -> float:
    """Seconds of W without overhead."""
    return costs.of(stage, OpKind.W).seconds - costs.overhead


class _Path(NamedTuple):
    """One microbatch without others in the pipeline, in seconds by stage."""

    forward_start: tuple[float, ...]
    forward_end: tuple[float, ...]
    input_start: tuple[float, ...]
    input_end: tuple[float, ...]


class _Window(NamedTuple):
    begin: float
    """Seconds until it begins, for a microbatch that starts at 0 without others."""
    behind: list[float]
    """End of the last W that waits for each stage's I, in the time of `_Path`."""
    behind_b: list[float]
    """As above, without the stage's own W."""
    has_all: bool
    """Whether the rank does all its work in it, including the last W."""
    begun: _Path
    """The first microbatch's path, which waits for the gathers."""
    exposed: list[float]
    """Seconds of each stage's reduction after its last W or B."""


def _window_of(watched: Sequence[int], stages: Sequence[int], path: _Path, least: _Possible) -> _Window:
    """The time of a step on the rank with the stages `watched`, for this rank or a later one."""
    ends = enumerate(path.input_end)
    finish = (end + least.of(stage, OpKind.W).seconds if stage in watched else 0.0 for stage, end in ends)
    behind = list(accumulate(finish, max))
    own = watched == stages
    behind_b = _behind_b(stages, behind, path) if own else behind
    begin = path.forward_start[watched[0]] - _earliest(least.costs)[watched[0]]
    hidden = ((least.costs.of(stage, kind).seconds for kind in (REDUCE, OpKind.B)) for stage in range(len(behind)))
    exposed = [max(reduction - backward, 0.0) for reduction, backward in hidden]
    return _Window(begin, behind, behind_b, own, path, exposed)


def _behind_b(stages: Iterable[int], behind: list[float], path: _Path) -> list[float]:
    without = list(path.input_end)
    for before, stage in pairwise(stages):
        without[stage] = max(without[stage], behind[before])
    return without


class _Possible(NamedTuple):
    """Least costs of ops within the memory limits."""

    costs: CostModel
    forced: frozenset[int]
    """Stages where I cannot fit. There B counts as I, and W as nothing."""

    def of(self, stage: int, kind: OpKind) -> OpCosts:
        """As `CostModel.of`. A W has no overhead, so that I and W take no longer than B."""
        if stage in self.forced and kind in (OpKind.I, OpKind.W):
            return self.of(stage, OpKind.B) if kind is OpKind.I else OpCosts(0.0)
        cost = self.costs.of(stage, kind)
        if kind not in (OpKind.W, OpKind.B):
            return cost
        whole = _products(self.costs, stage) if kind is OpKind.W else cost.seconds
        return cost._replace(seconds=whole - _hidden(self.costs, stage))

    def saves_by_b(self, stage: int) -> bool:
        return stage not in self.forced and self.costs.saved_by_b(stage) > 0


def _as_possible(placement: Placement, costs: CostModel, limits: Sequence[float] | None) -> _Possible:
    forced = []
    for own, limit in _ranks(placement, limits):
        below = 0.0
        for stage in own:
            below += costs.of(stage, OpKind.F).adds
            i, w = costs.of(stage, OpKind.I), costs.of(stage, OpKind.W)
            if below + max(i.needs, i.adds + w.needs) > limit * (1 + 1e-6) and costs.saved_by_b(stage) > 0:
                forced.append(stage)
    return _Possible(costs, frozenset(forced))


def _earliest(costs: CostModel) -> list[float]:
    """Earliest start of each stage's first F, which ends no earlier than the stage's gather."""
    pairs = ((costs.of(stage, kind).seconds for kind in (GATHER, OpKind.F)) for stage in range(costs.num_stages))
    return [max(gather - forward, 0.0) for gather, forward in pairs]


def _alone(placement: Placement, least: _Possible, earliest: Sequence[float] = ()) -> _Path:
    """F down all stages, none before its `earliest` time, and I up again."""
    rank_of, stages = placement.rank_of, range(placement.num_stages)
    ops = [*((stage, OpKind.F) for stage in stages), *((stage, OpKind.I) for stage in reversed(stages))]
    begins = [*(earliest or [0.0] * len(stages)), *[0.0] * len(stages)]
    times: list[tuple[float, float]] = []
    for (giver, made), (stage, kind), begin in zip([ops[0], *ops[:-1]], ops, begins, strict=True):
        size = least.costs.of(giver, SENDS[made is not OpKind.F]).message
        way = least.costs.transfer(rank_of[giver], rank_of[stage], size)
        start = max(way + (times[-1][1] if times else 0.0), begin)
        times.append((start, start + least.of(stage, kind).seconds))
    down, up = times[: len(stages)], times[: len(stages) - 1 : -1]
    return _Path(*zip(*down, strict=True), *zip(*up, strict=True))


def _ranks(placement: Placement, limits: Sequence[float] | None) -> list[tuple[tuple[int, ...], float]]:
    stages = map(placement.stages_on, range(placement.num_ranks))
    return list(zip(stages, limits or [inf] * placement.num_ranks, strict=True))


def _rank_bound(
    stages: tuple[int, ...], window: _Window, path: _Path, least: _Possible, num_microbatches: int, limit: float
) -> float:
    sizes = [least.of(stage, OpKind.F).adds for stage in stages]
    waiting = [least.of(stage, OpKind.W).frees for stage in stages]
    room = _room(stages, least, limit)
    f, w, backward = (
        [least.of(stage, kind).seconds + (kind is not OpKind.F) * _hidden(least.costs, stage) for stage in stages]
        for kind in (OpKind.F, OpKind.W, OpKind.B)
    )
    forwards = _knapsack(f, sizes, num_microbatches, room.before_backward)
    weights = _knapsack(w, waiting, num_microbatches, room.before_weight)
    # After the last F, the held memory needs I and W, or only W, whichever takes more time for its room.
    backwards = _knapsack(backward, sizes, num_microbatches, room.after_forward)
    if any(waits < size for waits, size in zip(waiting, sizes, strict=True)):
        backwards = min(backwards + weights, num_microbatches * sum(backward))

    begun = window.begun
    first_input = min(begun.input_start[stage] for stage in stages) - window.begin
    lead = max(begun.forward_start[stages[0]] - window.begin, first_input - forwards)
    after_input = min(
        (window.behind_b if room.limited and least.saves_by_b(stage) else window.behind)[stage] - path.input_end[stage]
        for stage in stages
    )
    after_forward = min(window.behind[stages[-1]] - path.forward_end[stage] for stage in stages)
    tail, long_tail = after_input - weights, after_forward - backwards
    if window.has_all:
        tail, long_tail = max(0.0, tail, min(window.exposed[stage] for stage in stages)), max(0.0, long_tail)
    work = num_microbatches * _work(least.costs, stages)
    room_for_all = num_microbatches * sum(sizes) <= room.before_backward * (1 + ROUNDING)
    idle = max(lead + tail, long_tail) if room_for_all else lead + max(tail, long_tail)
    if not (room.limited and window.has_all):
        return work + idle
    begin = begun.forward_start[stages[0]] - window.begin
    lives = num_microbatches * sum(_life(least, path, stage) for stage in stages)
    kept = num_microbatches * sum(_life(least, path, stage, works=False) for stage in stages)
    return max(work + idle, begin + lives / limit, begin + kept / room.for_kept if room.for_kept > 0 else 0.0)


class _Room(NamedTuple):
    """Room for activations within a rank's limit between ops."""

    before_backward: float
    """Room at its first I or B, when only F have run."""
    after_forward: float
    before_weight: float
    for_kept: float
    """Room at any time."""
    limited: bool


def _room(stages: tuple[int, ...], least: _Possible, limit: float) -> _Room:
    def room_during(*kinds: OpKind) -> float:
        return max(0.0, limit - min(least.of(stage, kind).working for stage in stages for kind in kinds))

    sizes = [least.of(stage, OpKind.F).adds for stage in stages]
    kinds = ((stage, OpKind.B if least.saves_by_b(stage) else OpKind.W) for stage in stages)
    first = min(min(least.of(stage, OpKind.I).needs, least.of(stage, kind).needs) for stage, kind in kinds)
    before_backward = max(0.0, min(limit - first, room_during(OpKind.F)))
    # Before its first I a rank holds only whole activations. If I frees nothing, it always does.
    rooms = [room_during(OpKind.F), room_during(OpKind.W), room_during(OpKind.F, OpKind.I)]
    if all(least.of(stage, OpKind.W).frees == size for stage, size in zip(stages, sizes, strict=True)):
        rooms = [_whole(sizes, room) for room in rooms]
    after_forward, before_weight, for_kept = rooms
    return _Room(_whole(sizes, before_backward), after_forward, before_weight, for_kept, 0 < limit < inf)


def _life(least: _Possible, path: _Path, stage: int, works: bool = True) -> float:
    """Memory times duration of a microbatch on a stage, at least. Without working memory unless it `works`."""
    size, waits = least.of(stage, OpKind.F).adds, least.of(stage, OpKind.W).frees

    def while_running(kind: OpKind, held: float) -> float:
        cost = least.of(stage, kind)
        return (held + cost.working * works) * cost.seconds

    forward = size * (path.input_start[stage] - path.forward_start[stage]) + while_running(OpKind.F, 0.0)
    # I counts with the larger of the memory before it and after it.
    split = while_running(OpKind.I, max(size, waits)) + while_running(OpKind.W, waits)
    return forward + (min(split, while_running(OpKind.B, size)) if least.saves_by_b(stage) else split)


def _whole(sizes: Sequence[float], limit: float) -> float:
    """Largest part of the limit that memory of these sizes can fill, if easy to calculate."""
    is_easy = min(sizes) == max(sizes) > 0 and limit < inf
    return floor(limit / sizes[0] + ROUNDING) * sizes[0] if is_easy else limit


def _knapsack(values: Sequence[float], sizes: Sequence[float], count: int, room: float) -> float:
    """Largest value in `room`, of `count` items of each kind, including fractions."""
    total = 0.0
    best_first = sorted(zip(values, sizes, strict=True), key=lambda each: each[0] / (each[1] or 1e-300), reverse=True)
    for value, size in best_first:
        taken = min(count, room / size) if size else count
        total += taken * value
        room -= taken * size
    return total
