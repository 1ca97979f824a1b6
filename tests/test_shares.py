"""The benchmark of ranks that share a GPU, on the CPU: messages are ordered as NCCL's, and wrong ones are seen."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ipc
import pytest
import shares
import torch
import torch.distributed as dist
from ranks import run_ranks

CPU = torch.device("cpu")
JOB = shares.Job(CPU, 2, 2, 1, 64, 8, 8, ("1F1B", "Interleaved1F1B:2", "ZB:2"), ("one queue",), ("none",))


def test_all_schedules_give_right_gradients() -> None:
    ends = shares.start(JOB, 120)
    assert list(ends.codes) == [0, 0]
    assert [each.schedule for each in ends.results] == list(JOB.schedules)
    assert all(each.error < 1e-5 and each.step > 0 and each.simulated > 0 for each in ends.results)
    assert len(shares.table(ends.results).splitlines()) == 2 + len(JOB.schedules)


def test_all_ranks_end_after_a_failure() -> None:
    ends = shares.start(replace(JOB, fails=True), 120)
    assert list(ends.codes) == [1, 1]


def measure(folder: Path, *, is_broken: bool) -> list[float]:
    """Errors of gradients. If it is broken, this rank reads memory of its own from the second step on."""
    edges, train, said = ipc.connect(CPU, folder, JOB.slot_bytes), shares.train, list[Any]()

    def train_wrongly(*args: Any) -> Any:
        trained = train(*args)
        trained.step()
        for (_, target), edge in edges.items():
            if target == dist.get_rank():
                edge.slot = torch.zeros_like(edge.slot)
        return trained

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "connect", lambda *args: edges)
        if is_broken:
            patch.setattr(shares, "train", train_wrongly)
        shares.measure(replace(JOB, schedules=("1F1B",)), folder, said.append)
    return [each.error for each in said if isinstance(each, shares.Result)]


@pytest.mark.parametrize("is_broken", [False, True])
def test_wrong_bytes_are_seen(tmp_path: Path, is_broken: bool) -> None:
    for (error,) in run_ranks(2, partial(measure, is_broken=is_broken), tmp_path):
        assert (error >= shares.ERROR) == is_broken


def exchange(folder: Path, transport: str) -> tuple[bool, list[float]]:
    """Whether rank 0's sends are over before rank 1 posts its receives, and what arrives: two messages each way."""
    edges = ipc.connect(CPU, folder, 1 << 10)
    group, me = ipc.new_group(transport, edges, ipc.make_flags(CPU, folder)), dist.get_rank()
    tensors = [torch.full((4,), float(number + 10 * me)) for number in range(4)]

    def post(operation: Any, *numbers: int) -> list[Any]:
        operations = [dist.P2POp(operation, tensors[number], 1 - me, group) for number in numbers]
        return [work for each in operations for work in dist.batch_isend_irecv([each])]

    if me == 1:
        dist.barrier()
    works = post(dist.isend, 0, 1) if me == 0 else post(dist.irecv, 0, 1)
    time.sleep(0.1 * (me == 0))
    is_over = any(each.is_completed() for each in works)
    if me == 0:
        dist.barrier()
    works += post(dist.irecv, 2, 3) if me == 0 else post(dist.isend, 2, 3)
    for each in works:
        each.wait()
    dist.barrier()
    return is_over, [float(each[0]) for each in tensors]


@pytest.mark.parametrize("transport", ipc.QUEUES)
def test_a_send_waits_for_its_receive(tmp_path: Path, transport: str) -> None:
    (is_over, first), (_, second) = run_ranks(2, exchange, tmp_path, transport)
    assert not is_over
    assert (first, second) == ([0, 1, 12, 13], [0, 1, 12, 13])
