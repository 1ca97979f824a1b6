"""What tests without torch need, too: hypothesis draws the same examples in each run, and searches may be short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from searching import searching_little

# Searched schedules and random orders take a while to draw; a busy machine is no failure.
settings.register_profile(
    "zbpipe",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=40,
)
settings.load_profile("zbpipe")


def draw_fewer(times: int) -> settings:
    """The profile's number of examples divided by `times`, where an example takes long."""
    return settings(max_examples=settings().max_examples // times)


@pytest.fixture(scope="module")
def short_search() -> Iterator[None]:
    """ZB and plans take little search in a whole module."""
    with searching_little():
        yield
