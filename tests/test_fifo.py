"""Behind queues of messages like NCCL's: all schedules train right, and what the checks call blocked is what hangs.

The queues are those of benchmarks/fifo.py, over gloo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from itertools import count, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fifo import BACKENDS, spoil
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import batch, reference
from pipelines import Pipeline, Result, assert_like
from queued_messages import gets_stuck, run_messages, tables
from ranks import run_ranks
from torch import Tensor
from torch.distributed import config
from torch.distributed.pipelining import schedules

import zbpipe
from zbpipe import OpKind, Schedule, testing
from zbpipe.costs.transport import Receives
from zbpipe.schedule import registry
from zbpipe.simulator.actions import Rows, parse, validate_lowered
from zbpipe.simulator.message_queues import MessageLoop, find_blocked_queues

ONE_QUEUE, PER_PEER, PER_EDGE = BACKENDS
GROUP_PER_EDGE = "gloo"
"""Without queues, but with a group for each direction between two ranks, which torch makes if it is told to."""
RANKS, MICROBATCHES = 4, 8
NAMES = tuple(algorithm.name for algorithm in registry.schedules().values())
FEW = ("1F1B", "Interleaved1F1B", "ZBH1", "ZBV", "VMin", "ZBVLean")
"""The schedules that `make test` tries."""
OURS = tuple(algorithm.name for algorithm in registry.schedules().values() if algorithm.source == "zbpipe")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two that share a busy core take minutes for a small model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The messages alone.


def messages() -> dict[str, Any]:
    """What two ranks see of single messages. Rank 0 sends, rank 1 receives; barriers are gloo's."""
    rank, found = dist.get_rank(), {}
    tensor = torch.zeros(2)
    work: Any
    if rank == 0:
        work = dist.isend(tensor, 1)
        dist.barrier()
        found["sent before it is received"] = work.is_completed()
        tensor.fill_(3)
        dist.barrier()
    else:
        dist.barrier()
        dist.barrier()
        work = dist.irecv(tensor, 0)
        while not work.is_completed():
            time.sleep(0.01)
        found["before the wait"] = tensor.clone()
    work.wait()
    work.wait()
    found["after the wait"] = tensor

    kept = torch.ones(2, requires_grad=True)
    activation = kept * 2
    for sent in (activation, activation.detach(), torch.arange(2), torch.ones(2)):
        (dist.send if rank == 0 else dist.recv)(sent.clone() if rank else sent, 1 - rank)
        found[f"sent {len(found)}"] = sent.detach()

    ends = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), 1 - rank)]
    ends.append(dist.P2POp(dist.irecv, torch.empty(2), 1 - rank))
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    found["batch"] = ends[1].tensor
    objects: list[Any] = [{"some": rank}] if rank == 0 else [None]
    (dist.send_object_list if rank == 0 else dist.recv_object_list)(objects, 1 - rank)  # type: ignore[misc]
    found["objects"] = objects
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rank)
    found["gathered"] = gathered
    return found


@pytest.mark.long
def test_single_messages() -> None:
    (sender, _), (receiver, _) = on_two_ranks()
    nan = torch.full((2,), torch.nan)
    assert not sender["sent before it is received"]
    torch.testing.assert_close(receiver["before the wait"], nan, equal_nan=True)
    # The bytes were taken when both had met, not at the post.
    torch.testing.assert_close(receiver["after the wait"], torch.full((2,), 3.0))
    torch.testing.assert_close(sender["after the wait"], nan, equal_nan=True)
    # Autograd knows the first, another tensor lies in the memory of the second, integers control, and nobody needs the
    # last one.
    kept = [value for name, value in sender.items() if name.startswith("sent ") and isinstance(value, Tensor)]
    for value, expected in zip(kept, ([2.0, 2.0], [2.0, 2.0], [0, 1], nan), strict=True):
        torch.testing.assert_close(value, torch.as_tensor(expected), equal_nan=True)
    assert [each["batch"].tolist() for each in (sender, receiver)] == [[1.0, 1.0], [0.0, 0.0]]
    assert receiver["objects"] == [{"some": 0}]
    assert receiver["gathered"] == [0, 1]


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
    ranks = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    loop = MessageLoop(rows, [ranks[stage] for stage in sorted(ranks)], lambda peer: peer)
    for _ in loop:
        pass
    assert loop.is_stuck() == bool(loop.find_cycle()) == gets_stuck(rows, PER_PEER)


