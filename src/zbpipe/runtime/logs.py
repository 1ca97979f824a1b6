"""Logging helpers: messages where the user sees them, and ranks in words."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def log_visibly(logger: logging.Logger, words: str, *values: object) -> None:
    """Log a message as information, or as a warning if the job does not show information, Python's default."""
    logger.log(logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING, words, *values)


def group_ranks(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """The ranks with each value, from `values` by rank."""
    groups: dict[Value, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as "ranks 0-2, 5", from ranks in ascending order. A job may have thousands."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, each)) for each in found)
