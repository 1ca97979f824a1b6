"""Interleaved 1F1B (Megatron-LM, 2104.04473, section 2.2): v stages per rank make the bubble v times smaller."""

from collections.abc import Iterator
from itertools import chain, zip_longest

from zbpipe.ir import Op, OpKind, Placement, Schedule
from zbpipe.registry import register


@register(
    "Interleaved1F1B",
    stages_per_rank=2,
    source="torch",
    summary="1F1B over v stages per rank: a v times smaller bubble",
)
def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Megatron's order. Rank r warms up with (v - 1) p + 2 (p - r - 1) + 1 forwards, then one backward, one forward.

    Microbatches go through a rank's stages in groups of p. If p does not divide m, the order for the next multiple is
    taken and the microbatches that the job does not have are left out.
    """
    placement = Placement.loop(ranks, stages_per_rank)
    drawn = -(-microbatches // ranks) * ranks
    rows = []
    for rank in range(ranks):
        forwards = list(in_groups(placement.stages_on(rank), OpKind.F, drawn, ranks))
        backwards = in_groups(placement.stages_on(rank)[::-1], OpKind.B, drawn, ranks)
        warmup = (stages_per_rank - 1) * ranks + 2 * (ranks - rank - 1) + 1
        steady = chain.from_iterable(zip_longest(backwards, forwards[warmup:]))
        rows.append(
            tuple(op for op in chain(forwards[:warmup], steady) if op is not None and op.microbatch < microbatches)
        )
    return Schedule("Interleaved1F1B", placement, microbatches, tuple(rows))


def in_groups(stages: tuple[int, ...], kind: OpKind, microbatches: int, group: int) -> Iterator[Op]:
    """So many microbatches through the first of the stages, the same ones through the next, then the next group."""
    for begin in range(0, microbatches, group):
        for stage in stages:
            for microbatch in range(begin, min(begin + group, microbatches)):
                yield Op(stage, kind, microbatch)
