"""Who draws schedules and timelines, so that they can show themselves: they know no views, which are made of them.

The package sets it when it is imported, and the views are imported with the first picture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Painter(Protocol):
    """The functions of `zbpipe.views.pictures`."""

    def show(self, timeline: Any) -> None:
        """Draw it in the terminal."""

    def write_svg(self, timeline: Any, file: str | Path) -> None:
        """Draw it into a file."""

    def write_html(self, timeline: Any, file: str | Path) -> None:
        """Write the page to zoom."""

    def in_a_notebook(self, thing: Any) -> str:
        """A schedule, or a timeline, as HTML."""


_load: list[Callable[[], Any]] = []


def drawn_by(load: Callable[[], Any]) -> None:
    """Set what gives the painter when it is needed."""
    _load[:] = [load]


def painter() -> Painter:
    """The one that draws."""
    found: Painter = _load[0]()
    return found
