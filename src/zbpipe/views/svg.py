"""A timeline as an SVG picture. The same timeline gives the same text, byte for byte, so pictures can be checked in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from zbpipe.costs import CostModel
from zbpipe.ir import Placement
from zbpipe.timeline import Span, Timeline
from zbpipe.views.style import (
    KIND_WORDS,
    kinds,
    most_stages,
    nth_stage,
    number,
    outcome,
    paint,
    shortest_to_show,
    size,
    ticks,
)

# All lengths are pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 84, 88, 74
_ROW, _BOX = 32, 26
_FONT, _LETTER = 12, 6.9
_PLOT_MAX = 12_000
_PLOT_MIN = 560
_BETWEEN_TICKS = 70
_FAMILY = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class _Scale:
    per_second: float
    makespan: float

    @property
    def plot(self) -> float:
        """Width of the timeline."""
        return self.makespan * self.per_second

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_second


def svg(timeline: Timeline, *below: Timeline) -> str:
    """The picture: title, outcome, a row of boxes per rank, a time axis and a legend.

    A box is as wide as its op is long, coloured by kind, paler for the later stages of a rank, and shows its microbatch
    where there is room. Pointing at it shows the op's name and times. Further timelines stand below the first one, all
    on one time scale, so that a shorter step is a shorter picture.

        >>> svg(zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1, 1, 1))).startswith("<svg")
        True
    """
    per_second = max(_per_second(each) for each in (timeline, *below))
    pictures = [_picture(each, per_second) for each in (timeline, *below)]
    if not below:
        return pictures[0].text()
    width, height = max(picture.width for picture in pictures), sum(picture.height for picture in pictures)
    tops = accumulate((picture.height for picture in pictures), initial=0.0)
    lines = [line for picture, y in zip(pictures, tops, strict=False) for line in picture.lines(y)]
    paper = f'<rect width="{_px(width)}" height="{_px(height)}" fill="#fff"/>'
    return "\n".join([f"{_opening(width, height)}>", paper, *lines, "</svg>\n"])


@dataclass(frozen=True)
class _Picture:
    """One timeline with what belongs to it."""

    width: float
    height: float
    content: list[str]

    def text(self) -> str:
        return "\n".join([*self.lines(), ""])

    def lines(self, y: float = 0.0) -> list[str]:
        """As an element of its own, `y` below the top of what holds it."""
        shifted = f' y="{_px(y)}"' if y else ""
        return [f"{_opening(self.width, self.height)}{shifted}>", *self.content, "</svg>"]


def _opening(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(width)}" height="{_px(height)}"'
        f' viewBox="0 0 {_px(width)} {_px(height)}" font-family="{_FAMILY}" font-size="{_FONT}"'
    )


def _picture(timeline: Timeline, per_second: float) -> _Picture:
    scale = _Scale(per_second, timeline.makespan or 1.0)
    legend, legend_width = _legend(timeline, y=_TOP + _ROW * len(timeline.spans) + _BOTTOM - 26)
    width = max(_LEFT + scale.plot + _RIGHT, *(24 + len(text) * _LETTER + 24 for text in _headings(timeline)))
    width = max(width, legend_width)
    height = _TOP + _ROW * len(timeline.spans) + _BOTTOM
    content = [
        f"<title>{escape(timeline.schedule.name)}, {size(timeline)}</title>",
        *_styles(timeline),
        f'<rect class="paper" width="{_px(width)}" height="{_px(height)}"/>',
        *_heading(timeline),
        *_axis(scale, len(timeline.spans)),
        *(line for rank in range(len(timeline.spans)) for line in _row(timeline, rank, scale)),
        *legend,
    ]
    return _Picture(width, height, content)


def _per_second(timeline: Timeline) -> float:
    """Wide enough for the shortest op to show its microbatch, within limits."""
    box = max(18.0, len(str(timeline.schedule.num_microbatches - 1)) * _LETTER + 5)
    makespan = timeline.makespan or 1.0
    return min(max(makespan * box / shortest_to_show(timeline), _PLOT_MIN), _PLOT_MAX) / makespan


def _px(length: float) -> str:
    return f"{length:.2f}".rstrip("0").rstrip(".")


def _styles(timeline: Timeline) -> Iterator[str]:
    stages = most_stages(timeline.schedule.placement)
    yield "<style>"
    yield ".paper{fill:#fff} .idle{fill:#eceef1} .grid{stroke:#d5d8dd} text{fill:#24292f} .faint{fill:#656d76}"
    yield f".ops text{{text-anchor:middle;font-size:{_FONT - 1}px}} .ops rect,.key{{stroke:#fff;stroke-width:1}}"
    for kind in kinds(timeline):
        for nth in range(stages):
            fill, text = paint(kind, nth, stages)
            yield f"rect.{kind}{nth}{{fill:{fill}}} text.{kind}{nth}{{fill:{text}}}"
    yield "</style>"


def _headings(timeline: Timeline) -> tuple[str, str]:
    times = _times(timeline.costs, timeline.schedule.placement)
    return outcome(timeline), size(timeline) + (f"; {times}" if times else "")


def _heading(timeline: Timeline) -> Iterator[str]:
    result, sizes = _headings(timeline)
    yield f'<text x="24" y="34" font-size="20" font-weight="bold">{escape(timeline.schedule.name)}</text>'
    yield f'<text x="24" y="54">{result}</text>'
    yield f'<text class="faint" x="24" y="72">{sizes}</text>'


def _times(costs: CostModel, placement: Placement) -> str:
    """What a rank takes per microbatch, if that is the same on all of them."""

    def per_rank(times: tuple[float, ...]) -> set[str]:
        return {number(sum(times[stage] for stage in placement.stages_on(rank))) for rank in range(placement.num_ranks)}

    f, i, w = per_rank(costs.f), per_rank(costs.i), per_rank(costs.w)
    if len(f) + len(i) + len(w) > 3 or costs.links:
        return ""
    comm = number(costs.link.seconds(costs.message_bytes))
    return f"times per rank and microbatch F {f.pop()}, I {i.pop()}, W {w.pop()}, transfer {comm}"


def _axis(scale: _Scale, rows: int) -> Iterator[str]:
    top, bottom = _TOP - 2, _TOP + _ROW * rows + 4
    yield '<g class="axis">'
    for time in ticks(scale.makespan, int(scale.plot / _BETWEEN_TICKS)):
        x = _px(scale.x(time))
        yield f'<path class="grid" d="M{x} {top}V{bottom}"/>'
        yield f'<text class="faint" x="{x}" y="{bottom + 14}" text-anchor="middle">{number(time)}</text>'
    yield f'<text class="faint" x="{_px(scale.x(scale.makespan) + 14)}" y="{bottom + 14}">time</text>'
    yield "</g>"


def _row(timeline: Timeline, rank: int, scale: _Scale) -> Iterator[str]:
    y = _TOP + _ROW * rank
    middle = y + _BOX / 2 + 4
    nth = nth_stage(timeline.schedule.placement)
    peak = number(timeline.peak_activations[rank])
    yield f'<text x="{_LEFT - 8}" y="{_px(middle)}" text-anchor="end">rank {rank}</text>'
    yield f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_px(scale.plot)}" height="{_BOX}"/>'
    yield f'<text class="faint" x="{_px(scale.x(scale.makespan) + 8)}" y="{_px(middle)}">peak {peak}</text>'
    yield '<g class="ops">'
    for span in timeline.spans[rank]:
        yield from _box(span, nth[span.op.stage], scale, y)
    yield "</g>"


def _box(span: Span, nth: int, scale: _Scale, y: float) -> Iterator[str]:
    begin, width = scale.x(span.start), (span.end - span.start) * scale.per_second
    style, microbatch = f"{span.op.kind}{nth}", str(span.op.microbatch)
    yield (
        f'<rect class="{style}" x="{_px(begin)}" y="{y}" width="{_px(width)}" height="{_BOX}">'
        f"<title>{span.op}: {number(span.start)} to {number(span.end)}</title></rect>"
    )
    if width >= len(microbatch) * _LETTER + 2:
        yield f'<text class="{style}" x="{_px(begin + width / 2)}" y="{_px(y + _BOX / 2 + 4)}">{microbatch}</text>'


def _legend(timeline: Timeline, y: float) -> tuple[list[str], float]:
    """One swatch per kind, split into the shades of a rank's stages; and how wide all that is."""
    stages = most_stages(timeline.schedule.placement)
    x, lines = float(_LEFT), ['<g class="legend">']

    def entry(swatches: list[str], words: str) -> None:
        nonlocal x
        for swatch in swatches:
            lines.append(f'<rect class="{swatch}" x="{_px(x)}" y="{_px(y - 11)}" width="16" height="14"/>')
            x += 16
        lines.append(f'<text x="{_px(x + 6)}" y="{_px(y)}">{words}</text>')
        x += 6 + len(words) * _LETTER + 14

    for kind in kinds(timeline):
        entry([f"key {kind}{nth}" for nth in range(stages)], f"{kind} {KIND_WORDS[kind]}")
    entry(["idle"], "idle")
    if stages > 1:
        entry([], "paler: later stages of a rank")
    return [*lines, "</g>"], x
