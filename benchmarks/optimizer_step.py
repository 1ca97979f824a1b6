"""Steps in a row with an optimizer step that all ranks wait for, and with zbpipe.OptimizerStep, by the clock.

Real schedules, processes and messages, stages that sleep (see wall_clock.py). The ways take turns in one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import markdown, parser
from ranks import run_ranks
from sleeping import Runner, run_together
from torch.optim import AdamW
from wall_clock import TIMEOUT, Job, Times, in_words, message_seconds, uniform_costs

import zbpipe
from zbpipe.runtime.optimizer.norm import clip
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.simulation import period

ROOMY, TIGHT = 1e9, 1e-9
"""Limits of the norm that no step exceeds, and that every step exceeds."""
WAYS = {"synchronous": ROOMY, "validated": ROOMY, "synchronous, clips": TIGHT, "validated, clips": TIGHT}


@dataclass(frozen=True)
class Row:
    """Seconds from step to step."""

    schedule: str
    times: Times
    way: str
    measured: list[float]
    simulated: float


class Trained:
    """One way to step on this rank."""

    def __init__(self, name: str, way: str, times: Times, job: Job, latency: float) -> None:
        placement = resolve(name).place(job.ranks)
        costs = uniform_costs(placement, times, job.unit, latency)
        self._runner = Runner(name, costs, job.microbatches)
        parameters = [each for stage in self._runner.schedule._stages for each in stage.submod.parameters()]  # type: ignore[attr-defined]
        optimizer = AdamW(parameters, lr=0.0)
        schedule: Any = self._runner.schedule
        self._finish: Callable[[], None] = lambda: None
        if way.startswith("validated"):
            step = zbpipe.OptimizerStep(schedule, optimizer, max_norm=WAYS[way])
            self._step: Callable[[], Any] = step
            self._finish = step.finish
        else:

            def usual() -> None:
                clip(parameters, WAYS[way], None, torch.device("cpu"))
                optimizer.step()
                optimizer.zero_grad()

            self._step = usual
        ahead = way == "validated"
        made = schedule.schedule
        self.simulated = period(made, costs) if ahead else zbpipe.simulate(made, costs).makespan

    def seconds(self, steps: int) -> float:
        """From step to step, of the slowest rank. Two steps come before, in which the ranks get out of line."""
        ends = []

        def run(steps: int) -> None:
            for _ in range(steps):
                self._runner._run()
                self._step()
                ends.append(time.monotonic())
            self._finish()

        run(1)
        run_together(partial(run, steps + 2))
        last = torch.tensor([ends[2], ends[-1]], dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        return (last[1] - last[0]).item() / steps


def on_this_rank(schedules: Sequence[str], times: Sequence[Times], steps: int, job: Job) -> list[Row]:
    """All ways in turn. All ranks find the same."""
    latency, rows = message_seconds(), []
    for name in schedules:
        for each in times:
            trained = {way: Trained(name, way, each, job, latency) for way in WAYS}
            measured: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(job.rounds):
                for way in WAYS:
                    measured[way].append(trained[way].seconds(steps))
            rows += [Row(name, each, way, measured[way], trained[way].simulated) for way in WAYS]
    return rows


def table(rows: Sequence[Row]) -> str:
    """Milliseconds, and the saving relative to the synchronous way with the same limit."""
    usual: dict[tuple[str, Times, bool], float] = {}
    lines = []
    for row in rows:
        seconds = statistics.median(row.measured)
        saved = 1 - seconds / usual.setdefault((row.schedule, row.times, "clips" in row.way), seconds)
        times = [f"{1e3 * each:.1f}" for each in (seconds, row.simulated)]
        off = f"{seconds / row.simulated - 1:+.1%}"
        lines.append([row.schedule, in_words(row.times), row.way, *times, off, f"{saved:.1%}"])
    return markdown(["schedule", "F, I, W", "step", "ms a step", "simulated", "off", "saved"], lines, left=3)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--schedules", nargs="+", default=["ZBV", "ZBH2"])
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--unit", type=float, default=0.04, help="seconds that a time of 1 takes")
    arguments.add_argument("--steps", type=int, default=8, help="in a row, timed")
    arguments.add_argument("--rounds", type=int, default=3)
    chosen = arguments.parse_args()
    job = Job(chosen.ranks, chosen.microbatches, chosen.unit, chosen.rounds)
    times: list[Times] = [(1, 1, 1), (1, 1.2, 0.8)]
    found = run_ranks(job.ranks, on_this_rank, chosen.schedules, times, chosen.steps, job, timeout=TIMEOUT)[0]
    print(f"torch {torch.__version__}, p = {job.ranks}, m = {job.microbatches}\n")
    print(table(found))


if __name__ == "__main__":
    main()
