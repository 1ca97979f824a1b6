"""Where torch's own split of the backward into I and W can run. zbpipe's split runs everywhere."""

from __future__ import annotations

from zbpipe.costs.transformer import Checkpointing
from zbpipe.schedule.ir import OpKind, Schedule

NOTE = (
    "* torch's own split: it fails under selective checkpointing and torch.compile, recomputes for each W under full,"
    " and takes more memory than is shown. zbpipe's split runs the same orders as ZBV, DualPipeVSplit and"
    " InterleavedZeroBubbleSplit"
)
"""For people, below tables in which such schedules have an asterisk."""


def has_torchs_split(schedule: Schedule, source: str) -> bool:
    """Whether torch splits the backwards of a schedule, which a class of `source` runs."""
    return source == "torch" and any(op.kind is OpKind.I for ops in schedule for op in ops)


def runs_torchs_split(checkpointing: Checkpointing | None, compiled: bool = False) -> bool:
    """Whether torch's own split can run, and as fast as is simulated. Where the checkpointing is not known, it may not.

    >>> [runs_torchs_split(each) for each in Checkpointing]
    [True, False, False]
    """
    return checkpointing is Checkpointing.NONE and not compiled
