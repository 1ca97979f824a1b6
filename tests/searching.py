"""Short searches, also for ranks: this imports no hypothesis, which takes them longer than a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap

import pytest

from zbpipe.algorithms import zb
from zbpipe.planner import stages


@contextmanager
def searching_little() -> Iterator[None]:
    """ZB and plans take little search, for what holds however good they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zb, "_BUDGET", 2e4)
        patch.setattr(zb, "_find_within", unwrap(zb._find_within))  # which keeps orders for whole searches
        patch.setattr(stages, "default_budget", lambda *_: 2e5)
        yield
