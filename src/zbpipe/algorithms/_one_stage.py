"""Order of F, I and W in handcrafted schedules with a split backward."""

from collections.abc import Sequence

from zbpipe.schedule.ir import Op, OpKind


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
