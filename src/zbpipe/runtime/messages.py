"""How the messages of a running schedule go: what they wait for, and where ranks post their receives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zbpipe.runtime import _torch
from zbpipe.transport import Receives, Transport

ON_ROCM = torch.version.hip is not None
"""Whether this torch was built for AMD's GPUs."""


def usual_transport(stage: _torch.Stage) -> Transport:
    """What messages between `stage` and others wait for, as far as it is known.

    NCCL has one queue for all messages of a process group; torch from 2.15 on can give each edge of the pipeline a
    group. On AMD's GPUs streams may share queues of the hardware, so the worst case is assumed.
    """
    if _torch.device_of(stage).type == "cpu":
        return Transport.IDEAL
    if ON_ROCM:
        return Transport.SHARED
    return Transport.QUEUE_PER_PEER if getattr(stage, "p2p_per_edge", False) else Transport.ONE_QUEUE


class Messages(NamedTuple):
    """How those of a running schedule go."""

    transport: Transport
    receives: Receives


def messages_of(schedule: _torch.PipelineSchedule) -> Messages:
    """What they wait for, and where the ranks post their receives, of zbpipe's schedules and torch's."""
    usual = usual_transport(_torch.stages_of(schedule)[0])
    by_torch = Receives.LATE if _torch.receives_late(schedule) else Receives.EARLY
    return Messages(getattr(schedule, "transport", usual), getattr(schedule, "receives", by_torch))
