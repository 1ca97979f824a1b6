"""DualPipeV with zbpipe's split of the backward, for any activation checkpointing and torch.compile.

torch's name DualPipeV means torch's class with torch's split, which fails under selective checkpointing and
torch.compile. With `Split` behind it, zbpipe runs the same order.
"""

from dataclasses import replace

from zbpipe.algorithms.dualpipe_v import dualpipe_v
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import register


@register(
    "DualPipeVSplit",
    placement="v",
    stages_per_rank=2,
    summary="DualPipeV's order with zbpipe's split, which works under any checkpointing",
)
def dualpipe_v_split(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV's order.

    >>> print(dualpipe_v_split(2, 2))
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 3B1 0B0 0B1
    rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    return replace(dualpipe_v(ranks, microbatches), name="DualPipeVSplit")
