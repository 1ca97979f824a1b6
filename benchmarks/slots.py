"""ZB and ZBLoop against Interleaved1F1B with as many stages per rank, simulated.

In Interleaved1F1B's own memory ZBLoop is never longer. In 1F1B's memory the shorter one of ZB and ZBLoop counts: a job
takes ZBLoop under full checkpointing.
"""

from __future__ import annotations

import sys
from itertools import product
from statistics import median
from typing import NamedTuple

from harness import JSON, markdown, parser, write_json

from zbpipe import generate, simulate
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.transformer import Checkpointing, typical_costs
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Placement
from zbpipe.schedule.registry import resolve


class Cell(NamedTuple):
    ranks: int
    microbatches: int
    checkpointing: Checkpointing
    message: float
    """Share of a rank's F."""
    transport: Transport
    stages: int


class Steps(NamedTuple):
    """A step, relative to that of Interleaved1F1B with as many stages per rank."""

    loop: float
    """ZBLoop's in Interleaved1F1B's memory."""
    best: float
    """The shorter one of ZB's and ZBLoop's in 1F1B's memory."""


def measure(cell: Cell) -> Steps:
    ranks, microbatches, checkpointing, message, transport, stages = cell

    def step(name: str, limit: MemoryLimit | None = None) -> float:
        algorithm = resolve(name)
        costs = typical_costs(algorithm.place(ranks, stages), checkpointing, comm=message)
        made = algorithm.make(
            ranks, microbatches, stages_per_rank=stages, costs=costs, memory_limit=limit, transport=transport
        )
        return simulate(made, costs, transport=transport).makespan

    usual = generate("Interleaved1F1B", ranks, microbatches, stages_per_rank=stages)
    costs = typical_costs(Placement.loop(ranks, stages), checkpointing, comm=message)
    timeline = simulate(usual, costs, transport=transport)
    within = MemoryLimit.parse([float(peak) for peak in timeline.peak_memory])
    return Steps(step("ZBLoop", within) / timeline.makespan, min(step("ZB"), step("ZBLoop")) / timeline.makespan)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    arguments.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3, 4])
    arguments.add_argument("--messages", nargs="+", type=float, default=[0.0, 0.05])
    arguments.add_argument("--transports", nargs="+", type=Transport.parse, default=[Transport.IDEAL, Transport.SHARED])
    arguments.add_argument("--json", **JSON)
    asked = arguments.parse_args()
    found: dict[Cell, Steps] = {}
    for ranks, many in product(asked.ranks, (2, 4)):
        for rest in product(Checkpointing, asked.messages, asked.transports, asked.stages):
            cell = Cell(ranks, many * ranks, *rest)
            found[cell] = measure(cell)
        print(f"{ranks} ranks, {many * ranks} microbatches: done", file=sys.stderr, flush=True)
    rows = []
    for checkpointing, stages in product(Checkpointing, asked.stages):
        steps = [each for cell, each in found.items() if (cell.checkpointing, cell.stages) == (checkpointing, stages)]
        columns = ([each.loop - 1 for each in steps], [each.best - 1 for each in steps])
        shown = [f"{number:+.1%}" for column in columns for number in (median(column), max(column))]
        longer = sum(number > 1e-9 for number in columns[1])
        rows.append((checkpointing, str(stages), *shown, f"{longer} of {len(steps)}"))
    heads = ("checkpointing", "stages", "in its memory, median", "longest", "in 1F1B's, median", "longest", "longer")
    print(markdown(heads, rows))
    write_json(asked.json, "cpu", [(*cell, *steps) for cell, steps in found.items()])
    return int(any(each.loop > 1 + 1e-9 for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
