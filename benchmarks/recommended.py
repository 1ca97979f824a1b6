"""README's table: what people run, what to change it to, and the step and the memory of real jobs, as estimated.

Llama 3 8B without tensor parallelism and 70B with TP 8, both with 8 pipeline ranks and 32 microbatches on 64 H200.

`--jobs` prints for twelve other jobs the schedules that the README's rule, the estimate's first sentence and the ready
config name. It fails where they differ.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

from harness import markdown
from published_jobs import like_titan

from zbpipe.estimation.devices import GIB
from zbpipe.estimation.estimate import estimate
from zbpipe.estimation.rows import WORTH, Step
from zbpipe.planner.engine import fastest

ROOT = Path(__file__).parent.parent
JOBS = {"8B": 1, "70B": 8}
"""Degree of tensor parallelism by model."""
NOW = {"1F1B": None, "Interleaved1F1B": None, "Interleaved1F1B, 4 stages per rank": 32}
"""Number of stages that a job sets, by what people run."""
HEADS = ["checkpointing", "you run now", *("Llama 3 8B without TP", "GiB"), *("70B with TP 8", "GiB")]


@cache  # the row of ZB is the same for all that people run with as many stages
def row(size: str, how: str, schedule: str, stages: int | None) -> Step:
    """The job's own row with this schedule."""
    job = like_titan(model=f"Llama 3 {size}", gpus=64, p=8, tp=JOBS[size], v=1, m=32, microbatch=1, checkpointing=how)
    job = replace(job, schedule=schedule, num_stages=stages, cut=None)
    found = estimate(job, "H200", only=[schedule], plans=False).own
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


TWELVE = [
    # Model, device, GPUs, pipeline ranks, TP, checkpointing; the ready config, if there is one.
    *(("Llama 3 8B", kind, 64, 8, 1, "selective", "llama3_8b") for kind in ("H100", "A100", "MI300X")),
    *(("Llama 3 70B", kind, 64, 8, 8, "selective", "llama3_70b_80gb") for kind in ("H100", "A100", "MI300X")),
    ("Llama 3 405B", "MI300X", 256, 16, 8, "selective", "llama3_405b"),
    ("Llama 3 405B", "H100", 512, 16, 8, "full", "llama3_405b_80gb"),
    *(("Llama 2 13B", kind, 32, 8, 1, "full", "") for kind in ("H100", "MI300X")),  # the widths of transformers' 13B
    *(("DeepSeek V3", kind, 512, 16, 8, "selective", "") for kind in ("H100", "MI300X")),
]


def rule(how: str, tensor: int) -> str:
    """README's schedule for a job with Interleaved1F1B now: the table's column is without TP, or with TP 8."""
    (row,) = re.findall(rf"^\| {how} \| Interleaved1F1B \| (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return "ZB" if "**ZB**" in row.split(" | ")[2 * (tensor > 1)] else "Interleaved1F1B"


def answers(model: str, kind: str, gpus: int, ranks: int, tensor: int, how: str, config: str) -> tuple[list[str], str]:
    """Schedules that README, the estimate and a ready config name for a job with Interleaved1F1B, and the sentence."""
    size = {"gpus": gpus, "p": ranks, "tp": tensor, "v": 1, "m": 4 * ranks, "microbatch": 1}
    work = like_titan(model=model, checkpointing=how, **size)
    found = estimate(replace(work, schedule="Interleaved1F1B", cut=None), kind, only=[])
    assert found.advice is not None
    assert found.best is not None
    text = (ROOT / "titan_integration" / "llama3.py").read_text()  # its import needs TorchTitan
    pairs = re.findall(r"^def (\w+)\(\).*?return _pipelined\(.*?, \"(\w+)\"", text, re.MULTILINE | re.DOTALL)
    ready = [dict(pairs)[config]] if config else []
    return [rule(how, tensor), found.best.schedule, *ready], found.advice.sentence


if __name__ == "__main__":
    fastest()
    if "--jobs" in sys.argv:
        found = [answers(*each) for each in TWELVE]
        heads = ["model", "GPU", "GPUs", "PP", "TP", "checkpointing", "config"]
        heads += ["README, estimate, config", "the estimate's sentence"]
        rows = [[*map(str, job), ", ".join(names), words] for job, (names, words) in zip(TWELVE, found, strict=True)]
        print(markdown(heads, rows))
        sys.exit(any(len(set(names)) > 1 for names, _ in found))
    print(markdown(HEADS, [compare(*each) for each in product(("selective", "full"), NOW)]))
