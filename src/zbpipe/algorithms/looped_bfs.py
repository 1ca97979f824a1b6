"""Breadth-First Pipeline Parallelism (arXiv 2211.05953, section 4): a stage takes all microbatches, then the next one.

So FSDP gathers the parameters of a stage once per pass. All activations stay in memory.
"""

from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register


@register(
    "LoopedBFS",
    stages_per_rank=2,
    source="torch",
    summary="breadth first over v stages per rank; holds all m activations",
)
def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """All forwards, stage by stage, then all full backwards in reverse order of stages, as in torch.

    >>> print(looped_bfs(2, 2))
    rank 0: 0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
    rank 1: 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    placement = Placement.loop(ranks, stages_per_rank)

    def row(stages: tuple[int, ...]) -> tuple[Op, ...]:
        forwards = [Op(stage, OpKind.F, microbatch) for stage in stages for microbatch in range(microbatches)]
        return (*forwards, *(Op(op.stage, OpKind.B, op.microbatch) for op in reversed(forwards)))

    rows = tuple(row(placement.stages_on(rank)) for rank in range(ranks))
    return Schedule("LoopedBFS", placement, microbatches, rows)
