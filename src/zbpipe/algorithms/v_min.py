"""V-Min (Pipeline Parallelism with Controllable Memory, 2405.15362, section 4.2): a third of 1F1B's memory."""

from zbpipe.algorithms._v_block import Block, repeat
from zbpipe.ir import Schedule
from zbpipe.registry import register


@register("VMin", placement="v", stages_per_rank=2, summary="a third of 1F1B's memory, two thirds of its bubble")
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Blocks with offsets 1 and 1. At most (p + 4) // 3 microbatches' activations per rank."""
    threefold = ranks % 3 == 0
    block = Block(down=1, up=1, turn_f=1, turn_loss=3 if threefold else 1, turn_i=1)
    return repeat("VMin", block, ranks, microbatches)
