"""ZB-H1 (2401.10241, section 2.3): 1F1B's order and memory, with a third of its bubble if T_F = T_I = T_W."""

from zbpipe.algorithms._one_stage import f_i_w
from zbpipe.ir import Placement, Schedule
from zbpipe.registry import register


@register("ZBH1", summary="1F1B's memory and a third of its bubble; one stage a rank")
def zbh1(ranks: int, microbatches: int) -> Schedule:
    """1F1B's order of F and I. Rank r starts its W r microbatches late: as many as its warm-up is shorter than p."""
    rows = tuple(f_i_w(rank, microbatches, warmup=ranks - rank, lag=rank) for rank in range(ranks))
    return Schedule("ZBH1", Placement.loop(ranks), microbatches, rows)
