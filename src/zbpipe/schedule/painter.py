"""Draws schedules and timelines for their own methods, which cannot import the views, because views import them.

Importing the package sets the painter; the first picture imports the views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_load: list[Callable[[], Any]] = []


def set_painter(load: Callable[[], Any]) -> None:
    """Set the function that loads `zbpipe.views.pictures`."""
    _load[:] = [load]


def painter() -> Any:
    """The functions of `zbpipe.views.pictures`."""
    return _load[0]()
