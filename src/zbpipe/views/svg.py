"""A timeline as an SVG picture. The text is deterministic, byte for byte, so pictures can be committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from zbpipe.simulator.timeline import Collective, Span, Timeline
from zbpipe.views import style

# All lengths are pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 84, 88, 74
_ROW, _BOX, _STRIP = 32, 26, 3
_FONT, LETTER = 12, 6.9
_PLOT_MAX = 6_000
_PLOT_MIN = 560
_BETWEEN_TICKS = 70
_MOST_BOXES = 3_000
"""Largest number of ops drawn as elements with tooltips. Above it, each row is a few paths."""
_TENTHS = 10
"""Parts of a pixel: the unit of the paths, because integers are short."""
_BUBBLE = "zbp-bubble"
_FAMILY = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class _Scale:
    per_second: float
    makespan: float

    @property
    def plot(self) -> float:
        return self.makespan * self.per_second

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_second


def svg(timeline: Timeline, *below: Timeline, drawn_with: str = "") -> str:
    """The picture: title, outcome, a row of boxes per rank, a time axis and a legend.

    `drawn_with` describes the costs. Default: the times, if they are equal on all ranks. Further timelines are below
    the first one, on the same time scale. Thin boxes below the ops show copies to the host and back, and FSDP's
    collectives. The picture has a dark theme.
    """
    per_second = max(_per_second(each) for each in (timeline, *below))
    pictures = [_picture(each, per_second, drawn_with) for each in (timeline, *below)]
    if not below:
        return "\n".join([*_element(*pictures[0]), ""])
    widths, heights, _ = zip(*pictures, strict=True)
    width, height = max(widths), sum(heights)
    tops = accumulate(heights, initial=0.0)
    lines = [line for picture, y in zip(pictures, tops, strict=False) for line in _element(*picture, y)]
    paper = f'<rect class="paper" width="{_px(width)}" height="{_px(height)}"/>'
    return "\n".join([*_element(width, height, [paper, *lines]), ""])


def _element(width: float, height: float, content: list[str], y: float = 0.0) -> list[str]:
    """The lines of a picture, `y` below the top of its parent."""
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="zbp" width="{_px(width)}" height="{_px(height)}"'
        f' viewBox="0 0 {_px(width)} {_px(height)}" font-family="{_FAMILY}" font-size="{_FONT}"'
    )
    shifted = f' y="{_px(y)}"' if y else ""
    return [f"{opening}{shifted}>", *content, "</svg>"]


def _picture(timeline: Timeline, per_second: float, drawn_with: str) -> tuple[float, float, list[str]]:
    """Width, height and content of a timeline's picture."""
    scale = _Scale(per_second, timeline.makespan or 1.0)
    costs = drawn_with or _times(timeline)
    headings = style.outcome(timeline), style.size(timeline) + (f"; {costs}" if costs else "")
    legend, legend_width = _legend(timeline, y=_TOP + _ROW * len(timeline.spans) + _BOTTOM - 26)
    width = max(_LEFT + scale.plot + _RIGHT, *(24 + len(text) * LETTER + 24 for text in headings))
    width = max(width, legend_width)
    height = _TOP + _ROW * len(timeline.spans) + _BOTTOM
    content = [
        f"<title>{escape(timeline.schedule.name)}, {style.size(timeline)}</title>",
        *_styles(timeline),
        f'<rect class="paper" width="{_px(width)}" height="{_px(height)}"/>',
        f'<text x="24" y="34" font-size="20" font-weight="bold">{escape(timeline.schedule.name)}</text>',
        f'<text x="24" y="54">{headings[0]}</text>',
        f'<text class="faint" x="24" y="72">{escape(headings[1])}</text>',
        *_axis(scale, len(timeline.spans)),
        *(line for rank in range(len(timeline.spans)) for line in _row(timeline, rank, scale)),
        *legend,
    ]
    return width, height, content


