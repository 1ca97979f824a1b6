"""A timeline as one interactive HTML page: `page.html` with style, script and data in it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import chain
from typing import Any

from zbpipe.simulator.timeline import Collective, Span, Timeline
from zbpipe.views import style

_TICKS = 2**32
"""Ticks of a makespan: integers compress well, and six digits of the shortest op stay exact."""


def html(timeline: Timeline, drawn_with: str = "") -> str:
    """The page: a grid of all ranks, each one's activations over time below it, and the critical path on demand.

    It needs no network and no other file, and has a dark theme. `drawn_with` names the costs.
    """
    sizes = style.size(timeline) + (f"; {drawn_with}" if drawn_with else "")
    return fill(
        "page.html",
        title=escape(timeline.schedule.name),
        size=escape(sizes),
        outcome=style.outcome(timeline),
        ranks="\n".join(_table(timeline)),
        data=pack(drawing(timeline)),
    )


def fill(name: str, **parts: str) -> str:
    """A page of this folder, with these parts and the shared ones in its placeholders."""
    data = f'<script id="data" type="text/plain">{parts.get("data", "")}</script>'
    shared = {
        "head": _read("head.html"),
        "style": f"{_variables()}\n{_read('page.css')}",
        "script": f"{data}\n<script>\n{_read('timeline.js')}\n</script>",
    }
    everything = shared | parts
    # In one pass, so that user text is never taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: everything[place[1]], _read(name))


def _read(name: str) -> str:
    return files("zbpipe.views").joinpath(name).read_text(encoding="utf-8").rstrip()


def _variables() -> str:

    def rules(theme: style.Theme) -> str:
        return " ".join(f"--{name}: {colour};" for name, colour in asdict(theme).items())

    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {rules(style.DARK)} }} }}"
    return f"  :root {{ color-scheme: light dark; {rules(style.LIGHT)} }}\n  {dark}"


def pack(data: Any) -> str:
    """JSON, deflated, in base64; `unpacked` in timeline.js reverses it."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(text, 9)).decode()


def drawing(timeline: Timeline) -> dict[str, Any]:
    """The script's data: kinds as numbers, times in ticks, and in `changes` by kind and stage the memory that an op
    takes at its start and frees at its end, in its rank's share of one microbatch."""
    placement = timeline.schedule.placement
    stages, present = style.most_stages(placement), style.kinds(timeline)
    shares = placement.sum_by_rank(timeline.costs.activations)

    def changes(kind: str) -> list[tuple[float, float]]:
        costs = [(timeline.costs.of(stage, kind), shares[rank] or 1.0) for stage, rank in enumerate(placement.rank_of)]
        return [(cost.needs / share, (cost.needs - cost.adds) / share) for cost, share in costs]

    beside = chain.from_iterable((*timeline.collectives, *timeline.fills))
    collectives = {each.kind: style.kind_of(each, timeline) for each in beside}
    numbers = {str(kind): number for number, kind in enumerate((*present, *collectives))}
    frees_nothing = [(0.0, 0.0)] * placement.num_stages
    painted = (*present, *collectives.values())
    tick = (timeline.makespan or 1.0) / _TICKS
    places = {id(span): n for spans in timeline.spans for n, span in enumerate(spans)}
    return {
        "makespan": timeline.makespan,
        "tick": tick,
        "unitOfActivations": style.UNIT_OF_ACTIVATIONS,
        "stagesPerRank": stages,
        "kinds": [
            *([kind, style.KIND_WORDS[kind]] for kind in present),
            *([f" {kind}", style.COLLECTIVE_WORDS[kind]] for kind in collectives),
        ],
        "paints": [[style.paint(kind, nth, stages) for nth in range(stages)] for kind in painted],
        "nthStage": style.nth_stage(placement),
        "changes": [*map(changes, present), *(frees_nothing for _ in collectives)],
        "ranks": [_rank(timeline, rank, numbers, tick) for rank in range(len(timeline.spans))],
        "criticalPath": [(placement.rank_of[span.op.stage], places[id(span)]) for span in timeline.critical_path],
    }


def _rank(timeline: Timeline, rank: int, numbers: Mapping[str, int], tick: float) -> dict[str, Any]:
    def columns(spans: Sequence[Span | Collective]) -> dict[str, list[int]]:
        end, gaps, lengths = 0, [], []
        for span in spans:
            first, last = round(span.start / tick), round(span.end / tick)
            gaps.append(first - end)
            lengths.append(last - first)
            end = last
        ops = [span.op if isinstance(span, Span) else (span.stage, span.kind, -1) for span in spans]
        return {
            "gap": gaps,
            "length": lengths,
            "kind": [numbers[kind] for _, kind, _ in ops],
            "stage": [stage for stage, _, _ in ops],
            "microbatch": [microbatch for _, _, microbatch in ops],
        }

    return {
        "peak": timeline.peak_activations[rank],
        "ops": columns(timeline.spans[rank]),
        "lanes": [columns(boxes) for _, boxes in style.lanes(timeline, rank)],
    }


def _table(timeline: Timeline) -> Iterator[str]:
    """Table of the ranks, for readers who cannot see the picture."""
    heads = ("rank", "busy", "idle", "bubble", "peak activations")
    yield "<table><caption>Ranks</caption>"
    head = "".join(f'<th scope="col">{head}</th>' for head in heads)
    yield f"<thead><tr>{head}</tr></thead><tbody>"
    for rank, busy in enumerate(timeline.busy):
        idle = max(timeline.makespan - busy, 0.0)
        bubble = style.percent(idle / timeline.makespan if timeline.makespan else 0.0)
        cells = (style.number(busy), style.number(idle), bubble, style.memory(timeline.peak_activations[rank]))
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        yield f'<tr><th scope="row">{rank}</th>{row}</tr>'
    yield "</tbody></table>"
