"""InterleavedZeroBubble with zbpipe's split of the backward, for any activation checkpointing and torch.compile.

torch's name InterleavedZeroBubble means torch's class with torch's split, which fails under selective checkpointing and
torch.compile. With `Split` behind it, zbpipe runs the same order.
"""

from dataclasses import replace

from zbpipe.algorithms.interleaved_zero_bubble import interleaved_zero_bubble
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import register


@register(
    "InterleavedZeroBubbleSplit",
    stages_per_rank=2,
    summary="InterleavedZeroBubble's order with zbpipe's split, which works under any checkpointing",
)
def interleaved_zero_bubble_split(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """InterleavedZeroBubble's order.

    >>> print(interleaved_zero_bubble_split(2, 2))
    rank 0: 0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    return replace(interleaved_zero_bubble(ranks, microbatches, stages_per_rank), name="InterleavedZeroBubbleSplit")
