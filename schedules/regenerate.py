"""Writes this folder: the CSV files, the pictures and the README. Run it with `make gallery`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from zbpipe.costs import CostModel
from zbpipe.ir import Schedule
from zbpipe.registry import Algorithm, generate, schedules
from zbpipe.simulation import simulate
from zbpipe.timeline import Timeline
from zbpipe.views.svg import svg

SIZES = ((2, 4), (4, 8), (8, 16))
PICTURED = (4, 8)

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
        bubble, activations = f"{timeline.bubble:.1%}", f"{max(timeline.peak_activations):g}"
        rows.append(f"| [{each.name}](#{each.name.lower()}) | {each.stages_per_rank} | {bubble} | {activations} |\n")
        about = f"{_about(each)}\n\nBubble {bubble}, activations {activations}."
        paragraphs.append(f"\n## {each.name}\n\n{about}\n\n![{each.name}]({each.name}.svg)\n")
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
