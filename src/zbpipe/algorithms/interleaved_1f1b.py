"""1F1B over v stages per rank (Megatron-LM, arXiv 2104.04473, section 2.2).

The bubble is v times smaller, at the price of v times as many messages and some more memory. Use it where the backward
cannot be split. Otherwise take ZBLoop, whose step is never longer, in less memory.
"""

from collections.abc import Iterator
from itertools import pairwise

from zbpipe.algorithms.one_f_one_b import b_f
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register


@register(
    "Interleaved1F1B",
    stages_per_rank=2,
    source="torch",
    summary="1F1B over v stages per rank: a v times smaller bubble",
)
def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Megatron's order. Rank r warms up with (v - 1) g + 2 (p - r - 1) + 1 forwards, then alternates B and F.

    Microbatches go through a rank's stages in groups of g = p. If p does not divide m, the groups are somewhat larger.

        >>> print(interleaved_1f1b(2, 2))
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    placement = Placement.loop(ranks, stages_per_rank)
    rows = tuple(
        b_f(forwards, backwards, warmup + 2 * (ranks - rank - 1) + 1)
        for rank, (forwards, backwards, warmup) in enumerate(interleave(placement, microbatches, OpKind.B))
    )
    return Schedule("Interleaved1F1B", placement, microbatches, rows)


def interleave(placement: Placement, microbatches: int, backward: OpKind) -> Iterator[tuple[list[Op], list[Op], int]]:
    """For each rank: its forwards, its backwards of this kind, and the (v - 1) g forwards common to all warm-ups."""
    groups = split_into_groups(microbatches, placement.num_ranks)
    for rank in range(placement.num_ranks):
        stages = placement.stages_on(rank)
        forwards, backwards = in_groups(stages, OpKind.F, groups), in_groups(stages[::-1], backward, groups)
        yield list(forwards), list(backwards), (len(stages) - 1) * len(groups[0])


def split_into_groups(microbatches: int, ranks: int) -> list[range]:
    """Group sizes of at least p, as even as possible, larger groups first. One group if m < p."""
    count = max(1, microbatches // ranks)
    small, larger = divmod(microbatches, count)
    ends = [group * small + min(group, larger) for group in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def in_groups(stages: tuple[int, ...], kind: OpKind, groups: list[range]) -> Iterator[Op]:
    """One group of microbatches through each stage, then the next group."""
    for group in groups:
        for stage in stages:
            for microbatch in group:
                yield Op(stage, kind, microbatch)
