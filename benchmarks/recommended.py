"""README's table: what people run, what to change it to, and the step and the memory of real jobs, as estimated.

Llama 3 8B without tensor parallelism and 70B with TP 8, both with 8 pipeline ranks and 32 microbatches on 64 H200.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from harness import markdown
from published_jobs import read_jobs, workload

from zbpipe.estimation.devices import GIB
from zbpipe.estimation.estimate import estimate
from zbpipe.estimation.rows import WORTH, Step
from zbpipe.planner.engine import fastest

JOBS = {"8B": 1, "70B": 8}
"""Degree of tensor parallelism by model."""
NOW = {"1F1B": None, "Interleaved1F1B": None, "Interleaved1F1B, 4 stages per rank": 32}
"""Number of stages that a job sets, by what people run."""
HEADS = ["checkpointing", "you run now", *("Llama 3 8B without TP", "GiB"), *("70B with TP 8", "GiB")]


def row(size: str, how: str, schedule: str, stages: int | None) -> Step:
    """The job's own row with this schedule."""
    like = next(each for each in read_jobs() if each.id == "titan-8b-8")
    job = replace(like, model=f"Llama 3 {size}", gpus=64, p=8, tp=JOBS[size], v=1, m=32, checkpointing=how)
    work = replace(workload(job), schedule=schedule, num_stages=stages, cut=None)
    found = estimate(work, "H200", only=[schedule], plans=False).own
    assert found is not None, "it runs"
    return found


def compare(how: str, name: str) -> list[str]:
    """A line of the table. A change has to be worth it, as in the answer of `zbpipe estimate`."""
    cells = [how, name]
    for size in JOBS:
        now, then = (row(size, how, schedule, NOW[name]) for schedule in (name.split(",", maxsplit=1)[0], "ZB"))
        is_worth_it = then.seconds < (1 - WORTH) * now.seconds
        cells.append(f"**ZB**: {then.compare(now).replace('%', ' %')}" if is_worth_it else "keep it")
        cells.append(f"{now.memory.total / GIB:.0f} to {then.memory.total / GIB:.0f}" if is_worth_it else "")
    return cells


if __name__ == "__main__":
    fastest()
    print(markdown(HEADS, [compare(*each) for each in product(("selective", "full"), NOW)]))
