"""What the handcrafted zero-bubble schedules with one stage a rank share."""

from zbpipe.ir import Op, OpKind


def f_i_w(stage: int, microbatches: int, warmup: int, lag: int) -> tuple[Op, ...]:
    """`warmup` forwards, then I, W, F in turn, in which W is `lag` microbatches behind I; the late W come last."""
    f, i, w = ([Op(stage, kind, m) for m in range(microbatches)] for kind in (OpKind.F, OpKind.I, OpKind.W))
    ops = f[:warmup]
    for n in range(microbatches):
        ops += [i[n], *w[max(n - lag, 0) : max(n - lag + 1, 0)], *f[n + warmup : n + warmup + 1]]
    return (*ops, *w[max(microbatches - lag, 0) :])
