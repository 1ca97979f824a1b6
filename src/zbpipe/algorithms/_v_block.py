"""Building blocks on a V (Pipeline Parallelism with Controllable Memory, 2405.15362, sections 3 and 4, appendix).

The F, I and W of one microbatch on all stages form a block. It repeats every 6 units, the work of a rank on one
microbatch if each op takes one unit. The block's shape determines how long activations live, and so the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule, inputs

F, I, W = OpKind.F, OpKind.I, OpKind.W  # noqa: E741
_PERIOD = 6


@dataclass(frozen=True)
class Block:
    """The shape of a block, as offsets between op starts, in units."""

    down: int
    """Offset from rank to rank on the way down the V, for F and I."""
    up: int
    """Offset from rank to rank on the way up."""
    turn_f: int
    """Offset on the last rank, from its F of the first half to its F of the second."""
    turn_loss: int
    """Offset on the first rank, from the last F to the first I."""
    turn_i: int
    """Offset on the last rank, from its I of the second half to its I of the first."""


def repeat(name: str, block: Block, ranks: int, microbatches: int) -> Schedule:
    """One block per microbatch, with idle units removed and the cool-down reordered."""
    start = _starts(block, ranks)
    placement = Placement.v(ranks)
    rows = []
    for rank in range(ranks):
        ops = [Op(s, kind, m) for s in placement.stages_on(rank) for kind in (F, I, W) for m in range(microbatches)]
        rows.append(sorted(ops, key=lambda op: start[op.stage, op.kind] + _PERIOD * op.microbatch))
    return Schedule(name, placement, microbatches, _reorder_cooldown(rows, placement.num_stages))


def _starts(block: Block, ranks: int) -> dict[tuple[int, OpKind], int]:
    """Start of each op of the first block: F and I follow the shape, W fills the remaining units."""
    stages = range(2 * ranks)
    steps_f = [block.down] * (ranks - 1) + [block.turn_f] + [block.up] * (ranks - 1)
    steps_i = [block.down] * (ranks - 1) + [block.turn_i] + [block.up] * (ranks - 1)
    start: dict[tuple[int, OpKind], int] = {}
    now = 0
    for stage, step in zip(stages, [0, *steps_f], strict=True):
        now += step
        start[stage, F] = now
    for stage, step in zip(reversed(stages), [block.turn_loss, *steps_i], strict=True):
        now += step
        start[stage, I] = now
    for rank in range(ranks):
        _place_weights(start, up=2 * ranks - 1 - rank, down=rank)
    return start


def _place_weights(start: dict[tuple[int, OpKind], int], up: int, down: int) -> None:
    """Place each W in the first of the rank's two free units after its I. The earlier I gets the earlier W."""
    taken = {start[stage, kind] % _PERIOD for stage in (up, down) for kind in (F, I)}
    free = set(range(_PERIOD)) - taken
    assert len(free) == 2, f"the ops of stages {up} and {down} collide"
    for stage in (up, down):
        start[stage, W] = next(unit for unit in count(start[stage, I] + 1) if unit % _PERIOD in free)
        free.remove(start[stage, W] % _PERIOD)


def _reorder_cooldown(rows: list[list[Op]], num_stages: int) -> tuple[tuple[Op, ...], ...]:
    """After the last F of a rank, run I as soon as possible, and W in between.

    All ops take one unit here. Each rank keeps its order up to its last F, so memory does not grow.
    """
    # These ranks choose their next op, and a clock shows which ops are ready.
    steady = [max(n for n, op in enumerate(row) if op.kind is F) + 1 for row in rows]
    waiting = [list(row) for row in rows]
    done: dict[Op, int] = {}
    result: list[list[Op]] = [[] for _ in rows]
    now = 0

    def ready(op: Op) -> bool:
        return all(any(done.get(choice, now + 1) <= now for choice in choices) for choices in inputs(op, num_stages))

    while any(waiting):
        chosen = []
        for rank, row in enumerate(waiting):
            # Only the next op of a kind and stage can be ready, so a few candidates are enough.
            candidates = row[:1] if len(result[rank]) < steady[rank] else _next_of_each(row)
            able = [op for op in candidates if ready(op)]
            if able:
                chosen.append((rank, min(able, key=lambda op: op.kind is W)))
        now += 1
        for rank, op in chosen:
            waiting[rank].remove(op)
            result[rank].append(op)
            done[op] = now
    return tuple(map(tuple, result))


def _next_of_each(row: list[Op]) -> list[Op]:
    first: dict[tuple[int, OpKind], Op] = {}
    for op in row:
        first.setdefault((op.stage, op.kind), op)
    return list(first.values())
