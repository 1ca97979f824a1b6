"""Interleaved1F1B with dW split off, after torch's ScheduleInterleavedZeroBubble, for any number of microbatches.

The idea is that of ZB-H1 (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3), extended to several stages
per rank. torch's class runs it, with torch's split of the backward, which fails under selective checkpointing and
torch.compile. With the suffix `Split`, zbpipe runs the same order with its own split, for any checkpointing.
"""

from dataclasses import replace

from zbpipe.algorithms.interleaved_1f1b import interleave
from zbpipe.algorithms.zbh1 import i_w_f
from zbpipe.schedule.ir import OpKind, Placement, Schedule
from zbpipe.schedule.registry import register


@register("InterleavedZeroBubble", stages_per_rank=2, source="torch", summary="Interleaved1F1B with torch's own split")
def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Rank r warms up with (v - 1) g + p - r forwards, then runs I, W and F alternately, with W r ops behind I.

    Microbatches go through a rank's stages in groups of g, as in Interleaved1F1B.

        >>> print(interleaved_zero_bubble(2, 2))
        rank 0: 0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1: 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    placement = Placement.loop(ranks, stages_per_rank)
    rows = []
    for rank, (forwards, inputs, shared) in enumerate(interleave(placement, microbatches, OpKind.I)):
        warmup = shared + ranks - rank
        rows.append((*forwards[:warmup], *i_w_f(inputs, forwards[warmup:], rank)))
    return Schedule("InterleavedZeroBubble", placement, microbatches, tuple(rows))


@register(
    "InterleavedZeroBubbleSplit",
    stages_per_rank=2,
    summary="InterleavedZeroBubble's order with zbpipe's split, which works under any checkpointing",
)
def interleaved_zero_bubble_split(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """The order of InterleavedZeroBubble."""
    return replace(interleaved_zero_bubble(ranks, microbatches, stages_per_rank), name="InterleavedZeroBubbleSplit")