def _per_second(timeline: Timeline) -> float:
    """Pixels per second at which the shortest op shows its microbatch, within limits."""
    box = max(18.0, len(str(timeline.schedule.num_microbatches - 1)) * LETTER + 5)
    makespan = timeline.makespan or 1.0
    return min(max(makespan * box / style.shortest_to_show(timeline), _PLOT_MIN), _PLOT_MAX) / makespan


def _px(length: float) -> str:
    return f"{length:.2f}".rstrip("0").rstrip(".")


def _styles(timeline: Timeline) -> Iterator[str]:
    """CSS rules that apply only to zbpipe's pictures, because a page may embed them."""
    stages = style.most_stages(timeline.schedule.placement)
    yield "<style>"
    yield f".zbp .ops text{{text-anchor:middle;font-size:{_FONT - 1}px}}"
    yield f".zbp .ops path{{fill:none;stroke-width:{_BOX}}} .zbp .idle{{fill:url(#{_BUBBLE})}}"
    yield from _theme(style.LIGHT)
    yield "@media (prefers-color-scheme:dark){"
    yield from _theme(style.DARK)
    yield "}"
    for kind in style.kinds(timeline):
        for nth in range(stages):
            fill, text = style.paint(kind, nth, stages)
            name = f"{kind}{nth}"
            yield f".zbp rect.{name}{{fill:{fill}}} .zbp path.{name}{{stroke:{fill}}} .zbp text.{name}{{fill:{text}}}"
    yield "</style>"
    yield f'<pattern id="{_BUBBLE}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    yield '<rect class="ground" width="6" height="6"/><rect class="stripe" width="2" height="6"/></pattern>'


def _theme(theme: style.Theme) -> Iterator[str]:
    yield f".zbp .paper{{fill:{theme.paper}}} .zbp .grid{{stroke:{theme.line}}}"
    yield f".zbp .ground{{fill:{theme.idle}}} .zbp .stripe{{fill:{theme.stripe}}}"
    yield f".zbp text{{fill:{theme.ink}}} .zbp .faint{{fill:{theme.faint}}}"
    yield f".zbp .ops rect,.zbp .key{{stroke:{theme.paper};stroke-width:1}}"


def _times(timeline: Timeline) -> str:
    """Times of a rank per microbatch, if they are equal on all ranks."""
    costs, by_rank = timeline.costs, timeline.schedule.placement.sum_by_rank
    f, i, w = ({style.number(seconds) for seconds in by_rank(times)} for times in (costs.f, costs.i, costs.w))
    if len(f) + len(i) + len(w) > 3 or costs.links:
        return ""
    comm = style.number(costs.link.seconds(costs.message_bytes))
    return f"times per rank and microbatch F {f.pop()}, I {i.pop()}, W {w.pop()}, transfer {comm}"


def _axis(scale: _Scale, rows: int) -> Iterator[str]:
    top, bottom = _TOP - 2, _TOP + _ROW * rows + 4
    yield '<g class="axis">'
    for time in style.ticks(scale.makespan, int(scale.plot / _BETWEEN_TICKS)):
        x = _px(scale.x(time))
        yield f'<path class="grid" d="M{x} {top}V{bottom}"/>'
        yield f'<text class="faint" x="{x}" y="{bottom + 14}" text-anchor="middle">{style.number(time)}</text>'
    yield f'<text class="faint" x="{_px(scale.x(scale.makespan) + 14)}" y="{bottom + 14}">time</text>'
    yield "</g>"


