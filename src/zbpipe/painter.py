"""What draws schedules and timelines for their own methods: they know no views, which are made of them.

The package sets it when it is imported; the views are imported with the first picture.
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
