"""Which schedule to choose: step and memory relative to 1F1B, by transport, checkpointing and size, in the simulator.

python benchmarks/choosing.py                       # all sizes
python benchmarks/choosing.py --ranks 4 8           # a part of them: some minutes on two cores
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import NamedTuple

from harness import markdown, parser

from zbpipe import plan, simulate
from zbpipe.costs.memory_limit import MemoryLimit, memory_of_1f1b
from zbpipe.costs.transformer import Checkpointing, typical_costs
from zbpipe.costs.transport import Transport
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.timeline import Timeline
from zbpipe.views.report import ComparedSchedule, longer

TRANSPORTS = {"ideal": (Transport.IDEAL, 0.0), "CUDA": (Transport.ONE_QUEUE, 0.05), "ROCm": (Transport.SHARED, 0.05)}
"""What messages wait for, and how long one takes in times of a rank's F."""
SCHEDULES = (
    ("Interleaved1F1B", None),
    ("ZBH1", None),
    ("ZBH1Lean", None),
    ("ZBV", None),
    ("ZBVLean", None),
    ("ZBVLean", "1.1x"),
)
"""By name, with a memory limit."""
BUDGET = 2e7
"""Ops that the search of one plan may time."""


class Cell(NamedTuple):
    """A job."""

    transport: str
    checkpointing: Checkpointing
    ranks: int
    microbatches: int


def heads() -> list[str]:
    names = [name if limit is None else f"{name} {limit}" for name, limit in SCHEDULES]
    return ["messages", "checkpointing", "p, m", *names, "plan 1.0x"]


def compare(cell: Cell) -> list[str]:
    """The row of a job: by schedule how much longer a step is than 1F1B's, and the memory in that of 1F1B."""
    transport, comm = TRANSPORTS[cell.transport]
    ranks, microbatches = cell.ranks, cell.microbatches
    costs_of = partial(typical_costs, checkpointing=cell.checkpointing, comm=comm)
    baseline = memory_of_1f1b(costs_of, ranks, microbatches)

    def run(name: str, limit: str | None = None) -> Timeline:
        algorithm = resolve(name)
        costs = costs_of(algorithm.place(ranks))
        memory_limit = None if limit is None else MemoryLimit.parse(limit)
        made = algorithm.make(ranks, microbatches, costs=costs, memory_limit=memory_limit, transport=transport)
        return simulate(made, costs, transport=transport)

    def timelines() -> Iterator[Timeline]:
        for name, limit in SCHEDULES:
            yield run(name, limit)
        yield plan(ranks, microbatches, costs_of, "1.0x", budget=BUDGET, transport=transport).timeline

    usual = run("1F1B").makespan
    compared = (ComparedSchedule.of(timeline, None, baseline) for timeline in timelines())
    figures = [f"{longer(each.figures['makespan'], usual)}, {each.memory}" for each in compared]
    return [cell.transport, cell.checkpointing, f"{ranks}, {microbatches}", *figures]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of pipeline ranks")
    arguments.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS, help="messages")
    arguments.add_argument("--processes", type=int, default=2, help="how many cells to compute at a time")
    chosen = arguments.parse_args()
    plan(2, 2, (1, 1, 1), budget=1, transport=Transport.SHARED)  # compiles the search
    sizes = product(chosen.ranks, (2, 4), chosen.transports, Checkpointing)
    cells = [Cell(transport, how, ranks, factor * ranks) for ranks, factor, transport, how in sizes]
    print(markdown(heads(), [], left=3))
    with ProcessPoolExecutor(chosen.processes) as pool:
        for row in pool.map(compare, cells):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
