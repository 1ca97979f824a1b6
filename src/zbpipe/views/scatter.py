"""Points with names as an SVG picture, for example schedules by step time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from zbpipe.views import style
from zbpipe.views.svg import LETTER, opening

# All lengths are pixels.
_WIDTH, _HEIGHT = 1100, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 130, 16, 48
_RADIUS, _LINE = 5, 13
"""Radius of a point, and line height for any font, or slightly more."""
_TICKS = 5


@dataclass(frozen=True)
class Point:
    """A point with two numbers, both better if smaller."""

    name: str
    x: float
    y: float
    fits: bool = True
    """Whether the point is filled. False draws it hollow."""
    best: bool = False
    """Whether its name is bold."""
    tip: str = ""
    """The tooltip."""


@dataclass(frozen=True)
class Axis:
    """The meaning and format of a number."""

    title: str
    write: Callable[[float], str]
    limit: float | None = None
    """Position of a line that separates fitting points from others."""


def scatter(points: Sequence[Point], horizontal: Axis, vertical: Axis) -> str:
    """The picture: the lower left is best. A name that would cover another name, or a point, is only in the tooltip."""
    across, up = [point.x for point in points], [point.y for point in points]
    most = max(*up, vertical.limit or 0.0) * 1.05
    spare = 0.05 * (max(across) - min(across) or max(across))
    low, span = min(across) - spare, max(across) - min(across) + 2 * spare

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / span

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / most)

    floor, end = y(0), _WIDTH - _RIGHT

    def axes() -> Iterator[str]:
        yield f'<path class="grid" d="M{_LEFT} {_TOP}V{floor:.1f}H{end}"/>'
        for time in (each for each in style.ticks(low + span, round(_TICKS * (low + span) / span)) if each > low):
            yield _text(x(time), floor + 18, horizontal.write(time), "middle", "faint")
        for size in style.ticks(most, _TICKS):
            yield _text(_LEFT - 8, y(size) + 4, vertical.write(size), "end", "faint")
        yield _text((_LEFT + end) / 2, floor + 38, horizontal.title, "middle")
        yield _text(_LEFT + 8, _TOP + 8, vertical.title, "start")
        if vertical.limit is not None:
            yield f'<path class="limit" d="M{_LEFT} {y(vertical.limit):.1f}H{_WIDTH}"/>'
            yield _text(_WIDTH, y(vertical.limit) - 5, "can be used", "end")

    places = [(x(point.x), y(point.y)) for point in points]
    taken = [(left - 6, top - 6, left + 6, top + 6) for left, top in places]

    def marks() -> Iterator[str]:
        for point, (left, top) in zip(points, places, strict=True):
            kind = "fits" if point.fits else "over"
            tip = f"<title>{escape(point.tip or point.name)}</title>"
            yield f'<circle class="{kind}" cx="{left:.1f}" cy="{top:.1f}" r="{_RADIUS}">{tip}</circle>'
        # The best points come first, so their names find a place.
        for point, place in sorted(zip(points, places, strict=True), key=lambda pair: (not pair[0].best, pair[0].x)):
            found = next((each for each in _places_of_name(point.name, *place) if _is_free(each, taken)), None)
            if found is not None:
                taken.append(found)
                yield _text(found[0], found[3] - 3, point.name, "start", "name best" if point.best else "name")

    return "\n".join(
        [
            f'{opening(_WIDTH, _HEIGHT, "zbp scatter")} role="img"'
            f' aria-label="{escape(vertical.title)} against {escape(horizontal.title)}">',
            *_styles(),
            f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>',
            *axes(),
            *marks(),
            "</svg>\n",
        ]
    )


_Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def _places_of_name(name: str, x: float, y: float) -> Iterator[_Box]:
    """Candidate positions of a name: next to its point, above it and below it."""
    wide = LETTER * len(name)
    beside = [(x + 9, y), (x - 9 - wide, y)]
    for left, middle in beside + [(start, y + up) for start in (x - wide / 2, x - 5, x + 5 - wide) for up in (-14, 14)]:
        yield left, middle - _LINE / 2, left + wide, middle + _LINE / 2


def _is_free(box: _Box, taken: Sequence[_Box]) -> bool:
    left, top, right, bottom = box
    if left < _LEFT:
        return False
    return all(right < other[0] or other[2] < left or bottom < other[1] or other[3] < top for other in taken)


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _styles() -> Iterator[str]:
    yield "<style>"
    yield ".scatter .grid{fill:none} .scatter .limit{stroke-dasharray:6 4} .scatter .best{font-weight:bold}"
    yield from _theme(style.LIGHT)
    yield f"@media (prefers-color-scheme:dark){{{' '.join(_theme(style.DARK))}}}"
    yield "</style>"


def _theme(theme: style.Theme) -> Iterator[str]:
    yield f".scatter .paper{{fill:{theme.paper}}} .scatter .grid{{stroke:{theme.line}}}"
    yield f".scatter text{{fill:{theme.ink}}} .scatter .faint{{fill:{theme.faint}}}"
    yield f".scatter .limit{{stroke:{theme.path}}}"
    yield f".scatter .fits{{fill:{theme.curve}}} .scatter .over{{fill:none;stroke:{theme.curve};stroke-width:2}}"
