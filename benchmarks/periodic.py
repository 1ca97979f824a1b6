"""Whether one pattern, repeated for each microbatch, keeps all ranks of a V busy within a memory limit: all are tried.

python benchmarks/periodic.py 8 1 2 1 9 8    # 8 ranks; F, I, W of a stage; limit, in stages; period

Times are whole numbers. On a rank the pattern is three distances: from the F of its first stage to the F of its second,
from there to the I of that, and from there to the I of the first. From one rank to the next the first and the last of
them shrink by what the ops take, the middle one grows, and an op that waits changes two of them by one. So the
distances that a rank can have follow from those of the rank before. Where the period is the work of a rank, all ops are
on a grid, and the answer holds for all times. Needs numba.
"""

from __future__ import annotations

import sys
from itertools import product

import numba
import numpy as np
import numpy.typing as npt

Possible = npt.NDArray[np.bool_]


@numba.njit  # type: ignore[untyped-decorator]
def reachable(possible: Possible, begin: Possible, f: int, i: int) -> Possible:
    """The distances of the next rank, from those of this one."""
    first, middle, last = possible.shape
    found = np.zeros_like(begin)
    for p in range(first - 1, -1, -1):
        for r in range(last - 1, -1, -1):
            for q in range(middle):
                if p + 2 * f < first and r + 2 * i < last and q >= f + i and begin[p + 2 * f, q - f - i, r + 2 * i]:
                    found[p, q, r] = True
                if p + 1 < first and (found[p + 1, q, r] or (q and found[p + 1, q - 1, r])):
                    found[p, q, r] = True
                if r + 1 < last and (found[p, q, r + 1] or (q and found[p, q - 1, r + 1])):
                    found[p, q, r] = True
    return found & possible


def free_slots(taken: set[int], seconds: int, period: int, since: int) -> list[int]:
    """When an op can start within the next period."""
    return [at for at in range(since, since + period) if not taken & {(at + n) % period for n in range(seconds)}]


def least_peak(starts: tuple[int, int, int, int], f: int, i: int, w: int, period: int) -> float:
    """The least peak of what a rank holds with these starts of F, F, I, I: by where the two W go."""
    slots = [(at + n) % period for at, length in zip(starts, (f, f, i, i), strict=True) for n in range(length)]
    taken, best = set(slots), float("inf")
    if len(taken) < len(slots):
        return best
    first, second, inner, outer = starts
    for weight in free_slots(taken, w, period, inner + i):
        busy = taken | {(weight + n) % period for n in range(w)}
        for other in free_slots(busy, w, period, outer + i):
            lives = ((first, other + w), (second, weight + w))
            held = [
                sum(-((end - begin - (at - begin) % period) // -period) for begin, end in lives)
                for at in (first, second)
            ]
            best = min(best, max(held))
    return best


def main() -> None:
    ranks, f, i, w, limit, period = map(int, sys.argv[1:])
    most = limit * period
    shape = (most, most // 2, most)
    possible = np.zeros(shape, np.bool_)
    for residues in product(range(period), repeat=3):
        p, q, r = residues
        if least_peak((0, p, p + q, p + q + r), f, i, w, period) == float("inf"):
            continue
        for each in product(*(range(n, size, period) for n, size in zip(residues, shape, strict=True))):
            p, q, r = each
            if min(p - f, q - f, r - i) >= 0 and p + 2 * q + r + 2 * i + 2 * w <= most:
                possible[each] = least_peak((0, p, p + q, p + q + r), f, i, w, period) <= limit
    reached = possible
    for rank in range(1, ranks):
        reached = reachable(possible, reached, f, i)
        if not reached.any():
            print(f"no pattern: rank {rank} cannot follow the ranks before it")
            return
    print(f"a pattern every {period} exists")


if __name__ == "__main__":
    main()
