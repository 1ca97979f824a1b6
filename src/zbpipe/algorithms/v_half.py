"""V-Half (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4.2).

Half of 1F1B's activations and about half of its bubble: for models that do not fit otherwise, or for longer sequences.
With checkpointing, deferred gradients add to that, and on few ranks they outweigh it. ZB with a memory
limit defers less.
"""

from zbpipe.algorithms._v_block import Block, repeat
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import register


@register(
    "VHalf", placement="v", stages_per_rank=2, summary="half of 1F1B's activations and bubble, and deferred gradients"
)
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Blocks with offsets 2 and 1. At most (p + 2) // 2 microbatches' activations per rank.

    >>> print(v_half(2, 2))
    rank 0: 0F0 3F0 0F1 3I0 3W0 3F1 3I1 0I0 0W0 0I1 3W1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    even = ranks % 2 == 0
    block = Block(down=2, up=1, turn_f=2, turn_loss=4 if even else 1, turn_i=1)
    return repeat("VHalf", block, ranks, microbatches)
