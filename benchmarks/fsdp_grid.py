"""Plans with FSDP's collectives in the simulator: against torch's options for the same order, and against the bound.

A cell is a number of ranks and microbatches, times of F, I and W, times of the collectives, a memory limit and a
transport. Its plan is on the V. torch gathers by `unshard_lookahead` and `max_active_stages`, always whole stages
before use, and reduces after the last W or B, which it waits for at once or at the end of the step.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from harness import JSON, markdown, parser, write_json

import zbpipe
from zbpipe import CostModel, Op, OpKind, Placement, Schedule
from zbpipe.costs.model import GATHER, REDUCE
from zbpipe.simulator.actions import other_end
from zbpipe.simulator.simulation import exposed_fsdp

Times = tuple[float, float, float]
TIMES: tuple[Times, ...] = ((1, 1, 1), (1, 1.2, 0.8), (1, 1.6, 0.9))
COLLECTIVES = (0.2, 1.0, 2.0)
LIMITS = (1.0, 1.2, None)
MESSAGE = 0.05
"""Time of a message."""
TRANSPORTS = ("ideal", "one queue")


@dataclass(frozen=True)
class Cell:
    ranks: int
    microbatches: int
    times: Times
    collectives: float
    """Time of a stage's gather, and of its reduction, in units of its W of one microbatch."""
    limit: float | None
    """Memory limit in units of 1F1B's peak."""
    transport: str


@dataclass(frozen=True)
class Result:
    """One cell; steps in units of a rank's F."""

    cell: Cell
    step: float
    exposed: float
    torchs_default: float
    torchs_best: float
    bound: float


def list_cells(ranks: Sequence[int], times: Sequence[Times], collectives: Sequence[float]) -> Iterator[Cell]:
    for p, rounds, each, seconds, limit, transport in product(ranks, (2, 4), times, collectives, LIMITS, TRANSPORTS):
        yield Cell(p, rounds * p, each, seconds, limit, transport)


def run(cell: Cell, budget: float) -> Result:
    costs = CostModel.uniform(Placement.v(cell.ranks), *cell.times, comm=MESSAGE)
    by_stage = tuple(cell.collectives * each for each in costs.w)
    costs = replace(costs, gather=by_stage, reduce=by_stage)
    limit = None if cell.limit is None else cell.limit * cell.ranks
    found = zbpipe.plan(
        cell.ranks, cell.microbatches, costs, limit, placements=["v"], budget=budget, transport=cell.transport
    )
    schedule, timeline = found.schedule, found.timeline
    usual = zbpipe.simulate(schedule, costs, transport=cell.transport, overlaps_fsdp=False).makespan
    by_torch = [usual]
    if cell.transport == "ideal":
        options = product((0, 1, 2, 3, None), (1, 2, 3), (True, False))
        by_torch += [run_as_torch(schedule, costs, *each) for each in options]
        assert abs(by_torch[-1] - usual) < 1e-6 * usual, "the last one is torch's default"
    return Result(cell, timeline.makespan, exposed_fsdp(timeline), usual, min(by_torch), found.lower_bound)


def run_as_torch(
    schedule: Schedule, costs: CostModel, lookahead: int | None, most_active: int, is_deferred: bool
) -> float:
    """Seconds of a step with torch's options.

    Before each op, a rank frees stages that are not among the next ones, and gathers those that are. The number of the
    next ones is `lookahead` + 1, and at most `most_active`.
    """
    ends: dict[int, float] = {}
    free, wire = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    gathered: list[dict[int, float]] = [{} for _ in free]
    """By rank and stage, the end of the gather."""
    left, rank_of = [list(row) for row in schedule], schedule.placement.rank_of
    backwards: dict[int, int] = defaultdict(int)
    for node in schedule.graph.order:
        op, before = schedule.graph.nodes[node], schedule.graph.before[node]
        if not isinstance(op, Op):  # a message
            ends[node] = ends[before[0]] + costs.transfer(rank_of[op[0]], rank_of[other_end(op).stage])
            continue
        rank = rank_of[op.stage]
        stages = list(dict.fromkeys(each.stage for each in left[rank]))[:most_active]
        wanted = stages if lookahead is None else stages[: lookahead + 1]
        left[rank].pop(0)
        if len(gathered[rank].keys() | set(wanted)) > most_active:
            gathered[rank] = {stage: end for stage, end in gathered[rank].items() if stage in stages}
        for stage in wanted:
            if stage not in gathered[rank]:
                wire[rank] = max(wire[rank], free[rank]) + costs.of(stage, GATHER).seconds
                gathered[rank][stage] = wire[rank]
        start = max(free[rank], gathered[rank][op.stage], *(ends[each] for each in before))
        ends[node] = free[rank] = start + costs.of(op.stage, op.kind).seconds
        backwards[op.stage] += op.kind in (OpKind.B, OpKind.W)
        if op.kind in (OpKind.B, OpKind.W) and backwards[op.stage] == schedule.num_microbatches:
            wire[rank] = max(wire[rank], free[rank]) + costs.of(op.stage, REDUCE).seconds
            free[rank] = free[rank] if is_deferred else wire[rank]
    return max(*free, *wire)


def table(results: Sequence[Result]) -> str:
    """Markdown: a line for each time of the collectives and transport."""
    heads = ["collective / W", "transport", "cells", "exposed", "torch exposes", "shorter, median", "least", "most"]
    lines = []
    for collectives, transport in sorted({(each.cell.collectives, each.cell.transport) for each in results}):
        own = [each for each in results if (each.cell.collectives, each.cell.transport) == (collectives, transport)]
        shorter = sorted(1 - each.step / each.torchs_best for each in own)
        exposed = [each.exposed / each.step for each in own]
        torchs = [(each.torchs_best - each.step + each.exposed) / each.step for each in own]
        gaps = [each.step / each.bound - 1 for each in own]
        lines.append(
            [
                *(f"{collectives:g}", transport, str(len(own)), f"{max(exposed):.1%}", f"{max(torchs):.1%}"),
                *(f"{each:.1%}" for each in (median(shorter), shorter[0], shorter[-1], max(gaps))),
            ]
        )
    return markdown([*heads, "above the bound"], lines, left=2)


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--ranks", nargs="+", type=int, default=[4, 8], metavar="P")
    add("--collectives", nargs="+", type=float, default=COLLECTIVES, metavar="R")
    add("--budget", type=float, default=1e6, help="ops that the search of a plan may time")
    add("--json", **JSON)
    return arguments.parse_args()


def main() -> int:
    chosen = parse_arguments()
    results = [run(cell, chosen.budget) for cell in list_cells(chosen.ranks, TIMES, chosen.collectives)]
    print(table(results))
    write_json(chosen.json, "cpu", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
