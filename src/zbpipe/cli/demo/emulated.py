"""The demo's second part: 1F1B and ZBV on 8 ranks, with real processes and messages, and sleeping stages.

Two pipeline ranks have almost no bubble, and a laptop does not have 8 GPUs. So F, I and W sleep, and all else is real.
`emulate` starts this file as a program, which imports torch once and forks the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from zbpipe.cli.demo.launch import DemoError, run_to_end
from zbpipe.costs.model import CostModel
from zbpipe.schedule.garbage import importing
from zbpipe.schedule.ir import Op
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Span, Timeline

SCHEDULES = ("1F1B", "ZBV")
RANKS, MICROBATCHES = 8, 16
SECONDS = 0.06
"""Time that a rank sleeps for each F, I and W of a microbatch."""
ROUNDS = 3
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Emulated:
    schedule: str
    seconds: float
    """Median step time over the rounds."""
    planned: Timeline = field(repr=False)
    """Simulated with the sleep times. Messages take no time."""
    measured: Timeline = field(repr=False)
    """The step closest to the median."""


def emulate(
    ranks: int = RANKS,
    microbatches: int = MICROBATCHES,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
) -> list[Emulated]:
    """Run `SCHEDULES` alternately, each `rounds` times, on `ranks` processes that sleep `seconds` per F, I and W.

    Raises DemoError, with the end of the ranks' output, if a rank fails or the run takes over two minutes.
    """
    with tempfile.TemporaryDirectory(prefix="zbpipe-demo-") as folder:
        steps = _run(Path(folder), (ranks, microbatches, seconds, rounds))
    return [
        _summary(name, ranks, microbatches, seconds, steps[number :: len(SCHEDULES)])
        for number, name in enumerate(SCHEDULES)
    ]


def costs_of(name: str, ranks: int, seconds: float) -> CostModel:
    return CostModel.uniform(resolve(name).place(ranks), seconds, seconds, seconds)


def _summary(name: str, ranks: int, microbatches: int, seconds: float, steps: Sequence[Any]) -> Emulated:
    algorithm, costs = resolve(name), costs_of(name, ranks, seconds)
    schedule = algorithm.make(ranks, microbatches, costs=costs)
    took = median([step["seconds"] for step in steps])
    nearest = min(steps, key=lambda step: abs(step["seconds"] - took))
    spans = tuple(tuple(Span(Op.parse(op), start, end) for op, start, end in rank) for rank in nearest["spans"])
    return Emulated(name, took, simulate(schedule, costs), Timeline(schedule, costs, spans))


def _run(folder: Path, arguments: tuple[float, ...]) -> list[Any]:
    command = [sys.executable, "-m", "zbpipe.cli.demo.emulated", str(folder), *map(str, arguments)]
    code = run_to_end(command, folder / "log", 1, _TIMEOUT)
    if code != 0:
        how = f"took more than {_TIMEOUT:.0f} seconds" if code is None else f"ended with {code}"
        end = " ".join((folder / "log").read_text().split())[-500:]
        raise DemoError(f"the program with the sleeping ranks {how}: {end}")
    return [json.loads(step.read_text()) for step in sorted(folder.glob("step-*"))]


# Code that runs in the processes.


def main() -> None:
    """Fork the ranks and wait for them. The first failure ends them all."""
    with importing():
        from torch.multiprocessing.spawn import start_processes

        from zbpipe.cli.demo import sleeping  # noqa: F401

    folder, (ranks, microbatches, seconds, rounds) = Path(sys.argv[1]), map(float, sys.argv[2:])
    job = folder, int(ranks), int(microbatches), seconds, int(rounds)
    start_processes(_run_rank, job, nprocs=int(ranks), start_method="fork")  # type: ignore[no-untyped-call]


def _run_rank(rank: int, folder: Path, ranks: int, microbatches: int, seconds: float, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from zbpipe.cli.demo.sleeping import Runner

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    runners = [Runner(name, costs_of(name, ranks, seconds), microbatches) for name in SCHEDULES]
    for number in range(rounds * len(SCHEDULES)):
        runner = runners[number % len(SCHEDULES)]
        taken = runner.seconds()
        spans: list[Any] = [None] * ranks
        mine = [(str(each.op), each.start - runner.start, each.end - runner.start) for each in runner.ran]
        dist.all_gather_object(spans, mine)
        if rank == 0:
            (folder / f"step-{number:03}").write_text(json.dumps({"seconds": taken, "spans": spans}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