@example(TURNS)
@given(tables())
def test_with_a_queue_for_each_edge_no_sound_table_gets_stuck(rows: Rows) -> None:
    assert not gets_stuck(rows, PER_EDGE)


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """The first examples of `strategy`, always the same ones."""
    found: list[Any] = []

    @settings(max_examples=count, database=None)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found[:count]


def messages_and_tables(cases: Sequence[tuple[Rows, str]]) -> tuple[dict[str, Any], list[str]]:
    return messages(), [run_messages(rows, backend, seconds=1.5) for rows, backend in cases]


@cache
def on_two_ranks() -> list[tuple[dict[str, Any], list[str]]]:
    """By rank. One start of the processes serves two tests."""
    return run_ranks(2, messages_and_tables, cases_to_run(), backend=ONE_QUEUE)


def cases_to_run() -> list[tuple[Rows, str]]:
    """Short tables of 2 ranks, some blocked and some not, on queues of all three kinds."""
    found = drawn(tables(ranks=2, max_microbatches=3), 100)
    blocked = [rows for rows in found if find_blocked_queues(rows)]
    free = [rows for rows in found if not find_blocked_queues(rows) and any("SEND" in str(each) for each in rows[0])]
    chosen = [TURNS, *blocked[:3], *free[:4]]
    return [*((rows, ONE_QUEUE) for rows in chosen), (TURNS, PER_PEER), (TURNS, PER_EDGE), (blocked[0], PER_EDGE)]


@pytest.mark.long
def test_the_same_tables_hang_between_real_processes() -> None:
    cases = cases_to_run()
    for (rows, backend), *errors in zip(cases, *(errors for _, errors in on_two_ranks()), strict=True):
        if gets_stuck(rows, backend):
            assert any("not met within 1.5 s" in error for error in errors), (rows, errors)
        else:
            assert errors == ["", ""], rows


# Training.


class Cell(NamedTuple):
    """How the model is trained."""

    schedule: str
    """A name, or the path of a table."""
    backend: str
    receives: Receives
    ranks: int = RANKS
    microbatches: int = MICROBATCHES
    unawaited: int | None = None
    """Which of its receives rank 1 does not wait for."""

    @property
    def num_stages(self) -> int:
        return registry.resolve(self.schedule).place(self.ranks).num_stages

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
    pipeline = Pipeline(cell.schedule, cell.microbatches, group=group, scale_grads=False, **options)
    losses: list[float] = []
    for seed, how in enumerate(("step", "eval", "step")):
        if how == "step" or cell.is_ours:
            tokens, targets = batch(cell.microbatches, seed)
            losses += pipeline.run(tokens, target=targets, how=how)
    return losses, pipeline.gradients()


def train_all(cells: Sequence[Cell]) -> list[Result | None]:
    groups: dict[tuple[str, int], Any] = {
        key: dist.new_group(list(range(key[1])), timedelta(seconds=30), key[0])
        for key in dict.fromkeys((cell.backend, cell.ranks) for cell in cells)
    }
    torch.set_num_threads(1)
    return [train(cell, groups[cell.backend, cell.ranks]) if dist.get_rank() < cell.ranks else None for cell in cells]


def assert_trained_right(cells: Sequence[Cell], per_rank: list[list[Result | None]]) -> None:
    for cell, *runs in zip(cells, *per_rank, strict=True):
        expected = expected_of(cell.num_stages, cell.microbatches, cell.is_ours)
        assert_like([run for run in runs if run], expected, cell)


@cache
def expected_of(num_stages: int, microbatches: int, validates: bool) -> Result:
    """Without pipeline."""
    first, validation, second = (reference(num_stages, microbatches, seed) for seed in range(3))
    summed = {name: microbatches * (gradient + second[1][name]) for name, gradient in first[1].items()}
    return [*first[0], *(validation[0] if validates else ()), *second[0]], summed


