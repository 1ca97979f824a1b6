"""Conditions for torch's split of the backward into I and W. zbpipe's split runs everywhere."""

from __future__ import annotations

from zbpipe.costs.transformer import Checkpointing
from zbpipe.schedule.ir import OpKind, Schedule

NOTE = (
    "* torch's own split: it fails under selective checkpointing and torch.compile, recomputes for each W under full,"
    " and takes more memory than is shown. zbpipe's split runs the same orders as ZBV, DualPipeVSplit and"
    " InterleavedZeroBubbleSplit"
)
"""Note below tables that mark such schedules with an asterisk."""


def has_torchs_split(schedule: Schedule, source: str) -> bool:
    """Whether torch splits the backwards of a schedule whose class comes from `source`."""
    return source == "torch" and OpKind.I in schedule.kinds


def runs_torchs_split(checkpointing: Checkpointing | None, compiled: bool = False) -> bool:
    """Whether torch's split can run, as fast as simulated. It may not if the checkpointing is unknown.

    >>> [runs_torchs_split(each) for each in Checkpointing]
    [True, False, False]
    """
    return checkpointing is Checkpointing.NONE and not compiled
