"""One forward, one backward (PipeDream-Flush, arXiv 2006.09503, section 3; Megatron-LM, arXiv 2104.04473, section 2.2).

The default in most trainers, and the baseline for all other schedules. Memory is bounded by the number of ranks. Only
more microbatches reduce the bubble's share of the step.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register


@register("1F1B", source="torch", summary="one forward, one backward; at most p activations")
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs p - r forwards, then alternates full backwards and forwards, then runs the remaining backwards.

    >>> print(one_f_one_b(2, 3))
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    rows = []
    for rank in range(ranks):
        forwards, backwards = ([Op(rank, kind, n) for n in range(microbatches)] for kind in (OpKind.F, OpKind.B))
        rows.append(b_f(forwards, backwards, warmup=ranks - rank))
    return Schedule("1F1B", Placement.loop(ranks), microbatches, tuple(rows))


def b_f(forwards: Sequence[Op], backwards: Iterable[Op], warmup: int) -> tuple[Op, ...]:
    """`warmup` forwards, then a backward and a forward alternately, then the remaining backwards."""
    in_turn = chain.from_iterable(zip_longest(backwards, forwards[warmup:]))
    return (*forwards[:warmup], *filter(None, in_turn))
