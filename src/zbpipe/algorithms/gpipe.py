"""GPipe (arXiv 1811.06965, section 2): all forwards, then all backwards.

The simplest schedule, as a reference. It holds the activations of every microbatch, so it suits few microbatches or
full recomputation.
"""

from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register


@register("GPipe", source="torch", summary="all forwards, then all backwards; holds all m activations")
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Every rank runs its m forwards and then its m full backwards.

    >>> print(gpipe(2, 3))
    rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
    rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
    """
    rows = tuple(
        tuple(Op(rank, kind, microbatch) for kind in (OpKind.F, OpKind.B) for microbatch in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("GPipe", Placement.loop(ranks), microbatches, rows)
