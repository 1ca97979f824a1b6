"""Times that no schedule can beat: lower bounds from work, dependencies and memory.

Every rank has to do its work, and it cannot be busy all the time:

- It waits for its first input.
- Before its first I it can only run F, and no more of them than its memory holds. One microbatch takes its time to go
  down the stages and up again to this rank; if the F that fit do not last so long, the rank idles.
- After its last F it can only run I and W of what it holds by then, and after its last I only W, while that last
  microbatch goes the rest of its way to the first stage.

Before its first I and after its last I are different times, and so are before its first I and after its last F, unless
the rank has room for all microbatches at once. Besides, what activations take times how long they live has to fit into
memory times time (Little's law).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import floor, inf
from typing import NamedTuple

from zbpipe.costs import CostModel
from zbpipe.ir import Placement


def lower_bound(
    placement: Placement, costs: CostModel, num_microbatches: int, limits: Sequence[float] | None = None
) -> float:
    """Seconds of a synchronous step that no order of the ops can beat.

        >>> placement = Placement.v(4)
        >>> lower_bound(placement, CostModel.uniform(placement), num_microbatches=8)
        25.5

    Args:
        placement: where the stages are.
        costs: for its stages.
        num_microbatches: from 1 on.
        limits: what each rank may hold, in the unit of `costs.activations`; default: any amount. Where I takes more
            than it frees, a full backward may need less memory; the bound ignores that.
    """
    path = _alone(placement, costs)
    finish = [end + w for end, w in zip(path.input_end, costs.w, strict=True)]
    # The last W there can be behind an I: of its own stage, or of one to which the gradient still has to go.
    behind = list(accumulate(finish, max))
    ranks = (
        _rank_bound(stages, _Window(0.0, behind), path, costs, num_microbatches, limit)
        for stages, limit in _ranks(placement, limits)
    )
    return max(behind[-1], *ranks)


def span_bound(
    placement: Placement, costs: CostModel, num_microbatches: int, limits: Sequence[float] | None = None
) -> float:
    """The same for the longest time from a rank's first op to its last, whatever the other ranks do meanwhile.

    >>> placement = Placement.loop(4)
    >>> span_bound(placement, CostModel.uniform(placement), num_microbatches=8)
    24.0
    """
    path = _alone(placement, costs)
    longest = 0.0
    for stages, limit in _ranks(placement, limits):
        behind = [0.0] * costs.num_stages
        latest = 0.0
        for stage in stages:
            latest = max(latest, path.input_end[stage] + costs.w[stage])
            behind[stage] = latest
        window = _Window(path.forward_start[stages[0]], behind)
        longest = max(longest, _rank_bound(stages, window, path, costs, num_microbatches, limit))
    return longest


class _Path(NamedTuple):
    """One microbatch alone in the pipeline: seconds by stage."""

    forward_start: list[float]
    forward_end: list[float]
    input_start: list[float]
    input_end: list[float]


class _Window(NamedTuple):
    """The time in question."""

    begin: float
    """Seconds after which it begins if a microbatch begins alone."""
    behind: list[float]
    """By stage: the end of the last W that has to wait for its I, in the time of `_Path`."""


def _alone(placement: Placement, costs: CostModel) -> _Path:
    """F down all stages and I up again: repeats the rule of `ir.inputs`, and a test holds it against the simulator."""
    rank_of, stages = placement.rank_of, range(costs.num_stages)
    path = _Path([], [], [0.0] * len(stages), [0.0] * len(stages))
    now = 0.0
    for stage in stages:
        now += costs.transfer(rank_of[stage - 1], rank_of[stage]) if stage else 0.0
        path.forward_start.append(now)
        now += costs.f[stage]
        path.forward_end.append(now)
    for stage in reversed(stages):
        now += costs.transfer(rank_of[stage + 1], rank_of[stage]) if stage < stages[-1] else 0.0
        path.input_start[stage] = now
        now += costs.i[stage]
        path.input_end[stage] = now
    return path


def _ranks(placement: Placement, limits: Sequence[float] | None) -> list[tuple[tuple[int, ...], float]]:
    stages = [placement.stages_on(rank) for rank in range(placement.num_ranks)]
    return list(zip(stages, limits or [inf] * placement.num_ranks, strict=True))


def _rank_bound(
    stages: tuple[int, ...], window: _Window, path: _Path, costs: CostModel, num_microbatches: int, limit: float
) -> float:
    sizes = [costs.activations[stage] for stage in stages]
    waiting = [costs.waits(stage) for stage in stages]
    # Before its first I a rank holds whole activations only, and where I changes nothing it always does.
    whole = _whole(sizes, limit)
    if waiting == sizes:
        limit = whole

    f = [costs.f[stage] for stage in stages]
    i = [costs.i[stage] for stage in stages]
    w = [costs.w[stage] for stage in stages]
    backward = [a + b for a, b in zip(i, w, strict=True)]
    forwards = _knapsack(f, sizes, num_microbatches, whole)
    weights = _knapsack(w, waiting, num_microbatches, limit)
    # Of what is held after the last F either I and W are left or only W, whichever takes more time for its room.
    backwards = _knapsack(backward, sizes, num_microbatches, limit)
    if any(waits < size for waits, size in zip(waiting, sizes, strict=True)):
        backwards = min(backwards + weights, num_microbatches * sum(backward))

    first_input = min(path.input_start[stage] for stage in stages) - window.begin
    lead = max(path.forward_start[stages[0]] - window.begin, first_input - forwards)
    after_input = min(window.behind[stage] - path.input_end[stage] for stage in stages)
    after_forward = min(window.behind[stages[-1]] - path.forward_end[stage] for stage in stages)
    tail, long_tail = max(0.0, after_input - weights), max(0.0, after_forward - backwards)
    work = num_microbatches * sum(f + backward)
    room_for_all = num_microbatches * sum(sizes) <= limit * (1 + 1e-9)
    idle = max(lead + tail, long_tail) if room_for_all else lead + max(tail, long_tail)
    if not 0 < limit < inf:
        return work + idle
    # I holds the more of what is there before it and after it.
    lives = (
        size * (path.input_start[stage] - path.forward_start[stage])
        + max(size, waits) * costs.i[stage]
        + waits * costs.w[stage]
        for stage, size, waits in zip(stages, sizes, waiting, strict=True)
    )
    return max(work + idle, path.forward_start[stages[0]] - window.begin + num_microbatches * sum(lives) / limit)


def _whole(sizes: Sequence[float], limit: float) -> float:
    """The most that things of these sizes can fill of the limit, where that is easy to tell."""
    if min(sizes) == max(sizes) > 0 and limit < inf:
        return floor(limit / sizes[0] + 1e-9) * sizes[0]
    return limit


def _knapsack(values: Sequence[float], sizes: Sequence[float], count: int, room: float) -> float:
    """The most value that fits into `room`, of `count` things of each kind, of which parts may be taken."""
    total = 0.0
    kinds = sorted(
        zip(values, sizes, strict=True), key=lambda kind: kind[0] / kind[1] if kind[1] else inf, reverse=True
    )
    for value, size in kinds:
        taken = min(count, room / size) if size else count
        total += taken * value
        room -= taken * size
    return total
