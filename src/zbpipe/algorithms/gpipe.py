"""GPipe (1811.06965, section 2): all forwards, then all backwards."""

from zbpipe.ir import Op, OpKind, Placement, Schedule
from zbpipe.registry import register


@register("GPipe", source="torch", summary="all forwards, then all backwards; holds all m activations")
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Every rank runs its m forwards and then its m full backwards."""
    rows = tuple(
        tuple(Op(rank, kind, microbatch) for kind in (OpKind.F, OpKind.B) for microbatch in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("GPipe", Placement.loop(ranks), microbatches, rows)
