"""Writes this folder: the CSV files, the pictures and the README. Run it with `make gallery`."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill

from zbpipe.costs import CostModel
from zbpipe.ir import Schedule
from zbpipe.registry import Algorithm, generate, schedules
from zbpipe.simulation import simulate
from zbpipe.timeline import Timeline
from zbpipe.views.svg import svg

SIZES = ((2, 4), (4, 8), (8, 16))
PICTURED = (4, 8)

# By name: when to use it, and where it comes from.
ABOUT = {
    "GPipe": (
        "The simplest one, to compare with. It holds the activations of every microbatch, so it suits few microbatches"
        " or full recomputation.",
        "GPipe, arXiv 1811.06965, section 2",
    ),
    "1F1B": (
        "The default in most trainers, and the baseline for all others: memory bounded by the number of ranks, and a"
        " bubble whose share of the step only more microbatches make smaller.",
        "PipeDream-Flush, arXiv 2006.09503, section 3; Megatron-LM, arXiv 2104.04473, section 2.2",
    ),
    "Interleaved1F1B": (
        "1F1B over v stages per rank. The bubble is v times smaller, for v times as many messages and some more"
        " memory. Use it where the backward cannot be split.",
        "Megatron-LM, arXiv 2104.04473, section 2.2",
    ),
    "LoopedBFS": (
        "Each stage of a rank takes all microbatches in turn, so with FSDP a stage's parameters are gathered once per"
        " pass. It holds all activations.",
        "Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4",
    ),
    "InterleavedZeroBubble": (
        "Interleaved1F1B with dW split off. torch's own class runs it, with torch's own split of the backward.",
        "torch.distributed.pipelining; the idea is Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3",
    ),
    "ZBH1": (
        "The drop-in for 1F1B: one stage per rank, the same memory, a third of the bubble if F, I and W take equal"
        " time.",
        "Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3",
    ),
    "ZBH2": (
        "For one stage per rank and memory to spare: no rank idles between its first op and its last if F, I and W"
        " take equal time. The skew at the start costs time unless each rank starts its next step at once.",
        "Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3",
    ),
    "ZB1P": (
        "Searched for the times it is given, in the memory of 1F1B; with equal times it is ZBH1. Use it with measured"
        " times that are far from equal.",
        "Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1",
    ),
    "ZB2P": (
        "Searched for the times it is given, in twice the memory of 1F1B.",
        "Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1",
    ),
    "ZBV": (
        "The first to try: two stages per rank in a V, the memory of 1F1B, and nothing but the skew at the start left"
        " of the bubble if F, I and W take equal time.",
        "Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6",
    ),
    "ZBVZeroBubble": (
        "torch's name for ZB-V; torch's own class runs it, with torch's own split of the backward. Here for"
        " comparison.",
        "Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6",
    ),
    "VHalf": (
        "Half of 1F1B's memory and about half of its bubble: for models that do not fit otherwise, or for longer"
        " sequences.",
        "Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4.2",
    ),
    "VMin": (
        "A third of 1F1B's memory, with about two thirds of its bubble; more where F, I and W take different times.",
        "Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4.2",
    ),
    "DualPipeV": (
        "DeepSeek's schedule, cut in half to a V. It is meant for forwards and backwards that run at once, as with"
        " expert parallelism; without that overlap it is close to ZBV.",
        "deepseek-ai/DualPipe; DeepSeek-V3, arXiv 2412.19437, section 3.2.1",
    ),
}

INTRODUCTION = """# The schedules

Every schedule that zbpipe knows by name, at 4 pipeline ranks and 8 microbatches, simulated with F, I and W taking
equal time and communication none. A row is a rank, time goes from left to right, the number in a box is the microbatch.
*Bubble* is the share of all ranks' time in which they idle. *Activations* is the most that any rank holds, in units of
what it keeps of one microbatch. [Concepts](../docs/concepts.md) explains F, I and W.

The CSV files hold each schedule for (ranks, microbatches) = (2, 4), (4, 8) and (8, 16), in torch's compute-only format:
torch's `_load_csv`, TorchTitan and zbpipe read them. `make gallery` writes this folder.

![1F1B and ZBV on one time scale](1F1B-and-ZBV.svg)

| schedule | stages per rank | bubble | activations |
|---|---|---|---|
"""


def files() -> dict[str, str]:
    """Everything that belongs into this folder, by file name."""
    known = sorted(schedules().values(), key=lambda each: each.name.lower())
    result = {"README.md": _readme(known)}
    for each in known:
        for size in SIZES:
            result[f"{each.name}-p{size[0]}-m{size[1]}.csv"] = generate(each.name, *size).to_csv()
        result[f"{each.name}.svg"] = svg(_run(generate(each.name, *PICTURED)))
    result["1F1B-and-ZBV.svg"] = svg(*(_run(generate(name, *PICTURED)) for name in ("1F1B", "ZBV")))
    return result


def _run(schedule: Schedule) -> Timeline:
    return simulate(schedule, CostModel.uniform(schedule.placement))


def _readme(known: list[Algorithm]) -> str:
    rows, paragraphs = [], []
    for each in known:
        timeline = _run(generate(each.name, *PICTURED))
        when, paper = ABOUT[each.name]
        bubble, activations = f"{timeline.bubble:.1%}", f"{max(timeline.peak_activations):g}"
        rows.append(f"| [{each.name}](#{each.name.lower()}) | {each.stages_per_rank} | {bubble} | {activations} |\n")
        paragraphs.append(
            f"\n## {each.name}\n\n{fill(f'{when} Bubble {bubble}, activations {activations}. ({paper}.)', 120)}\n\n"
            f"![{each.name}]({each.name}.svg)\n"
        )
    return INTRODUCTION + "".join(rows) + "".join(paragraphs)


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
