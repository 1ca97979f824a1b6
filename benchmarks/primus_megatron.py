"""Steps of Primus' schedules and zbpipe's, as Primus' Megatron backend runs their tables (commit fd1eeab).

python benchmarks/primus_megatron.py PATH_OF_PRIMUS

The job is Primus' own for comparisons: 8 ranks, 32 microbatches, F, I and W of 1 second per rank. A second one has the
times of a model on GPUs (arXiv 2401.10241).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from zbpipe.costs.job import JobCosts
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import PAPERS_TIMES
from zbpipe.frameworks.primus_megatron import Choice, class_of
from zbpipe.schedule.graph import Graph
from zbpipe.simulator.time_graph import longest_path

RANKS, MICROBATCHES = 8, 32
EQUAL, MEASURED = (1.0, 1.0, 1.0), PAPERS_TIMES
COLUMNS = {
    "no messages": (EQUAL, 0.0, False),
    "2 %": (EQUAL, 0.02, False),
    "5 %": (EQUAL, 0.05, False),
    "2 %, `batch_p2p`": (EQUAL, 0.02, True),
    "2 %, measured times": (MEASURED, 0.02, False),
}
"""Seconds of F, I and W on a rank, and of a message between any two stages, and Primus' way to communicate."""
COMPUTATIONS = ("F", "B", "W", "BW")
THEIRS = {
    "1f1b": (1,),
    "zero-bubble": (1,),
    "zero-bubble-heuristic": (1,),
    "1f1b-interleaved": (2, 4),
    "zbv-formatted": (2,),
    "v-half": (2,),
    "v-min": (2,),
}
"""Primus' schedules with their stages per rank."""
OURS = {"ZBH1": (1,), "ZB": (1, 2), "ZBLoop": (2, 4), "ZBV": (2,), "VHalf": (2,), "VMin": (2,)}

Table = Sequence[Sequence[Any]]
"""A list of Primus' `SchedulerNode` for each rank."""


def time_graph(
    table: Table, times: Sequence[float], message: float, *, blocking: bool = False
) -> tuple[Graph[str], list[float]]:
    """Dependencies between the nodes of a table, and their seconds. `times` are those of F, I and W on a stage.

    A message starts where both of its ranks have come to it, and after those that both have started with each other. A
    computation waits for its message. Before a rank starts messages, it waits for its earlier sends. With `blocking`,
    Primus' `batch_p2p`, it waits for all messages that it starts.
    """
    names: list[str] = []
    before: list[list[int]] = []
    lasts: list[float] = []
    seconds = dict(zip(COMPUTATIONS, (*times, times[1] + times[2]), strict=True))
    messages: dict[tuple[Any, ...], int] = {}
    received: dict[tuple[Any, ...], int] = {}

    def add(name: str, waits: Sequence[int], last: float = 0.0) -> int:
        names.append(name)
        before.append(list(waits))
        lasts.append(last)
        return len(names) - 1

    def find(rank: int, node: Any) -> int:
        sends, args = node.func_type.name.startswith("S"), node.args
        chunk = args["send_to_chunk"] if sends else node.chunk
        key = (node.func_type.name[1], args["from_pp_rank"], args["to_pp_rank"], node.mini_batch, chunk)
        if key not in messages:
            messages[key] = add(f"message {key}", (), message)
        if not sends:
            received[rank, key[0], node.mini_batch, chunk] = messages[key]
        return messages[key]

    for rank, row in enumerate(table):
        here: list[int] = []
        sent: list[int] = []
        pairs: dict[int, list[int]] = defaultdict(list)
        for batch in batches(row):
            kind = batch[0].func_type.name
            if kind in seconds:
                arrived = received.get((rank, kind[0].replace("W", ""), batch[0].mini_batch, batch[0].chunk))
                waits = here if arrived is None else [*here, arrived]
                here = [add(f"{rank}: {batch[0]}", waits, seconds[kind])]
                continue
            here = [add(f"{rank}: messages", [*here, *sent])]
            found = []
            for node in sorted(batch, key=lambda each: each.args["from_pp_rank"] > each.args["to_pp_rank"]):
                ends = node.args["from_pp_rank"], node.args["to_pp_rank"]
                if ends[0] == ends[1]:
                    continue
                each, peer = find(rank, node), ends[ends[0] == rank]
                before[each] += here if blocking else [*here, *pairs[peer]]
                pairs[peer] = [each]
                found.append((node, each))
            sent = [each for node, each in found if node.func_type.name.startswith("S")]
            if blocking:
                here = [add(f"{rank}: sent and received", [*here, *(each for _, each in found)])]
    return Graph(names, before), lasts


def batches(row: Sequence[Any]) -> Iterator[list[Any]]:
    """Computations, and the messages that Primus starts together."""
    batch: list[Any] = []
    for node in row:
        is_message = node.func_type.name not in COMPUTATIONS
        step = (node.args or {}).get("time_step")
        if batch and not (is_message and step == (batch[-1].args or {}).get("time_step")):
            yield batch
            batch = []
        batch.append(node)
        if not is_message:
            yield batch
            batch = []
    if batch:
        yield batch


def makespan(table: Table, times: Sequence[float], message: float, *, blocking: bool = False) -> float:
    """Seconds of a step. `zbpipe.schedule.graph.CycleError` if it never ends."""
    return max(longest_path(*time_graph(table, times, message, blocking=blocking))[1])


def theirs(factory: Any, name: str, stages: int, times: Sequence[float]) -> Table:
    options = dict(zip(("cost_f", "cost_b", "cost_w"), times, strict=True)) if name == "zero-bubble-heuristic" else {}
    made = factory.produce_schedule_instance(name, RANKS, stages, MICROBATCHES, **options)
    return made.generate_schedule_table()  # type: ignore[no-any-return]


def ours(name: str, stages: int, times: Sequence[float], message: float, blocking: bool) -> Table:
    choice = Choice.of(name, blocking=blocking)
    costs = JobCosts(CostModel.uniform(choice.place(RANKS, stages), *times, comm=message))
    made = class_of(replace(choice, costs=costs))(RANKS, stages, MICROBATCHES)
    return made.generate_schedule_table()  # type: ignore[no-any-return, attr-defined]


def main(primus: str) -> None:
    sys.path.insert(0, primus)
    factory = import_module("primus.core.pipeline_parallel.scheduler.schedule_table_factory")
    print(f"| schedule | stages per rank | {' | '.join(COLUMNS)} |\n|---|---:|{'---:|' * len(COLUMNS)}")
    for name, stages in ((name, each) for name, every in (THEIRS | OURS).items() for each in every):
        steps = []
        for times, message, blocking in COLUMNS.values():
            made = (
                theirs(factory, name, stages, times) if name in THEIRS else ours(name, stages, times, message, blocking)
            )
            steps.append(makespan(made, [each / stages for each in times], message, blocking=blocking))
        owner = "Primus'" if name in THEIRS else "zbpipe's"
        print(f"| {owner} {name} | {stages} | {' | '.join(f'{each:.1f}' for each in steps)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