def _row(timeline: Timeline, rank: int, scale: _Scale) -> Iterator[str]:
    y = _TOP + _ROW * rank
    middle = y + _BOX / 2 + 4
    nth = style.nth_stage(timeline.schedule.placement)
    peak = style.memory(timeline.peak_activations[rank])
    yield f'<text x="{_LEFT - 8}" y="{_px(middle)}" text-anchor="end">rank {rank}</text>'
    yield f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_px(scale.plot)}" height="{_BOX}"/>'
    yield f'<text class="faint" x="{_px(scale.x(scale.makespan) + 8)}" y="{_px(middle)}">peak {peak}</text>'
    yield '<g class="ops">'
    if sum(map(len, timeline.spans)) > _MOST_BOXES:
        yield from _paths(timeline.spans[rank], nth, scale, y)
    else:
        for span in timeline.spans[rank]:
            yield _box(span, timeline, nth, scale, y)
    for span in timeline.spans[rank]:
        begin, width, number = scale.x(span.start), (span.end - span.start) * scale.per_second, span.op.microbatch
        if width >= len(str(number)) * LETTER + 2:
            place = f'x="{_px(begin + width / 2)}" y="{_px(middle)}"'
            yield f'<text class="{span.op.kind}{nth[span.op.stage]}" {place}>{number}</text>'
    yield "</g>"
    for lane, (name, boxes) in enumerate(style.lanes(timeline, rank)):
        yield f'<g class="{name}">'
        for box in boxes:
            yield _box(box, timeline, nth, scale, y + _BOX + lane * _STRIP, _STRIP)
        yield "</g>"


def _paths(spans: tuple[Span, ...], nth: tuple[int, ...], scale: _Scale, y: float) -> Iterator[str]:
    """A rank's ops as one path per colour: a stroke as thick as a box is high for each op, and a move to the next."""
    unit = scale.per_second * _TENTHS
    paths: dict[str, list[str]] = {}
    ends: dict[str, int] = {}
    for span in spans:
        name = f"{span.op.kind}{nth[span.op.stage]}"
        begin, end = round(span.start * unit), round(span.end * unit)
        # Wide boxes have a seam, like the strokes around boxes.
        end -= _TENTHS if end - begin >= 6 * _TENTHS else 0
        paths.setdefault(name, []).append(f"m{begin - ends.get(name, 0)} 0h{end - begin}")
        ends[name] = end
    place = f"translate({_LEFT} {_px(y + _BOX / 2)}) scale({1 / _TENTHS:g} 1)"
    for name, strokes in paths.items():
        yield f'<path class="{name}" transform="{place}" d="M0 0{"".join(strokes)}"/>'


def _box(
    box: Span | Collective, timeline: Timeline, nth: tuple[int, ...], scale: _Scale, y: float, height: int = _BOX
) -> str:
    if isinstance(box, Span):
        stage, kind, words = box.op.stage, box.op.kind, str(box.op)
    else:
        stage, kind, words = box.stage, style.kind_of(box, timeline), str(box)
    return (
        f'<rect class="{kind}{nth[stage]}" x="{_px(scale.x(box.start))}" y="{_px(y)}"'
        f' width="{_px((box.end - box.start) * scale.per_second)}" height="{height}">'
        f"<title>{words}: {style.number(box.start)} to {style.number(box.end)}</title></rect>"
    )


def _legend(timeline: Timeline, y: float) -> tuple[list[str], float]:
    """One swatch per kind, split into the shades of a rank's stages, and the total width."""
    stages = style.most_stages(timeline.schedule.placement)
    x, lines = float(_LEFT), ['<g class="legend">']

    def entry(swatches: list[str], words: str) -> None:
        nonlocal x
        for swatch in swatches:
            lines.append(f'<rect class="{swatch}" x="{_px(x)}" y="{_px(y - 11)}" width="16" height="14"/>')
            x += 16
        lines.append(f'<text x="{_px(x + 6)}" y="{_px(y)}">{words}</text>')
        x += 6 + len(words) * LETTER + 14

    for kind in style.kinds(timeline):
        entry([f"key {kind}{nth}" for nth in range(stages)], f"{kind} {style.KIND_WORDS[kind]}")
    entry(["idle"], "idle: the bubble")
    if stages > 1:
        entry([], "paler: later stages of a rank")
    return [*lines, "</g>"], x
