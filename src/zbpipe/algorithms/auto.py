"""The schedule that `Auto` starts with. `zbpipe.runtime.adaptive` measures the job and makes the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from zbpipe.algorithms.zb import find_shortest
from zbpipe.costs.job import MemoryLimit, resolve_limits
from zbpipe.costs.model import CostModel, highest
from zbpipe.costs.transformer import typical_costs
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register
from zbpipe.simulator.simulation import simulate


@register("Auto", placement="wave", stages_per_rank=2, listed=False, summary="measures the job, then runs ZB for it")
def auto(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 2,
    costs: CostModel | None = None,
    memory_limit: MemoryLimit | None = None,
) -> Schedule:
    """ZB for full checkpointing, which fits under any checkpointing, because whole backwards need no more than 1F1B.

    On every stage some microbatches run I, then W, so every op kind can be measured. Default costs are typical ones
    without working memory.

    >>> print(auto(2, 4))
    rank 0: 0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0I2 0W2 0F3 3F3 3I3 3W3 0B3
    rank 1: 1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1B1 2I2 2W2 1I2 1W2 1F3 2F3 2B3 1B3
    """
    placement = Placement.wave(ranks, stages_per_rank)
    costs = (costs or replace(typical_costs(placement, "full"), working={})).alike
    limits = resolve_limits(memory_limit, placement, costs, microbatches, strict_for="Auto")
    lean = find_shortest("Auto-ZB", placement, microbatches, costs, MemoryLimit(limits, ""))
    allowed = tuple(map(max, limits, [highest(costs, row) for row in lean.schedule]))

    def excess(schedule: Schedule) -> float:
        """Memory above the limit, rounded so that ties go to the first schedule."""
        peaks = simulate(schedule, costs).peak_memory
        return round(max(0.0, *(peak / most - 1 for peak, most in zip(peaks, allowed, strict=True))), 9)

    return min(_make_forms(lean.schedule, costs), key=excess)


def _make_forms(schedule: Schedule, costs: CostModel) -> Iterator[Schedule]:
    """Schedules that can be measured: the best samples first, then less memory, then a longer step."""
    yield mix_backwards(schedule, costs, samples=2)
    yield mix_backwards(schedule, costs)
    last = schedule.num_microbatches - 1
    alone = replace(schedule, ops=tuple(tuple(sorted(ops, key=lambda op: op.microbatch == last)) for ops in schedule))
    yield mix_backwards(alone, costs)


def mix_backwards(schedule: Schedule, costs: CostModel, samples: int = 1) -> Schedule:
    """`schedule` in which, on every stage, some microbatches run I with W right after it, and some run B.

    Stages that already have both stay unchanged. On other stages, microbatches change where the rank holds least when
    the backward begins. The first microbatch does not count, because its W allocates the gradients. With fewer than
    three microbatches, I and W take precedence.

        >>> costs = CostModel((1,), (1,), (1,), activations=(1,))
        >>> print(mix_backwards(Schedule.from_csv("0F0,0B0,0F1,0B1,0F2,0F3,0F4,0B2,0B3,0B4"), costs, samples=2))
        rank 0: 0F0 0B0 0F1 0I1 0W1 0F2 0F3 0F4 0B2 0B3 0I4 0W4

    `samples` microbatches of each stage run as I and W, and as many as B. F keep their order, and so do I and B.
    """
    return replace(schedule, ops=tuple(tuple(_mix_row(ops, costs, samples)) for ops in schedule))


def _mix_row(ops: Sequence[Op], costs: CostModel, samples: int) -> Iterator[Op]:
    whole, split = set[Op](), set[Op]()
    for stage in {op.stage for op in ops}:
        some_split, some_whole = _to_change(_by_room(ops, stage, costs), samples)
        whole |= {op._replace(kind=OpKind.W) for op in some_whole} | set(some_whole)
        split |= set(some_split)
    for op in ops:
        if op in split:
            yield op._replace(kind=OpKind.I)
            yield op._replace(kind=OpKind.W)
        elif op not in whole:
            yield op
        elif op.kind is OpKind.I:
            yield op._replace(kind=OpKind.B)


def _by_room(ops: Iterable[Op], stage: int, costs: CostModel) -> list[Op]:
    """I and B of a stage, least-filled moments first, without the first microbatch unless there is only one."""
    found, held = list[tuple[float, Op]](), 0.0
    for op in ops:
        if op.stage == stage and op.kind in (OpKind.I, OpKind.B):
            found.append((held, op))
        held += costs.of(op.stage, op.kind).adds
    counted = [each for each in found if each[1].microbatch] or found
    return [op for _, op in sorted(counted, key=lambda each: each[0])]


def _to_change(backwards: Sequence[Op], samples: int) -> tuple[list[Op], list[Op]]:
    split, whole = ([op for op in backwards if op.kind is kind] for kind in (OpKind.I, OpKind.B))
    most = len(backwards)
    to_split = whole[: max(min(samples, (most + 1) // 2) - len(split), 0)]
    to_whole = split[: max(min(samples, most // 2) - len(whole), 0)]
    return to_split, to_whole
