"""Checks of public functions' arguments: a ValueError names the value, and a valid one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch.distributed as dist

from zbpipe.runtime._torch import pipelining


def require_schedule(what: str, schedule: object) -> None:
    """Refuse anything but a schedule of torch or zbpipe."""
    if not isinstance(schedule, pipelining.PipelineSchedule):
        raise ValueError(
            f"{what} takes a schedule on its stages, from zbpipe.build_pipeline_schedule, got {schedule!r}"
        )


def require_known(who: str, options: Iterable[str], known: set[str]) -> None:
    """Refuse the first of `options` that is not `known`. The message lists the known options, and names the nearest."""
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}? It" if near else "it"
            raise ValueError(f"{who} has no option {option!r}; {hint} takes: {', '.join(sorted(known))}")


def require_above_0(name: str, number: object) -> None:
    """Refuse anything but a number above 0. None is accepted."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if number is not None and not (is_number and number > 0):  # type: ignore[operator]
        raise ValueError(f"{name} has to be a number above 0, or None for the default, got {name}={number!r}")


def require_callable(**functions: object) -> None:
    """Refuse the first of `functions` that cannot be called."""
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(f"{name} has to be a function, got {function!r}")


def require_group(group: object) -> None:
    """Refuse anything but a process group. None means all ranks of the job."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group has to be a process group of torch.distributed, or None for all ranks, got {group!r}")


def require_path(name: str, path: Any) -> None:
    """Refuse anything but a file path. None means no file."""
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{name} has to be the path of a file, got {path!r}")


def require_yes_or_no(name: str, value: object) -> None:
    """Refuse anything but True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} has to be True or False, got {value!r}")
