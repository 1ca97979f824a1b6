"""The ranks of short pipelines, run by `test_exits.py`: each ends as a script does, with all that libraries do then.

Importing torch takes longer than such a job, so this script forks all ranks. Each goes on to the script's end.
"""

import os
import signal
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from pipelines import Pipeline
from ranks import join_group

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
    pipeline = Pipeline("ZBV", MICROBATCHES, lambda *_: torch.nn.Linear(WIDTH, WIDTH), torch.nn.functional.mse_loss)
    profiler = zbpipe.Profiler(pipeline.schedule, steps=1)
    metrics = Metrics()
    watch(pipeline.schedule, metrics)
    outlives.append(metrics.after)
    x = torch.randn(2 * MICROBATCHES, WIDTH)
    for _ in range(2):
        pipeline.run(x, target=x)
    assert profiler.costs is None
    assert metrics.record.spans
    dist.destroy_process_group()


def fork_jobs(folder: str, num_jobs: int, at_a_time: int, num_ranks: int, patience: int) -> list[int]:
    """The exit codes of all ranks, in the script itself; in a rank it returns when the rank has trained."""
    codes = []
    for begin in range(0, num_jobs, at_a_time):
        jobs = range(begin, min(begin + at_a_time, num_jobs))
        ranks = []
        for job, rank in product(jobs, range(num_ranks)):
            pid = os.fork()
            if pid == 0:
                signal.alarm(patience)
                train(f"{folder}/{job}", rank, num_ranks)
                return []
            ranks.append(pid)
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if codes := fork_jobs(sys.argv[1], *map(int, sys.argv[2:])):
        print(codes)
