"""Microbatches of nearly equal time, from samples of different lengths, in the order with the shortest step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbpipe.costs.job import as_cost_model
from zbpipe.costs.model import ROUNDING, CostModel
from zbpipe.costs.numbers import Size
from zbpipe.costs.transformer import LLAMA_3_8B
from zbpipe.schedule.ir import Placement, Schedule, count_noun, require_whole
from zbpipe.simulator.time_graph import TimeGraph, durations, last_end
from zbpipe.simulator.validation import require_schedule

_BALANCED = 1.002
"""Ratio of the longest microbatch to the mean from which samples no longer change places."""
_MOST_SWAPS, _ROUNDS = 512, 16
"""Orders that are timed at once, and the most times that the best one is changed."""
_FEW = 5
"""Number of microbatches of which all orders are timed."""
_SHORTER = 1 - 1e-4
_BACKWARD = 2.5
"""Operations of attention's backward, relative to its forward."""

Bin = list[int]


class Microbatch(NamedTuple):
    samples: tuple[int, ...]
    """Its samples, as indices of `lengths`."""
    tokens: int
    squares: int
    """Sum of its samples' squared lengths."""

    @property
    def size(self) -> Size:
        """Its size for `CostModel.sizes`."""
        return Size(self.tokens, self.squares)


