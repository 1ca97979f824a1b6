"""ZB-V (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6): two stages per rank, in a V.

Only the skew at the start is left of the bubble if F, I and W take equal time. Without checkpointing it takes 1F1B's
memory. With checkpointing, deferred gradients take more memory than activations: ZBV takes about twice 1F1B's memory
under TorchTitan's selective checkpointing, and many times as much under full checkpointing. Try ZB first, which
stays within 1F1B's memory.

Stage r goes down the ranks and stage 2p - 1 - r comes up again, so rank 0 holds the first and the last stage. The
backward of a microbatch starts on the rank where its forward began. Each rank can fill its idle time with the W of
either stage.

torch's name ZBVZeroBubble selects torch's class, with torch's split of the backward, for comparison.
"""

from collections.abc import Iterator
from itertools import count

from zbpipe.planner.search import find_best_within
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register

F, I, W = OpKind.F, OpKind.I, OpKind.W  # noqa: E741


@register(
    "ZBV",
    placement="v",
    stages_per_rank=2,
    summary="no bubble if F, I and W take equal time; 1F1B's activations, and deferred gradients",
)
def zbv(ranks: int, microbatches: int) -> Schedule:
    """The schedule of the paper's figure 6, for any number of ranks and microbatches.

    The figure needs 2p - 1 microbatches to fill the V. With fewer, the result is the better of two: this order without
    the missing microbatches, or list scheduling, in which each rank runs a ready op, I first and W last.

        >>> print(zbv(2, 2))
        rank 0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 2W1 1W0 1W1
    """
    schedule = _draw_cut_down("ZBV", ranks, microbatches)
    if microbatches >= 2 * ranks - 1:
        return schedule
    return find_best_within("ZBV", schedule.placement, microbatches, ranks, seeds=[schedule])


@register(
    "ZBVZeroBubble",
    placement="v",
    stages_per_rank=2,
    source="torch",
    summary="torch's ZB-V with torch's own split, which fails under selective checkpointing",
)
def zbv_zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """With fewer than 2p - 1 microbatches, the order for 2p - 1 without those that the job lacks.

    >>> print(zbv_zero_bubble(2, 2))
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
    """
    return _draw_cut_down("ZBVZeroBubble", ranks, microbatches)


def _draw_cut_down(name: str, ranks: int, microbatches: int) -> Schedule:
    """The figure for at least 2p - 1 microbatches, without those that the job lacks."""
    drawn = max(microbatches, 2 * ranks - 1)
    rows = tuple(
        tuple(op for op in _drawing(rank, ranks, drawn) if op.microbatch < microbatches) for rank in range(ranks)
    )
    return Schedule(name, Placement.v(ranks), microbatches, rows)


def _drawing(rank: int, ranks: int, microbatches: int) -> Iterator[Op]:
    """One row of the paper's figure, for at least 2p - 1 microbatches."""
    down, up = rank, 2 * ranks - 1 - rank
    next_microbatch = {(stage, kind): count() for stage in (down, up) for kind in (F, I, W)}

    def run(stage: int, *kinds: OpKind) -> Iterator[Op]:
        return (Op(stage, kind, next(next_microbatch[stage, kind])) for kind in kinds)

    # Warm-up: fill the V, 2p - 1 forwards on every rank...
    fill = 2 * (ranks - rank) - 1
    for _ in range(fill):
        yield from run(down, F)
    for _ in range(rank):
        yield from run(up, F)
        yield from run(down, F)
    # ...and the first backwards, which come up the V as fast as the forwards go.
    for _ in range(ranks - rank):
        yield from run(up, F, I, W)
    # Steady: one F-I-W of each stage in turn, until the forwards are used up.
    forwards_down = fill + rank
    for _ in range(microbatches - forwards_down):
        yield from run(down, F, I, W)
        yield from run(up, F, I, W)
    for _ in range(forwards_down - ranks):
        yield from run(down, I, W)
        yield from run(up, F, I, W)
    # Cool-down: only I is on the critical path. Deferred W fill the end.
    for _ in range(rank):
        yield from run(down, I)
        yield from run(up, I)
    for _ in range(ranks - rank):
        yield from run(down, I, W)
    for _ in range(rank):
        yield from run(up, W)
    for _ in range(rank):
        yield from run(down, W)
