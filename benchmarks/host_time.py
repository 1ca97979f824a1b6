"""Host time that zbpipe adds: per action over torch's executor and stages, and per linear layer in F, I and W.

Two stages of tiny layers on one rank, so nothing but Python, autograd and the dispatch of small products takes time.
The reference is the same table on torch's own stages, where torch's hook for a split, `dw_builder`, makes I an ordinary
full backward and W nothing. Both take turns, step by step, in one process: `python benchmarks/host_time.py`.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime import _torch

WIDTH, ROWS = 16, 4
LAYERS = (2, 12, 32)
KINDS = ("F", "I", "W")
Times = dict[str, float]
"""Seconds of an action of the first stage, by its kind."""


class Pipeline:
    """A schedule with both stages of a V on this rank."""

    def __init__(self, layers: int, microbatches: int, is_zbpipes: bool) -> None:
        torch.manual_seed(0)
        self.stages = [
            PipelineStage(
                # What comes first, because a stage's input is kept by others, too, and its x would be copied.
                nn.Sequential(nn.Tanh(), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))),
                index,
                2,
                torch.device("cpu"),
                dw_builder=None if is_zbpipes else lambda: lambda: None,
            )
            for index in range(2)
        ]
        how = "deferred" if is_zbpipes else "autograd"
        self.schedule = zbpipe.build_pipeline_schedule(
            "ZBV", self.stages, microbatches, nn.functional.mse_loss, split_backward=how
        )
        self.x = torch.randn(ROWS * microbatches, WIDTH)
        self.taken: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds of every action of the first stage, by its kind."""

    def step(self) -> None:
        """As torch's executor runs it."""
        self.schedule.step(self.x, target=self.x)

    def timed_step(self) -> None:
        """The same, looked at."""
        with _torch.hook(self.schedule, _torch.HookOrder.RECORD, self._around):
            self.step()

    def _around(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = compute()
        if stage == 0:  # the last one has the loss
            self.taken[kind].append(time.thread_time() - start)
        return result


def measure(layers: int, microbatches: int, rounds: int) -> tuple[Times, Times]:
    """zbpipe's and torch's: the first of ten quantiles, because other work on the machine only makes it longer."""
    pipelines = [Pipeline(layers, microbatches, is_zbpipes) for is_zbpipes in (True, False)]
    for pipeline in pipelines:
        for _ in range(3):
            pipeline.step()
    for _ in range(rounds):
        for pipeline in pipelines:
            pipeline.timed_step()
    ours, torchs = [
        {kind: statistics.quantiles(pipeline.taken[kind], n=10)[0] for kind in KINDS} for pipeline in pipelines
    ]
    return ours, torchs


def line(values: Sequence[float]) -> tuple[float, float]:
    """By least squares: what no layer takes, and each further one."""
    fit = statistics.linear_regression(LAYERS, values)
    return fit.intercept, fit.slope


def table(microbatches: int, rounds: int) -> None:
    """In Markdown, microseconds."""
    taken = [measure(layers, microbatches, rounds) for layers in LAYERS]
    print("| action | torch's: alone | per linear | zbpipe's: alone | per linear | zbpipe adds: alone | per linear |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    total = [0.0] * 6
    for kind in KINDS:
        ours, torchs = [line([1e6 * each[who][kind] for each in taken]) for who in range(2)]
        row = [*torchs, *ours, ours[0] - torchs[0], ours[1] - torchs[1]]
        total = [one + other for one, other in zip(total, row, strict=True)]
        print(f"| {kind} | " + " | ".join(f"{each:.1f}" for each in row) + " |")
    print("| all three | " + " | ".join(f"{each:.1f}" for each in total) + " |")


def profile(microbatches: int, steps: int) -> None:
    """Where zbpipe's own functions spend their time, with the profiler's own cost in it."""
    pipeline = Pipeline(LAYERS[1], microbatches, is_zbpipes=True)
    for _ in range(3):
        pipeline.step()
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(steps):
            pipeline.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats("zbpipe", 25)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="show where zbpipe's own functions spend their time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if arguments.profile:
        profile(arguments.microbatches, arguments.rounds)
    else:
        table(arguments.microbatches, arguments.rounds)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
