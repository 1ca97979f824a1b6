"""V-Half (Pipeline Parallelism with Controllable Memory, 2405.15362, section 4.2): half of 1F1B's memory and bubble."""

from zbpipe.algorithms._v_block import Block, repeat
from zbpipe.ir import Schedule
from zbpipe.registry import register


@register("VHalf", placement="v", stages_per_rank=2, summary="about half of 1F1B's memory and half of its bubble")
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Blocks with offsets 2 and 1. At most (p + 2) // 2 microbatches' activations per rank."""
    even = ranks % 2 == 0
    block = Block(down=2, up=1, turn_f=2, turn_loss=4 if even else 1, turn_i=1)
    return repeat("VHalf", block, ranks, microbatches)
