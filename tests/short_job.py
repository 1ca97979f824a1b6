"""One rank of a short pipeline, run by `test_exits.py`: it ends as a script does, with all that libraries do then."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import join_group
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime.measure.recording import StepRecord, Wanted, Watcher, watch

MICROBATCHES, WIDTH = 4, 8


class Metrics(Watcher):
    """As TorchTitan's: it looks at every step, and outlives the job."""

    def before(self) -> Wanted:
        return Wanted.TIMES

    def after(self, record: StepRecord) -> None:
        self.record = record


outlives: list[Callable[..., Any]] = []
"""What TorchTitan keeps in its classes."""


def train(meeting_point: str, rank: int, num_ranks: int) -> None:
    """Two steps, the second of which is profiled."""
    join_group(meeting_point, rank, num_ranks, timeout=60)
    indices = zbpipe.stage_indices("ZBV", rank=rank, num_ranks=num_ranks)
    cpu = torch.device("cpu")
    stages = [PipelineStage(torch.nn.Linear(WIDTH, WIDTH), index, 2 * num_ranks, cpu) for index in indices]
    schedule: Any = zbpipe.build_pipeline_schedule("ZBV", stages, MICROBATCHES, torch.nn.functional.mse_loss)
    profiler = zbpipe.Profiler(schedule, steps=1)
    metrics = Metrics()
    watch(schedule, metrics)
    outlives.append(metrics.after)
    x = torch.randn(2 * MICROBATCHES, WIDTH)
    for _ in range(2):
        schedule.step(*([x] if rank == 0 else []), target=x if rank == 0 else None)
    assert profiler.costs is None
    assert metrics.record.spans
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
