"""ZB-H1 (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3): 1F1B's order, with dW split off.

One stage per rank and as many activations as 1F1B, with a third of its bubble if F, I and W take equal time. Without
checkpointing that is 1F1B's memory. With checkpointing, deferred gradients take more memory than activations. ZB
with one stage per rank stays within 1F1B's memory.
"""

from collections.abc import Sequence

from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register


@register("ZBH1", summary="1F1B's activations, and deferred gradients; a third of its bubble, one stage per rank")
def zbh1(ranks: int, microbatches: int) -> Schedule:
    """The F and I of 1F1B. Rank r starts its W r microbatches late, the difference between p and its warm-up.

    >>> print(zbh1(2, 3))
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    rows = tuple(f_i_w(rank, microbatches, warmup=ranks - rank, lag=rank) for rank in range(ranks))
    return Schedule("ZBH1", Placement.loop(ranks), microbatches, rows)


def f_i_w(stage: int, microbatches: int, warmup: int, lag: int) -> tuple[Op, ...]:
    """Rows for one stage: `warmup` forwards, then I, W and F alternately, with W `lag` microbatches behind I."""
    forwards, inputs = ([Op(stage, kind, m) for m in range(microbatches)] for kind in (OpKind.F, OpKind.I))
    return (*forwards[:warmup], *i_w_f(inputs, forwards[warmup:], lag))


def i_w_f(inputs: Sequence[Op], forwards: Sequence[Op], lag: int) -> list[Op]:
    """I, W and F alternately. W is `lag` ops behind I; the remaining W come last."""
    weights = [op._replace(kind=OpKind.W) for op in inputs]
    ops: list[Op] = []
    for n, op in enumerate(inputs):
        ops += [op, *weights[max(n - lag, 0) : max(n - lag + 1, 0)], *forwards[n : n + 1]]
    return ops + weights[max(len(weights) - lag, 0) :]
