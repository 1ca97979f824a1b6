"""Steps by the cut before anything is measured, as estimated: equal work, equal numbers of layers, zbpipe's cut.

Llama 3 8B without tensor parallelism and 70B with TP 8, both with 8 pipeline ranks on 64 H200, as in `recommended.py`.
"""

from __future__ import annotations

from itertools import product

from harness import markdown
from published_jobs import like_titan
from recommended import JOBS

from zbpipe import simulate
from zbpipe.costs.layers import balance, even_sizes, split_of
from zbpipe.costs.transformer import Checkpointing, usual_costs
from zbpipe.estimation.cut import WorkloadCut
from zbpipe.estimation.devices import find
from zbpipe.estimation.rates import rates
from zbpipe.schedule.registry import resolve

RANKS = 8
CUTS = ("equal work", "equal numbers", "zbpipe's")


def steps(size: str, how: str, microbatches: int, name: str, stages: int) -> list[float]:
    """Step of ZB or ZBLoop with each cut, relative to Interleaved1F1B with equal numbers of layers."""
    of_job = {"gpus": 64, "p": RANKS, "tp": JOBS[size], "v": 1, "m": microbatches}
    cut = WorkloadCut(like_titan(model=f"Llama 3 {size}", checkpointing=how, **of_job))
    device = rates(find("H200"))
    layers = device.layer_costs(cut.workload)
    placement = resolve(name).place(RANKS, stages)
    even = split_of(even_sizes(len(layers.f), placement.num_stages))

    def step(schedule: str, split: tuple[range, ...]) -> float:
        usual = usual_costs(placement, Checkpointing(how), JOBS[size], cut.layers.times(split))
        costs = usual if schedule == name else None
        made = resolve(schedule).make(RANKS, microbatches, stages_per_rank=stages, costs=costs)
        return simulate(made, device.costs(cut.workload, layers, made.placement, split)).makespan

    usual = step("Interleaved1F1B", even)
    cuts = (split_of(balance(cut.layers, placement)), even, cut.split(placement))
    return [step(name, each) / usual for each in cuts]


def compare(size: str, how: str, microbatches: int, stages: int) -> list[str]:
    """A line: the shorter one of ZB and ZBLoop with each cut."""
    both = (steps(size, how, microbatches, name, stages) for name in ("ZB", "ZBLoop"))
    shown = [f"{min(each) - 1:+.1%}" for each in zip(*both, strict=True)]
    return [f"Llama 3 {size}", how, str(microbatches), str(stages), *shown]


if __name__ == "__main__":
    cells = product(JOBS, ("selective", "full"), (16, 32), (2, 4))
    print(markdown(["model", "checkpointing", "microbatches", "stages", *CUTS], [compare(*each) for each in cells]))
