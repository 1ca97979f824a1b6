"""Behind queues of messages like NCCL's: schedules train right, and what the checks call blocked is what hangs.

The queues are those of benchmarks/fifo.py, over gloo. tests/test_interleavings.py runs all schedules on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fifo import BACKENDS, spoil
from hypothesis import example, given, settings
from models import batch, reference
from pipelines import Pipeline, Result, assert_like
from queued_messages import gets_stuck, tables
from ranks import run_ranks
from torch.distributed import config
from torch.distributed.pipelining import schedules

from zbpipe import Schedule
from zbpipe.costs.transport import Receives, Transport
from zbpipe.schedule import registry
from zbpipe.simulator.actions import Rows, parse, validate_lowered
from zbpipe.simulator.graph import TimeGraph
from zbpipe.simulator.message_queues import find_blocked_queues

pytestmark = pytest.mark.long

ONE_QUEUE, PER_PEER, PER_EDGE = BACKENDS
GROUP_PER_EDGE = "gloo"
"""Without queues, but with a group for each direction between two ranks, which torch makes if it is told to."""
RANKS, MICROBATCHES = 3, 4
FEW = ("1F1B", "Interleaved1F1B", "ZBV", "ZBVLean")
OURS = tuple(algorithm.name for algorithm in registry.schedules().values() if algorithm.source == "zbpipe")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool])
def test_whatever_is_received_can_be_spoiled(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    spoil(tensor)
    assert not (tensor == 0).any()


# What blocks.

TURNS = parse(
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
)
"""Each rank sends before it receives: gloo runs that, and so do queues per edge."""


def test_what_is_called_blocked_gets_stuck_and_nothing_else() -> None:
    seen: list[bool] = []

    @settings(max_examples=200)
    @example(TURNS)
    @given(tables())
    def compare(rows: Rows) -> None:
        assert validate_lowered(rows) == []
        seen.append(gets_stuck(rows, ONE_QUEUE))
        assert bool(find_blocked_queues(rows)) == seen[-1]

    compare()
    assert 3 < sum(seen) < len(seen) - 3


@example(TURNS)
@given(tables())
def test_so_it_is_with_a_queue_for_each_peer(rows: Rows) -> None:
    graph = TimeGraph(Schedule.from_actions(rows, ""), Transport.QUEUE_PER_PEER, rows)
    assert bool(graph.find_cycle()) == gets_stuck(rows, PER_PEER)


@example(TURNS)
@given(tables())
def test_with_a_queue_for_each_edge_no_sound_table_gets_stuck(rows: Rows) -> None:
    assert not gets_stuck(rows, PER_EDGE)


# Training.


class Cell(NamedTuple):
    """How the model is trained."""

    schedule: str
    backend: str
    receives: Receives
    unawaited: int | None = None
    """Which of its receives rank 1 does not wait for."""

    @property
    def is_ours(self) -> bool:
        return registry.resolve(self.schedule).source == "zbpipe"


def train(cell: Cell, group: dist.ProcessGroup) -> Result:
    """The run of a cell on this rank."""
    if cell.backend == GROUP_PER_EDGE:
        groups = dist.distributed_c10d._world.pg_names
        before = len(groups)
        with config.patch(pipeline_per_edge_p2p=True):
            run = train_twice(cell, group)
        assert len(groups) > before
        return run
    if cell.unawaited is None or dist.get_rank() != 1:
        return train_twice(cell, group)
    receives, post = count(), schedules._batch_p2p

    def post_and_forget_one(operations: list[dist.P2POp], *args: Any, **options: Any) -> list[dist.Work]:
        works = post(operations, *args, **options)
        receives_now = any(each.op is dist.irecv for each in operations)
        return [] if receives_now and next(receives) == cell.unawaited else works

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "_batch_p2p", post_and_forget_one)
        return train_twice(cell, group)


def train_twice(cell: Cell, group: dist.ProcessGroup) -> Result:
    """Two steps, whose gradients add up, and a validation before them. Some of torch's schedules cannot do that."""
    options: dict[str, Any] = {"receives": cell.receives} if cell.is_ours else {}
    pipeline = Pipeline(cell.schedule, MICROBATCHES, group=group, scale_grads=False, **options)
    losses: list[float] = []
    for seed, how in enumerate(("step", "eval", "step")):
        if how == "step" or cell.is_ours:
            tokens, targets = batch(MICROBATCHES, seed)
            losses += pipeline.run(tokens, target=targets, how=how)
    return losses, pipeline.gradients()


def train_all(cells: Sequence[Cell]) -> list[Result]:
    backends = dict.fromkeys(cell.backend for cell in cells)
    groups: dict[str, Any] = {each: dist.new_group(None, timedelta(seconds=30), each) for each in backends}
    return [train(cell, groups[cell.backend]) for cell in cells]


@cache
def expected_of(num_stages: int, validates: bool) -> Result:
    """Without pipeline."""
    first, validation, second = (reference(num_stages, MICROBATCHES, seed) for seed in range(3))
    summed = {name: MICROBATCHES * (gradient + second[1][name]) for name, gradient in first[1].items()}
    return [*first[0], *(validation[0] if validates else ()), *second[0]], summed


def named_cells() -> list[Cell]:
    """Some schedules on one queue, the hardest, with the receives that they have by default; a few of the rest."""
    return [
        *(Cell(name, ONE_QUEUE, Receives.TIMED if name in OURS else Receives.EARLY) for name in FEW),
        *(Cell("ZBV", ONE_QUEUE, receives) for receives in Receives if receives is not Receives.TIMED),
        *(Cell("VHalf", backend, Receives.EARLY) for backend in (PER_PEER, PER_EDGE)),
        *([Cell("ZBV", GROUP_PER_EDGE, Receives.TIMED)] if hasattr(config, "pipeline_per_edge_p2p") else []),
    ]


UNAWAITED = [Cell("ZBH1", ONE_QUEUE, Receives.EARLY, unawaited=number) for number in (2, 5)]


def test_schedules_train_behind_queues_and_a_missing_wait_shows() -> None:
    """One start of the processes serves all cells."""
    cells = [*named_cells(), *UNAWAITED]
    for cell, *runs in zip(cells, *run_ranks(RANKS, train_all, cells), strict=True):
        if cell in UNAWAITED:
            assert not all(each.isfinite().all() for _, gradients in runs for each in gradients.values()), cell
        else:
            num_stages = registry.resolve(cell.schedule).place(RANKS).num_stages
            assert_like(runs, expected_of(num_stages, cell.is_ours), cell)
