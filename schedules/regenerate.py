"""Writes this folder: the CSV files, the pictures and the README. Run it with `make gallery`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from zbpipe import generate
from zbpipe.costs.transformer import Checkpointing, has_torchs_split, typical_costs
from zbpipe.schedule.ir import Placement
from zbpipe.schedule.registry import Algorithm, schedules
from zbpipe.simulator.jitter import Jitter, step_times
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.views.svg import svg

SIZES = ((2, 4), (4, 8), (8, 16))
PICTURED = (4, 8)
TOGETHER = (("1F1B", 1), ("Interleaved1F1B", 2), ("ZB", 2))
"""Schedules in one picture, with their stages per rank: more would be too narrow for it."""

INTRODUCTION = """# The schedules

Every schedule that zbpipe knows by name, at 4 pipeline ranks and 8 microbatches. [Concepts](../docs/concepts.md)
explains F, I and W.

**Choose by the columns of your checkpointing.** *Step* is the length of a step and *memory* the peak of the worst rank,
both relative to 1F1B under the same costs: those of a transformer whose F, I and W take 1 : 0.99 : 0.67, with what I
recomputes on top (`zbpipe compare -p 4 -m 8 --checkpointing ...` prints more). Selective is TorchTitan's default.
**Start with ZB**, under full checkpointing with ZBLoop, if there are layers for 4 stages per rank.
[Choose a schedule](../docs/choosing.md) has the exceptions: AMD's GPUs, and less memory. *Stages* are those of a rank.

**Jitter** is the 95th percentile of the step, relative to 1F1B, where times vary ([more](../docs/messages.md#jitter)):
under selective checkpointing, the time of an op by a standard deviation of 10 %, and each message comes late by 0.3 of
a rank's F on average. Schedules in which many ops wait for messages in a row lose most.

**The pictures are drawn with equal times** for F, I and W, as the papers do, and *bubble* is the share of all ranks'
time in which they idle then. A row is a rank, time goes from left to right, the number in a box is the microbatch. The
peaks next to the rows are those with selective checkpointing, in units of what F keeps of a rank's share of one
microbatch. The papers count activations alone, which is right without checkpointing.

\\* torch's own split of the backward: it fails under selective checkpointing and torch.compile, recomputes for each W
under full, and takes more memory than is shown. zbpipe's split runs the same orders as ZBV, DualPipeVSplit and
InterleavedZeroBubbleSplit.

The CSV files hold each schedule for (ranks, microbatches) = (2, 4), (4, 8) and (8, 16), in torch's compute-only format:
torch's `_load_csv`, TorchTitan and zbpipe read them. Those of schedules that fit themselves to costs are for selective
checkpointing (ZB, ZBLoop) or equal times (ZB1P, ZB2P). `make gallery` writes this folder.

![1F1B, Interleaved1F1B and ZB on one time scale](together.svg)

| schedule | from | stages | bubble | none: step | memory | selective: step | memory | full: step | memory | jitter |
|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""
JITTER = Jitter(ops=0.1, delay=0.3)
DRAWN_WITH = "F 1, I 1, W 1; memory with selective checkpointing"


def files() -> dict[str, str]:
    """Everything that belongs into this folder, by file name."""
    known = sorted(schedules().values(), key=lambda each: each.name.lower())
    result = {"README.md": _readme(known)}
    for each in known:
        for size in SIZES:
            result[f"{each.name}-p{size[0]}-m{size[1]}.csv"] = generate(each.name, *size).to_csv()
        result[f"{each.name}.svg"] = svg(_drawn(each.name), drawn_with=DRAWN_WITH)
    together = [_drawn(name, stages) for name, stages in TOGETHER]
    result["together.svg"] = svg(*together, drawn_with=DRAWN_WITH)
    return result


def _drawn(name: str, stages: int | None = None) -> Timeline:
    schedule = generate(name, *PICTURED, stages_per_rank=stages)
    return simulate(schedule, typical_costs(schedule.placement, times=(1, 1, 1)))


def _place(name: str) -> Placement:
    return generate(name, *PICTURED).placement


def _beside_1f1b(name: str, checkpointing: Checkpointing) -> tuple[str, str]:
    """Step and memory."""

    def run(name: str) -> Timeline:
        costs = typical_costs(_place(name), checkpointing)
        return simulate(generate(name, *PICTURED, costs=costs), costs)

    found, usual = run(name), run("1F1B")
    memory = max(found.peak_memory) / max(usual.peak_memory)
    return f"{found.makespan / usual.makespan - 1:+.1%}", f"{memory:.2f}x"


def _under_jitter(name: str) -> str:
    """The 95th percentile of the step, relative to 1F1B."""

    def p95(name: str) -> float:
        costs = typical_costs(_place(name))
        return step_times(generate(name, *PICTURED, costs=costs), costs, JITTER).p95

    return f"{p95(name) / p95('1F1B') - 1:+.0%}"


def _readme(known: list[Algorithm]) -> str:
    rows, paragraphs = [], []
    for each in known:
        drawn = _drawn(each.name)
        bubble = f"{drawn.bubble:.1%}"
        beside = {how: _beside_1f1b(each.name, how) for how in Checkpointing}
        source = each.source + "\\*" * has_torchs_split(drawn.schedule, each.source)
        link = f"[{each.name}](#{each.name.lower()})"
        compared = (cell for pair in beside.values() for cell in pair)
        cells = (
            link,
            source,
            str(_place(each.name).num_stages // PICTURED[0]),
            bubble,
            *compared,
            _under_jitter(each.name),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
        told = ", ".join(f"{how} {memory} ({step})" for how, (step, memory) in beside.items())
        figures = f"Bubble {bubble} with equal times. Memory relative to 1F1B (and the step): {told}."
        paragraphs.append(f"\n## {each.name}\n\n{_about(each)}\n\n{figures}\n\n![{each.name}]({each.name}.svg)\n")
    return INTRODUCTION + "".join(rows) + "".join(paragraphs)


def _about(algorithm: Algorithm) -> str:
    """The docstring of its file: where it comes from and when to use it. The summary where there is none."""
    return inspect.getdoc(inspect.getmodule(algorithm.generate)) or algorithm.summary


def main(folder: Path) -> None:
    """Write all files, and remove those of schedules that are no more."""
    wanted = files()
    for file in folder.iterdir():
        if file.suffix in (".csv", ".svg") and file.name not in wanted:
            file.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
