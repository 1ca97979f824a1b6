"""A timeline in the terminal: time from left to right, a line per rank, a box per op."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from rich.console import Console
from rich.text import Text

from zbpipe.schedule.ir import OpKind
from zbpipe.simulator.timeline import Collective, Span, Timeline
from zbpipe.views import style

IDLE = "·"
_BETWEEN_TICKS = 10
"""Least distance of time labels, in columns."""
_MOST_COLUMNS, _MOST_SCREENS = 2**16, 3
"""Largest width of a picture in columns, and height in screens."""
_LEVELS = "▁▂▃▄▅▆▇█"
"""Levels of a rank's busy share in a column's time."""
_PLAIN = 0.6
"""Share of a column's work above which one kind sets its colour."""

_Cell = tuple[str, str]


@dataclass(frozen=True)
class _Scale:
    """Conversion of time to columns, and of columns to bands of lines."""

    per_second: float
    columns: int
    band: int

    @property
    def bands(self) -> int:
        return -(-self.columns // self.band)

    def column(self, time: float) -> int:
        # Not round(), which rounds half to even, so that boxes of one length would get different widths.
        return math.floor(time * self.per_second + 0.5)


def grid(timeline: Timeline, width: int = 80, height: int = 24, *, colours: bool = True) -> Text:
    """The picture, with a time axis and a legend.

    Every op shows its letter, and its microbatch if there is room. Boxes are as wide as fits into `width` x `height`. A
    timeline that is too long for one line continues in a band below. Copies to the host and back, FSDP's
    collectives, and W's products in waits have their own lines. Large timelines are condensed to one line per rank.

    >>> timeline = zbpipe.simulate(zbpipe.generate("1F1B", 2, 2), (1, 1, 1))
    >>> print(grid(timeline, width=30).plain.splitlines()[0].rstrip())
    rank 0 F0F1····B0  ··B1
    """
    label = len(f"rank {timeline.schedule.num_ranks - 1} ")
    columns = max(width - label - len(style.number(timeline.makespan)), 20)
    scale = _fit(timeline, columns, height)
    if _lines(timeline, scale) > _MOST_SCREENS * height:
        lines = _overview(timeline, columns, width, label)
    else:
        lines = [*_bands(timeline, scale, label), *_pack(_legend(timeline, scale, colours), width)]
        everything = chain.from_iterable((*timeline.spans, *timeline.copies))
        if count := sum(scale.column(span.start) == scale.column(span.end) for span in everything):
            lines.append(Text(f"{count} ops are too short for a column; --html has them all", "italic"))
    return Text("\n").join(lines)


def show(timeline: Timeline) -> None:
    """Draw it in the terminal, in the terminal's size."""
    console = Console(highlight=False)
    console.print(grid(timeline, console.width, console.height, colours=console.color_system is not None))


def _bands(timeline: Timeline, scale: _Scale, label: int) -> Iterator[Text]:
    paints = style.paints(timeline)

    def cells(spans: Iterable[Span | Collective]) -> list[_Cell]:
        found: list[_Cell] = [(IDLE, "dim")] * scale.columns
        for span in spans:
            begin, end = scale.column(span.start), scale.column(span.end)
            if isinstance(span, Span):
                stage, kind, microbatch = span.op
                full, short = f"{kind}{microbatch}", str(kind)
            else:
                stage, kind = span.stage, style.kind_of(span, timeline)
                full, short = str(span.kind), span.kind[0]
            fill, text = paints[stage, kind]
            label = (full if len(full) <= end - begin else short).ljust(end - begin)[: end - begin]
            found[begin:end] = [(letter, f"{text} on {fill}") for letter in label]
        return found

    rows = [
        (name, cells(spans))
        for rank, computed in enumerate(timeline.spans)
        for name, spans in (
            (f"rank {rank} ".ljust(label), computed),
            *((f"{name.split()[-1]} ".rjust(label), boxes) for name, boxes in style.lanes(timeline, rank)),
        )
    ]
    for begin in range(0, scale.columns, scale.band):
        end = min(begin + scale.band, scale.columns)
        for name, row in rows:
            yield Text(name).append_text(_line(row[begin:end]))
        yield Text(" " * label + _axis(timeline, scale, begin, end), "dim")


def _overview(timeline: Timeline, columns: int, width: int, label: int) -> list[Text]:
    """A line per rank: a column's height shows how busy the rank is then, its colour the most frequent kind."""
    scale = _Scale(columns / (timeline.makespan or 1.0), columns, columns)
    lines = [
        Text(f"rank {rank} ".ljust(label)).append_text(_line(list(_busy(spans, scale))))
        for rank, spans in enumerate(timeline.spans)
    ]
    lines.append(Text(" " * label + _axis(timeline, scale, 0, columns), "dim"))
    keys = [
        Text.assemble(("██", style.paint(kind, 0, 1).fill), f" mostly {style.KIND_WORDS[kind]}")
        for kind in style.kinds(timeline)
    ]
    width_of_column = f"a column: {style.number(timeline.makespan / columns)}"
    words = ("██ a mixture", f"{IDLE} idle", width_of_column, "its height: how busy the rank is", "all ops: --html")
    return lines + _pack([*keys, *map(Text, words)], width)


def _busy(spans: tuple[Span, ...], scale: _Scale) -> Iterator[_Cell]:
    """A cell per column. Its height shows how busy the rank is then."""
    work: list[dict[OpKind, float]] = [{} for _ in range(scale.columns)]
    for span in spans:
        begin, end = span.start * scale.per_second, min(span.end * scale.per_second, scale.columns)
        for column in range(int(begin), math.ceil(end)):
            share = min(end, column + 1) - max(begin, column)
            work[column][span.op.kind] = work[column].get(span.op.kind, 0.0) + share
    for shares in work:
        busy = sum(shares.values())
        level = min(round(busy * len(_LEVELS)), len(_LEVELS))
        if not level:
            yield IDLE, ""
            continue
        kind = max(shares, key=shares.__getitem__)
        yield _LEVELS[level - 1], style.paint(kind, 0, 1).fill if shares[kind] >= _PLAIN * busy else ""


def _fit(timeline: Timeline, width: int, height: int) -> _Scale:
    """Boxes with room for the microbatch, on one line per rank or within `height`; else with room for their letter."""
    with_number = len(f"F{timeline.schedule.num_microbatches - 1}")
    shortest = style.shortest_to_show(timeline)
    # In an endless picture, boxes get narrower, down to nothing.
    shortest = max(shortest, timeline.makespan * (with_number + 1) / _MOST_COLUMNS)
    scales = [_scale(timeline.makespan, shortest, box, width) for box in range(1, with_number + 2)]
    numbered = min(reversed(scales[with_number - 1 :]), key=lambda scale: scale.bands)
    if numbered.bands == 1 or _lines(timeline, numbered) <= height:
        return numbered
    return min(reversed(scales[: with_number - 1]), key=lambda scale: scale.bands)


def _lines(timeline: Timeline, scale: _Scale) -> int:
    lines = sum(1 + len(style.lanes(timeline, rank)) for rank in range(timeline.schedule.num_ranks))
    return scale.bands * (lines + 1) + 4


def _scale(makespan: float, shortest: float, box: int, width: int) -> _Scale:
    """Scale with `box` columns for the shortest box. Bands are about equal, with whole boxes if all have one length."""
    columns = max(math.ceil(makespan * box / shortest - 1e-6), 1)
    bands = -(-columns // (width // box * box))
    return _Scale(box / shortest, columns, -(-columns // (bands * box)) * box)


def _line(cells: list[_Cell]) -> Text:
    line = Text()
    for look, run in groupby(cells, key=lambda cell: cell[1]):
        line.append("".join(letter for letter, _ in run), look)
    return line


def _axis(timeline: Timeline, scale: _Scale, begin: int, end: int) -> str:
    """The times below the columns from `begin` to `end`, and one at the end of the timeline."""
    axis = ""
    for time in style.ticks(timeline.makespan, scale.columns // _BETWEEN_TICKS):
        column = scale.column(time)
        if begin <= column < end or column == end == scale.columns:
            axis = axis.ljust(column - begin) + style.number(time)
    return axis


def _legend(timeline: Timeline, scale: _Scale, colours: bool) -> Iterator[Text]:
    stages = style.most_stages(timeline.schedule.placement)
    for kind in style.kinds(timeline):
        if not colours:
            yield Text(f"{kind} {style.KIND_WORDS[kind]}")
            continue
        shades = (style.paint(kind, nth, stages) for nth in range(stages))
        yield Text.assemble(
            *((f" {kind} ", f"{text} on {fill}") for fill, text in shades), f" {style.KIND_WORDS[kind]}"
        )
    if any(timeline.collectives):
        yield Text("FSDP: gather, reduce")
    if any(timeline.fills):
        yield Text("waits: W's products (f) in waits for collectives")
    yield Text.assemble((IDLE, "dim"), " idle")
    if stages > 1 and colours:
        yield Text("paler: later stages of a rank")
    labels = {
        scale.column(span.end) - scale.column(span.start) >= len(f"{span.op.kind}{span.op.microbatch}")
        for spans in timeline.spans
        for span in spans
    }
    if True in labels:
        yield Text("number: microbatch" + (", where there is room" if False in labels else ""))


def _pack(entries: Iterable[Text], width: int) -> list[Text]:
    lines: list[Text] = []
    for entry in entries:
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines
