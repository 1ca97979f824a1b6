"""What tests without torch need, too: hypothesis draws the same examples in each run, and searches may be short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings

from zbpipe.algorithms import _lean
from zbpipe.planner import robust, stages

settings.register_profile("zbpipe", deadline=None, derandomize=True)
settings.load_profile("zbpipe")


@contextmanager
def searching_little() -> Iterator[None]:
    """Lean schedules and plans take little search, for what holds however good they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lean, "BUDGET", 2e4)
        for module in (stages, robust):
            patch.setattr(module, "default_budget", lambda *_: 2e5)
        yield


@pytest.fixture(scope="module")
def short_search() -> Iterator[None]:
    """The same in a whole module."""
    with searching_little():
        yield
