"""A cost file from the times that Primus' Megatron backend writes with `dump_pp_data: true`.

    python costs_from_dump.py output/pp_data ZBV costs.toml

The schedule is the one that ran: it places the stages, and has I and W. A stage's times are medians over all
microbatches and steps but the first one. The dump has neither messages nor memory, and nor has the cost file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from zbpipe.costs import CostModel, JobCosts, dump_costs
from zbpipe.schedule.registry import resolve

_OPS = {"fwd": "f", "bwd": "i", "wgrad": "w"}


def read_dump(folder: Path, schedule: str) -> JobCosts:
    """Costs of the stages. ValueError if the schedule has another number of stages, or ran whole backwards."""
    config = json.loads((folder / "config.json").read_text())
    algorithm, stages_per_rank = resolve(schedule), config["vp_size"]
    placement = algorithm.place(config["pp_size"], stages_per_rank)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for rank in range(placement.num_ranks):
        steps = list(json.loads((folder / f"pp_rank_{rank}.json").read_text()).values())
        for step in steps[1:] or steps:
            add_times(step, placement.stages_on(rank), seconds)
    stages = range(placement.num_stages)
    if missing := [f"{op.upper()} of stage {stage}" for stage in stages for op in "fiw" if (stage, op) not in seconds]:
        raise ValueError(f"{folder} has no {missing[0]}: let {schedule} run with I and W in every stage, such as ZBH1")
    f, i, w = (tuple(median(seconds[stage, op]) for stage in stages) for op in "fiw")
    return JobCosts(CostModel(f=f, i=i, w=w, activations=(1 / stages_per_rank,) * len(stages)), placement)


def add_times(step: Mapping[str, Any], stages: tuple[int, ...], seconds: dict[tuple[int, str], list[float]]) -> None:
    """Add the seconds of F, I and W in a step. Backwards without a W of their own are whole ones, and do not count."""
    split = set(zip(step["wgrad_minibatch"], step["wgrad_chunk"], strict=True))
    for name, op in _OPS.items():
        for start, end, *which in zip(
            *(step[f"{name}_{what}"] for what in ("start", "end", "minibatch", "chunk")), strict=True
        ):
            if op == "f" or tuple(which) in split:
                seconds[stages[which[1]], op].append((end - start) / 1000)


if __name__ == "__main__":
    folder, schedule, out = sys.argv[1:]
    dump_costs(read_dump(Path(folder), schedule), out)
