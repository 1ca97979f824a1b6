"""ZB and ZBLoop against Interleaved1F1B with as many stages per rank, simulated.

In Interleaved1F1B's own memory ZBLoop is never longer. In 1F1B's memory the shorter one of ZB and ZBLoop counts: a job
takes ZBLoop under full checkpointing. With --budget, the best plan of the same placements in that memory, too.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple

from harness import JSON, markdown, parser, write_json

import zbpipe
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
    plan: float | None
    """The best plan's in 1F1B's memory; None without a search."""


def measure(cell: Cell, budget: float | None) -> Steps:
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
    loop, best, planned = step("ZBLoop", within), min(step("ZB"), step("ZBLoop")), None
    if budget:
        places = {resolve(name).place(ranks, stages) for name in ("ZB", "ZBLoop")}
        known = partial(typical_costs, checkpointing=checkpointing, comm=message)
        plan = zbpipe.plan(ranks, microbatches, known, "1x", placements=places, budget=budget, transport=transport)
        planned = plan.makespan / timeline.makespan
    return Steps(loop / timeline.makespan, best / timeline.makespan, planned)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    arguments.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3, 4])
    arguments.add_argument("--messages", nargs="+", type=float, default=[0.0, 0.05])
    arguments.add_argument("--transports", nargs="+", type=Transport.parse, default=[Transport.IDEAL, Transport.SHARED])
    arguments.add_argument("--microbatches", nargs="+", type=int, default=[2, 4], help="per rank")
    arguments.add_argument("--budget", type=float, help="of each plan; 1e9 takes some ten seconds")
    arguments.add_argument("--json", **JSON)
    asked = arguments.parse_args()
    found: dict[Cell, Steps] = {}
    for ranks, many in product(asked.ranks, asked.microbatches):
        for rest in product(Checkpointing, asked.messages, asked.transports, asked.stages):
            cell = Cell(ranks, many * ranks, *rest)
            found[cell] = measure(cell, asked.budget)
        print(f"{ranks} ranks, {many * ranks} microbatches: done", file=sys.stderr, flush=True)
    rows = []
    for checkpointing, stages in product(Checkpointing, asked.stages):
        steps = [each for cell, each in found.items() if (cell.checkpointing, cell.stages) == (checkpointing, stages)]
        columns = ([each.loop - 1 for each in steps], [each.best - 1 for each in steps])
        shown = [f"{number:+.1%}" for column in columns for number in (median(column), max(column))]
        longer = sum(number > 1e-9 for number in columns[1])
        behind = [each.best / each.plan - 1 for each in steps if each.plan]
        of_plan = [f"{median(behind):+.1%}, {max(behind):+.1%}"] if behind else []
        rows.append((checkpointing, str(stages), *shown, f"{longer} of {len(steps)}", *of_plan))
    heads = ["checkpointing", "stages", "in its memory, median", "longest", "in 1F1B's, median", "longest", "longer"]
    heads += ["to a plan, median and longest"] if asked.budget else []
    print(markdown(heads, rows))
    write_json(asked.json, "cpu", [(*cell, *steps) for cell, steps in found.items()])
    return int(any(each.loop > 1 + 1e-9 for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
