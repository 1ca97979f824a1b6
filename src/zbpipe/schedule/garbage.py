"""Garbage collection, which large schedules and imports trigger again and again without any garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Context without garbage collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Context for large imports: no garbage collection, also later of what was imported."""
    with without_collections():
        yield
        gc.freeze()