def named_cells() -> list[Cell]:
    """Some schedules on one queue, the hardest, with the receives that they have by default; a few of the rest."""
    return [
        *(Cell(name, ONE_QUEUE, Receives.TIMED if name in OURS else Receives.EARLY) for name in FEW),
        *(Cell("ZBV", ONE_QUEUE, receives) for receives in Receives if receives is not Receives.TIMED),
        *(Cell("VHalf", backend, Receives.EARLY) for backend in (PER_PEER, PER_EDGE)),
        *([Cell("ZBV", GROUP_PER_EDGE, Receives.TIMED)] if hasattr(config, "pipeline_per_edge_p2p") else []),
    ]


def table_cells(folder: Path) -> list[Cell]:
    """Plans with little budget, and schedules in any order at all, as files."""
    plans = [
        zbpipe.plan(RANKS, 6, (1.0, 1.5, 0.75), limit, placements=[placement], budget=2_000).schedule
        for limit, placement in ((3.5, "v"), (4.0, "loop"))
    ]
    runnable = (each for each in drawn(testing.runnable_schedules(max_microbatches=3), 100) if can_run(each))
    cells = []
    for number, schedule in enumerate([*plans, *islice(runnable, 4)]):
        file = folder / f"{number}.csv"
        file.write_text(schedule.to_csv())
        receives = list(Receives)[number % len(Receives)]
        cells.append(Cell(str(file), ONE_QUEUE, receives, schedule.num_ranks, schedule.num_microbatches))
    return cells


def can_run(schedule: Schedule) -> bool:
    """On several ranks, the last stage's forwards ascending: torch numbers the losses so."""
    last = schedule.placement.num_stages - 1
    losses = [op.microbatch for row in schedule for op in row if (op.stage, op.kind) == (last, OpKind.F)]
    return schedule.num_ranks > 1 and losses == sorted(losses)


UNAWAITED = [Cell("ZBH1", ONE_QUEUE, Receives.EARLY, unawaited=number) for number in (3, 12)]


class Trained(NamedTuple):
    """All cells, and by rank what came of them."""

    cells: list[Cell]
    per_rank: list[list[Result | None]]

    def chosen(self, cells: Sequence[Cell]) -> list[list[Result | None]]:
        return [[runs[self.cells.index(cell)] for cell in cells] for runs in self.per_rank]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One start of the processes serves all cells."""
    cells = [*named_cells(), *table_cells(tmp_path_factory.mktemp("tables")), *UNAWAITED]
    return Trained(cells, run_ranks(RANKS, train_all, cells, timeout=240))


def test_schedules_by_name(trained: Trained) -> None:
    assert_trained_right(named_cells(), trained.chosen(named_cells()))


def test_plans_and_tables(trained: Trained) -> None:
    tables = [cell for cell in trained.cells if cell.schedule.endswith(".csv")]
    assert_trained_right(tables, trained.chosen(tables))


@pytest.mark.parametrize("cell", UNAWAITED, ids=str)
def test_a_missing_wait_shows(trained: Trained, cell: Cell) -> None:
    runs = [run for (run,) in trained.chosen([cell]) if run]
    assert not all(gradient.isfinite().all() for _, gradients in runs for gradient in gradients.values())


@pytest.mark.long
@pytest.mark.timeout(900)  # beside other suites
def test_all_schedules_on_all_queues() -> None:
    """Every schedule on every queue, and with every way to receive; half of the combinations of all three."""
    ranks = 3
    cells = [
        Cell(name, backend, receives, ranks, 2 * ranks)
        for number, (name, backend) in enumerate(product(NAMES, BACKENDS))
        for receives in ([*Receives][number % 2 :: 2] if name in OURS else [Receives.EARLY])
    ]
    assert {(cell.schedule, cell.receives) for cell in cells} >= set(product(OURS, Receives))
    assert_trained_right(cells, run_ranks(ranks, train_all, cells, timeout=600))
