"""A timeline as one self-contained HTML page to zoom, pan and point at: `page.html` with the data in it."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from zbpipe.timeline import Timeline
from zbpipe.views.style import (
    KIND_WORDS,
    UNIT_OF_ACTIVATIONS,
    kinds,
    memory_profile,
    most_stages,
    nth_stage,
    outcome,
    paint,
    size,
)


def html(timeline: Timeline) -> str:
    """The page: the grid of all ranks, the activations each holds over time below it, and the critical path on demand.

    It needs no network and no other file.

        >>> "4 ranks, 8 microbatches" in html(zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1, 1, 1)))
        True
    """
    page = files("zbpipe.views").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(_data(timeline), separators=(",", ":"))
    parts = {"title": escape(timeline.schedule.name), "size": size(timeline), "outcome": outcome(timeline)}
    before, after = page.split("{{data}}")
    for name, text in parts.items():
        before = before.replace("{{" + name + "}}", text)
    return before + data + after


def _data(timeline: Timeline) -> dict[str, Any]:
    """What the script draws. Ops are lists, not objects, because a page may show 100 000 of them."""
    placement = timeline.schedule.placement
    stages = most_stages(placement)
    return {
        "makespan": timeline.makespan,
        "unitOfActivations": UNIT_OF_ACTIVATIONS,
        "stagesPerRank": stages,
        "kinds": {kind: KIND_WORDS[kind] for kind in kinds(timeline)},
        "paints": {kind: [paint(kind, nth, stages) for nth in range(stages)] for kind in kinds(timeline)},
        "nthStage": nth_stage(placement),
        "ranks": [_rank(timeline, rank) for rank in range(len(timeline.spans))],
        "criticalPath": [
            [placement.rank_of[span.op.stage], str(span.op), span.step] for span in timeline.critical_path
        ],
    }


def _rank(timeline: Timeline, rank: int) -> dict[str, Any]:
    return {
        "peak": timeline.peak_activations[rank],
        "ops": [[str(span.op), span.start, span.end, span.step] for span in timeline.spans[rank]],
        "memory": memory_profile(timeline, rank),
    }
