"""Logging helpers: what a job logs where its user sees it, and ranks in words."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def log_visibly(logger: logging.Logger, words: str, *values: object) -> None:
    """Log it as information, or as a warning in a job that shows no information, as Python does by default."""
    logger.log(logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING, words, *values)


def group_ranks(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """The ranks with each of these `values`, which are given by rank."""
    groups: dict[Value, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 0-2, 5", for ranks in ascending order: a job may have thousands of them."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, each)) for each in found)
