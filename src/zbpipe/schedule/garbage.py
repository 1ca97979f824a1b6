"""Garbage collection, which large schedules and imports trigger again and again without garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Context for large imports: no garbage collection, now or later, of the imported objects."""
    with without_collections():
        yield
        gc.freeze()