def pack(
    lengths: Sequence[int],
    *,
    tokens: int | None = None,
    microbatches: int | None = None,
    ranks: int = 1,
    schedule: Schedule | None = None,
    costs: CostModel | None = None,
) -> list[list[Microbatch]]:
    """Pack samples into microbatches that take nearly equal time: a list of microbatches for each data-parallel rank.

        >>> ((one, other),) = pack([900, 500, 400, 300, 100], tokens=1200)
        >>> one.samples, other.samples, other.tokens
        ((0, 4), (1, 2, 3), 1200)

    All ranks get the same number of microbatches. The result depends on the arguments alone, so each rank can call it.

    Args:
        lengths: tokens of each sample of a step.
        tokens: most tokens of a microbatch. Default: no limit.
        microbatches: number on each rank. Default: as few as `tokens` allows, or that of `schedule`.
        ranks: number of data-parallel ranks.
        schedule: the schedule whose step is to be short. Microbatches are in the order that simulates shortest, or
            without a schedule with the smallest ones first and last.
        costs: costs of the schedule's stages, with the share of `attention`. Default: equal stages of a Llama 3 8B.

    ValueError for samples that do not fit, and for fewer samples than microbatches.
    """
    sizes = _read(lengths)
    given = {"tokens": tokens, "microbatches": microbatches, "ranks": ranks}
    require_whole(1, **{name: each for name, each in given.items() if each is not None})
    if tokens is None and microbatches is None and schedule is None:
        raise ValueError("pack needs a limit: give tokens, the most of a microbatch, or microbatches, their number")
    if tokens is not None and max(sizes) > tokens:
        at = sizes.index(max(sizes))
        raise ValueError(f"sample {at} has {sizes[at]} tokens, above tokens = {tokens}: cut it, or give a larger limit")
    if schedule is not None:
        require_schedule(schedule)
        if microbatches not in (None, schedule.num_microbatches):
            raise ValueError(
                f"microbatches = {microbatches}, but {schedule.name} has {schedule.num_microbatches}: omit one of them"
            )
        microbatches = schedule.num_microbatches
    costs = _known_costs(costs, schedule, sizes)
    weigh = _weigher(costs, sizes)
    bins = _fill(sizes, [weigh(each, each * each) for each in sizes], tokens, microbatches, ranks)
    found = [
        Microbatch(tuple(sorted(each)), sum(sizes[n] for n in each), sum(sizes[n] ** 2 for n in each)) for each in bins
    ]
    found.sort(key=lambda each: (weigh(each.tokens, each.squares), each))
    # Back and forth, so that all ranks get equal work.
    rounds = [found[at : at + ranks][:: 1 if at // ranks % 2 else -1] for at in range(0, len(found), ranks)]
    of_ranks = (list(each) for each in zip(*rounds, strict=True))
    return [_arrange(each, schedule, costs) for each in of_ranks]


def _read(lengths: Sequence[int]) -> list[int]:
    given: Any = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    if not isinstance(given, (tuple, list)) or not given:
        raise ValueError(
            f"pack cannot have lengths = {given!r}: give the tokens of each sample, for example [900, 300]"
        )
    for number, each in enumerate(given):
        if type(each) is not int or each < 1:
            raise ValueError(f"sample {number} has {each!r} tokens: give a whole number above 0, or omit the sample")
    return list(given)


def _known_costs(costs: CostModel | None, schedule: Schedule | None, sizes: Sequence[int]) -> CostModel:
    placement = schedule.placement if schedule else Placement.loop(1)
    if costs is not None:
        return costs if schedule is None and isinstance(costs, CostModel) else as_cost_model(costs, placement)
    block, length = LLAMA_3_8B, sum(each * each for each in sizes) / sum(sizes)
    attention = (1 + _BACKWARD) * block.queries * length
    products = block.parameters - 2 * block.dim
    share = attention / (2 * products + attention)
    return CostModel.uniform(placement, w=1 - share, attention=share)


def _weigher(costs: CostModel, sizes: Sequence[int]) -> Callable[[int, int], float]:
    """The work of a microbatch in all stages, by its tokens and squares."""
    unit = costs.of_size or Size(sum(sizes), sum(each * each for each in sizes))
    both = [f + i for f, i in zip(costs.f, costs.i, strict=True)]
    attention = sum(each * share for each, share in zip(both, costs.by_stage(costs.attention), strict=True))
    products = sum((*both, *costs.w)) - attention
    return lambda tokens, squares: products * tokens / unit.tokens + attention * squares / unit.squares or tokens


def _fill(
    sizes: Sequence[int], work: Sequence[float], tokens: int | None, microbatches: int | None, ranks: int
) -> list[Bin]:
    """The samples of each microbatch of all ranks: of two ways the one with the least longest microbatch."""
    most = tokens or sum(sizes)
    in_turn = _take_in_turn(sizes, most)
    number = ranks * (microbatches or -(-sum(sizes) // (most * ranks)))
    while not (starts := [*_spread(sizes, work, most, number), *([in_turn] if len(in_turn) <= number else ())]):
        if microbatches is not None:
            raise ValueError(
                f"microbatches = {microbatches} of tokens = {tokens} on {count_noun(ranks, 'rank')} do not hold"
                f" {sum(sizes)} tokens in {count_noun(len(sizes), 'sample')}: give"
                f" {-(-len(in_turn) // ranks)} microbatches, or more tokens"
            )
        number += ranks
    if len(sizes) < number:
        raise ValueError(
            f"{count_noun(len(sizes), 'sample')} cannot fill {number} microbatches ({number // ranks} on each of"
            f" {count_noun(ranks, 'rank')}), and none may be empty: give more samples, or fewer microbatches"
        )
    found = [_exchange([*bins, *([] for _ in range(number - len(bins)))], sizes, work, most) for bins in starts]
    return min(found, key=lambda bins: max(sum(work[n] for n in each) for each in bins))


def _take_in_turn(sizes: Sequence[int], most: int) -> list[Bin]:
    bins, room = list[Bin](), 0
    for sample, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = most
        bins[-1].append(sample)
        room -= size
    return bins


def _spread(sizes: Sequence[int], work: Sequence[float], most: int, number: int) -> Iterator[list[Bin]]:
    """Each sample, those with most work first, in the microbatch with the least work that has room. Nothing if there is
    none."""
    bins: list[Bin] = [[] for _ in range(number)]
    done, room = [0.0] * number, [most] * number
    for sample in sorted(range(len(sizes)), key=lambda n: -work[n]):
        at = min(range(number), key=lambda at: (room[at] < sizes[sample], done[at]))
        bins[at].append(sample)
        done[at] += work[sample]
        room[at] -= sizes[sample]
    if min(room) >= 0:
        yield bins


def _exchange(bins: list[Bin], sizes: Sequence[int], work: Sequence[float], most: int) -> list[Bin]:
    """Move or exchange samples between the longest microbatch and another, while that makes it shorter."""
    bins, done, nothing = [*map(list, bins)], list[Bin](), len(sizes)
    sizes, work = [*sizes, 0], [*work, 0.0]

    def total(samples: Bin, of: Sequence[float] = work) -> float:
        return sum(of[n] for n in samples)

    for _ in range(4 * len(bins)):
        *lower, high = bins = sorted(bins, key=total)
        if not lower or (lower[0] and total(high) * len(bins) <= _BALANCED * sum(map(total, bins))):
            break
        for low in lower:
            apart = total(high) - total(low)
            least, room = total(high, sizes) - most, most - total(low, sizes)
            trades = (
                (abs(apart - 2 * (work[one] - work[other])), one, other)
                for one in high
                for other in (*low, nothing)
                if least <= sizes[one] - sizes[other] <= room
            )
            after, one, other = min(trades, default=(apart, nothing, nothing))
            if after < apart * (1 - ROUNDING):
                high[:] = [each for each in (*high, other) if each not in (one, nothing)]
                low[:] = [each for each in (*low, one) if each != other]
                break
        else:
            done.append(bins.pop())
    return bins + done


def _arrange(microbatches: list[Microbatch], schedule: Schedule | None, costs: CostModel) -> list[Microbatch]:
    """The microbatches, given from the least to the most work, in the order with the shortest step."""
    number = len(microbatches)
    order = np.array([*range(0, number, 2), *reversed(range(1, number, 2))])
    if schedule is not None:
        order = _find_order(schedule, replace(costs, sizes=tuple(each.size for each in microbatches)), order)
    return [microbatches[each] for each in order]


def _find_order(schedule: Schedule, costs: CostModel, hilly: NDArray[np.int64]) -> NDArray[np.int64]:
    """The shortest of all permutations of the microbatches if these are few, else one that no exchange shortens."""
    graph, number = TimeGraph(schedule), schedule.num_microbatches
    seconds = np.array([durations(graph, each) for each in costs.by_microbatch])

    def steps(orders: NDArray[np.int64]) -> NDArray[np.float64]:
        def seconds_of(node: int) -> Any:
            return seconds[orders[:, graph.nodes[node][2]], node]

        return np.asarray(last_end(graph, seconds_of, np.maximum))

    pairs = np.array([*combinations(range(number), 2)])
    random = np.random.default_rng(0)
    rising = np.arange(number)
    starts = np.array([hilly, rising, rising[::-1]] if number > _FEW else [*permutations(rising)])
    found = steps(starts)
    best: NDArray[np.int64] = starts[found.argmin()]
    shortest = found.min()
    for _ in range(_ROUNDS if number > 1 else 0):
        swapped = random.permutation(pairs)[:_MOST_SWAPS]
        trials = np.repeat(best[None], len(swapped), axis=0)
        np.put_along_axis(trials, swapped, best[swapped[:, ::-1]], axis=1)
        found = steps(trials)
        if found.min() >= shortest * _SHORTER:
            break
        best, shortest = trials[found.argmin()], found.min()
    return best
