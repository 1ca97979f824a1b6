"""ZB and ZBLoop against Interleaved1F1B with as many stages per rank, or 1F1B if that is one, simulated.

The shorter one of ZB and ZBLoop counts, as in a job, which chooses. Without a limit it is never longer. It is also
measured in 1F1B's memory, and with --budget compared to the best plan of the same placements in that memory.
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
from zbpipe.costs.job import AS_1F1B, MemoryLimit, memory_of_1f1b
from zbpipe.costs.model import Transport
from zbpipe.costs.transformer import Checkpointing, typical_costs
from zbpipe.schedule.ir import Placement
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.timeline import Timeline


class Cell(NamedTuple):
    ranks: int
    microbatches: int
    checkpointing: Checkpointing
    message: float
    """Share of a rank's F."""
    transport: Transport
    stages: int


class Steps(NamedTuple):
    """Steps relative to that of Interleaved1F1B with as many stages per rank, or of 1F1B if that is one."""

    usual: float
    """Without a limit."""
    memory: float
    """Its memory, relative to 1F1B's."""
    within: float
    """In 1F1B's memory."""
    plan: float | None
    """The best plan's in 1F1B's memory; None without a search."""


def measure(cell: Cell, budget: float | None) -> Steps:
    ranks, microbatches, checkpointing, message, transport, stages = cell
    known = partial(typical_costs, checkpointing=checkpointing, comm=message)

    def make(name: str, limit: MemoryLimit | None) -> Timeline:
        algorithm = resolve(name)
        costs = known(algorithm.place(ranks, stages))
        made = algorithm.make(
            ranks, microbatches, stages_per_rank=stages, costs=costs, memory_limit=limit, transport=transport
        )
        return simulate(made, costs, transport=transport)

    peer = generate("1F1B" if stages == 1 else "Interleaved1F1B", ranks, microbatches, stages_per_rank=stages)
    baseline = simulate(peer, known(Placement.loop(ranks, stages)), transport=transport).makespan
    usual, within = (
        min((make(name, limit) for name in ("ZB", "ZBLoop")), key=lambda each: each.makespan)
        for limit in (None, AS_1F1B)
    )
    planned = None
    if budget:
        places = {resolve(name).place(ranks, stages) for name in ("ZB", "ZBLoop")}
        plan = zbpipe.plan(ranks, microbatches, known, "1x", placements=places, budget=budget, transport=transport)
        planned = plan.makespan / baseline
    memory = max(usual.peak_memory) / memory_of_1f1b(known, ranks, microbatches)
    return Steps(usual.makespan / baseline, memory, within.makespan / baseline, planned)


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
        usual, memory = [each.usual for each in steps], [each.memory for each in steps]
        within = [each.within for each in steps]
        longer = sum(number > 1 + 1e-9 for number in usual)
        shown = [f"{median(usual) - 1:+.1%}", f"{max(usual) - 1:+.1%}", f"{longer} of {len(steps)}"]
        shown += [
            f"{median(memory):.2f}x",
            f"{max(memory):.2f}x",
            f"{median(within) - 1:+.1%}",
            f"{max(within) - 1:+.1%}",
        ]
        behind = [each.within / each.plan - 1 for each in steps if each.plan]
        of_plan = [f"{median(behind):+.1%}, {max(behind):+.1%}"] if behind else []
        rows.append((checkpointing, str(stages), *shown, *of_plan))
    heads = ["checkpointing", "stages", "step, median", "longest", "longer", "memory, median", "most"]
    heads += ["in 1F1B's, median", "longest"] + (["to a plan, median and longest"] if asked.budget else [])
    print(markdown(heads, rows))
    write_json(asked.json, "cpu", [(*cell, *steps) for cell, steps in found.items()])
    return int(any(each.usual > 1 + 1e-9 for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
