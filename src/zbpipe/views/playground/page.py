"""The playground's page: served, it queries the server; exported, it contains a table of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from zbpipe.costs.transformer import LLAMA_3_8B, Checkpointing, typical_times
from zbpipe.schedule.registry import schedules
from zbpipe.views.html import fill, pack
from zbpipe.views.playground.answers import (
    MOST_MICROBATCHES,
    MOST_RANKS,
    Setting,
    answer_plan,
    answer_simulation,
    presets,
)

_TIMES = [round(0.1 * n, 1) for n in range(1, 41)]
_STOPS: dict[str, list[Any]] = {
    "ranks": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, MOST_RANKS],
    "microbatches": [
        *range(1, 17),
        *range(18, 33, 2),
        *range(36, 65, 4),
        80,
        96,
        128,
        192,
        256,
        384,
        MOST_MICROBATCHES,
    ],
    "stages": [1, 2, 3, 4, 6, 8],
    "f": _TIMES,
    "i": _TIMES,
    "w": [0, *_TIMES],
    "comm": [0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1],
    "checkpointing": list(Checkpointing),
    "limit": ["", 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3],
}
"""Stops of each slider in the served page."""
_EXPORTED: dict[str, list[Any]] = {
    "ranks": [4, 8],
    "microbatches": [8, 16, 32],
    "stages": [2],
    "comm": [0, 0.1],
    "checkpointing": [Checkpointing.SELECTIVE, Checkpointing.NONE, Checkpointing.FULL],
    "limit": ["", 1],
}
"""Stops in an exported file, which has an answer for each combination, at typical times."""


def make_served_page() -> str:
    """The page that queries its server."""
    first = {name: setting.texts() for name, setting in presets().items()}
    return _page({"stops": _STOPS, "presets": first, "answers": None})


def make_exported_page(progress: Callable[[float], None] = lambda share: None) -> str:
    """The page without a server, with the answers for all stops of its sliders."""
    settings = list(_exported_settings())
    answers = {}
    for n, setting in enumerate(settings):
        answers[json.dumps(setting.texts(), separators=(",", ":"))] = _all_answers(setting)
        progress((n + 1) / len(settings))
    times = {name: sorted({setting.texts()[name] for setting in settings}, key=float) for name in "fiw"}
    first: dict[str, dict[str, str]] = {}
    for setting in settings:
        first.setdefault(f"typical transformer, {setting.checkpointing} checkpointing", setting.texts())
    return _page({"stops": _EXPORTED | times, "presets": first, "answers": answers})


def _exported_settings() -> Iterator[Setting]:
    for ranks, microbatches, comm, how, limit in product(
        *(_EXPORTED[name] for name in ("ranks", "microbatches", "comm", "checkpointing", "limit"))
    ):
        f, i, w = typical_times(how)
        yield Setting(ranks, microbatches, 2, (f, round(i, 3), w), comm, how, limit or None)


def _all_answers(setting: Setting) -> dict[str, Any]:
    """The answers of all schedules of this size, and the plan. A limit makes no difference to named schedules."""
    found = {}
    if setting.limit is None:
        for name in _names():
            try:
                found[name] = answer_simulation(setting, name)
            except ValueError as error:
                found[name] = {"error": str(error)}
    try:
        found["plan"] = answer_plan(setting)
    except ValueError as error:
        found["plan"] = {"error": str(error)}
    return found


def _names() -> list[str]:
    return [each.name for each in schedules().values()]


def _page(differing: dict[str, Any]) -> str:
    """`stops` of the sliders, `presets`, and `answers` by setting and name, or None if a server has them."""
    # The page uses it to change the time of I with the checkpointing.
    recomputed = {how: round(LLAMA_3_8B.recomputed(how), 3) for how in Checkpointing}
    data = {"names": sorted(_names(), key=str.lower), "recomputed": recomputed, **differing}
    return fill("playground.html", data=pack(data))
