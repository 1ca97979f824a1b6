"""Attributes that stand in for others for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within, `owner` (an object or a module) has these attributes; afterwards it is as it was.

    Raises:
        AttributeError: it has none of that name, so nobody would read the new one.
    """
    for name in attributes:
        if name not in vars(owner) and not hasattr(type(owner), name):
            raise AttributeError(f"{owner!r} has no attribute {name!r} to replace")
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - before.keys():
            del vars(owner)[name]
        vars(owner).update(before)
