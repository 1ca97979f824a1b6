"""DualPipeV (deepseek-ai/DualPipe, its "cut-in-half"; DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

DeepSeek's schedule, cut in half into a V. It targets forwards and backwards that overlap, as in expert parallelism.
Without that overlap it is close to ZBV.

torch's name DualPipeV selects torch's class and split, which fail under selective checkpointing and torch.compile. With
the suffix `Split`, zbpipe runs the same order with its own split, for any checkpointing.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register


@register(
    "DualPipeV",
    placement="v",
    stages_per_rank=2,
    source="torch",
    summary="DeepSeek's cut-in-half schedule; p + 1/2 activations, and deferred gradients",
)
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """The drawing, which needs 2p microbatches. With fewer, ops of the missing ones are left out.

    >>> print(dualpipe_v(2, 2))
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 3B1 0B0 0B1
    rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    drawn = max(microbatches, 2 * ranks)
    rows = tuple(tuple(op for op in _rank(rank, ranks, drawn) if op.microbatch < microbatches) for rank in range(ranks))
    return Schedule("DualPipeV", Placement.v(ranks), microbatches, rows)


@register(
    "DualPipeVSplit",
    placement="v",
    stages_per_rank=2,
    summary="DualPipeV's order with zbpipe's split, which works under any checkpointing",
)
def dualpipe_v_split(ranks: int, microbatches: int) -> Schedule:
    """The order of DualPipeV."""
    return replace(dualpipe_v(ranks, microbatches), name="DualPipeVSplit")


def _rank(rank: int, ranks: int, microbatches: int) -> Iterator[Op]:
    """The eight steps of the drawing, one loop each.

    Where the drawing overlaps a forward and a backward, they run one after the other here. I and W are where it splits
    a backward.
    """
    down, up = rank, 2 * ranks - 1 - rank
    forwards = {stage: count() for stage in (down, up)}
    backwards = {stage: count() for stage in (down, up)}
    owed: deque[Op] = deque()

    def f(stage: int) -> Op:
        return Op(stage, OpKind.F, next(forwards[stage]))

    def b(stage: int) -> Op:
        return Op(stage, OpKind.B, next(backwards[stage]))

    def i(stage: int) -> Op:
        op = Op(stage, OpKind.I, next(backwards[stage]))
        owed.append(op._replace(kind=OpKind.W))
        return op

    left = ranks - 1 - rank
    for _ in range(2 * left):  # 1: nF0
        yield f(down)
    for _ in range(rank + 1):  # 2: nF0F1
        yield f(down)
        yield f(up)
    for _ in range(left):  # 3: nI1W1F1
        yield i(up)
        yield owed.popleft()
        yield f(up)
    for _ in range(microbatches - 2 * ranks + rank + 1):  # 4: nF0B1F1B0, the main step
        yield f(down)
        yield b(up)
        yield f(up)
        yield b(down)
    for _ in range(left):  # 5: nB1F1B0
        yield b(up)
        yield f(up)
        yield b(down)
    half = (rank + 1) // 2
    for n in range(rank + 1):  # 6: nB1B0, from the middle on without W
        yield i(up) if n > half or (n == half and rank % 2 == 1) else b(up)
        yield i(down) if n >= half else b(down)
    for _ in range(left):  # 7: nWI0
        yield owed.popleft()
        yield i(down)
    yield from owed  # 8: nW
