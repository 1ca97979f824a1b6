"""V-Min (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4.2).

A third of 1F1B's activations, and two thirds of its bubble where F, I and W take equal time. With checkpointing, I is
longer, so a step is longer than with 1F1B, and deferred gradients add memory. ZB with a memory
limit defers less.
"""

from zbpipe.algorithms._v_block import Block, repeat
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import register


@register(
    "VMin",
    placement="v",
    stages_per_rank=2,
    summary="a third of 1F1B's activations, and deferred gradients; long where I is",
)
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Blocks with offsets 1 and 1. At most (p + 4) // 3 microbatches' activations per rank.

    >>> print(v_min(2, 2))
    rank 0: 0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1
    rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
    """
    threefold = ranks % 3 == 0
    block = Block(down=1, up=1, turn_f=1, turn_loss=3 if threefold else 1, turn_i=1)
    return repeat("VMin", block, ranks, microbatches)
