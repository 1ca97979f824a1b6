"""Host time of whole steps: where a GPU is faster than its host, launches decide.

Steps are those of one rank of a pipeline whose other ranks are fake: nothing is sent, and receives bring zeros. The
blocks are tiny, so the host decides. All schedules take turns, and a ratio is one of two steps of the same turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from harness import StageOfKnownShapes, synchronize
from torch import Tensor, nn

import zbpipe
from zbpipe.runtime.ranks import progress

RANKS, RANK, MICROBATCHES = 8, 3, 32
BASELINE = "Interleaved1F1B"
SCHEDULES = (BASELINE, "ZBVZeroBubble", "ZBV", "ZB")
"""The first two are torch's."""
_WIDTH = _ROWS = 16
"""With a single row the compiler would multiply element by element, and no weight gradient could wait."""


class Case(NamedTuple):
    blocks: int
    """Of each of the rank's two stages."""
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.blocks} blocks per stage, {'compiled' if self.compiled else 'eager'}"


CASES = [Case(blocks, compiled) for compiled in (False, True) for blocks in (2, 8)]


class HostTime(NamedTuple):
    """Of a step's host, in seconds for one block and microbatch."""

    seconds: float
    ratio: float
    """To `BASELINE`: the median, and its quartiles."""
    low: float
    high: float


class _Block(nn.Module):
    """The linear layers of a Llama block, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(_WIDTH) for _ in range(2))
        linear = partial(nn.Linear, _WIDTH, _WIDTH, bias=False)
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (linear() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.out(self.query(normed) * self.key(normed) + self.value(normed))
        normed = self.norms[1](x)
        return x + self.down(self.gate(normed) * self.up(normed))


_EVENT = SimpleNamespace(record=lambda: None, query=lambda: True)
"""For the CPU, in place of a GPU's: zbpipe records one after each computation."""


def step_seconds(case: Case, device: torch.device, rounds: int) -> dict[str, HostTime]:
    """Host time of a step by schedule. The process group is one of `RANKS` fake ranks, of which this is `RANK`.

    The CPU's clock is the thread's. On a GPU autograd has threads of its own, so the clock is the process's, stopped
    before the host waits for the device.
    """
    clock = time.thread_time if device.type == "cpu" else time.process_time
    of_cpu = patch.object(progress, "_launched_on", lambda device: progress.Launched(lambda: _EVENT))
    with of_cpu if device.type == "cpu" else nullcontext():
        # torch's own split fails on compiled blocks.
        names = [name for name in SCHEDULES if not (case.compiled and name == "ZBVZeroBubble")]
        steps = {name: _make(name, case, device) for name in names}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for name, step in [*steps.items()] * max(rounds, 2):
            start = clock()
            step()
            times[name].append((clock() - start) / (MICROBATCHES * 2 * case.blocks))
            synchronize(device)
    return {name: _compare(each, times) for name, each in times.items()}


def _compare(own: Sequence[float], times: Mapping[str, Sequence[float]]) -> HostTime:
    low, middle, high = quantiles([one / other for one, other in zip(own, times[BASELINE], strict=True)], n=4)
    return HostTime(median(own), middle, low, high)


def _make(name: str, case: Case, device: torch.device) -> Callable[[], Any]:
    """A step of the schedule, warm."""
    torch.manual_seed(0)
    x = torch.zeros(_ROWS, _WIDTH, device=device, requires_grad=True)
    stages = []
    for index in zbpipe.stage_indices(name, rank=RANK, num_ranks=RANKS, stages_per_rank=2):
        blocks = nn.Sequential(*(_Block() for _ in range(case.blocks))).to(device)
        if case.compiled:
            for block in blocks:
                block.compile(fullgraph=True)
        stages.append(StageOfKnownShapes(blocks, index, 2 * RANKS, device, input_args=(x,), output_args=(x,)))
    schedule: Any = zbpipe.build_pipeline_schedule(name, stages, MICROBATCHES, nn.functional.mse_loss)
    for _ in range(5):  # zbpipe's first two steps also check contents
        schedule.step()
    return schedule.step
