"""How the messages of a running schedule go: what they wait for, and where ranks post their receives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zbpipe.costs.transport import Receives, Transport
from zbpipe.runtime._torch import hooks, pipelining

ON_ROCM = torch.version.hip is not None
"""Whether this torch was built for AMD's GPUs."""


def usual_transport(stage: pipelining.Stage) -> Transport:
    """What messages between `stage` and others usually wait for on its device.

    NCCL has one queue for all messages of a process group; torch >= 2.15 can give each edge of the pipeline a group of
    its own. On AMD's GPUs streams may share hardware queues, so this assumes the worst case.
    """
    if pipelining.device_of(stage).type == "cpu":
        return Transport.IDEAL
    if ON_ROCM:
        return Transport.SHARED
    return Transport.QUEUE_PER_PEER if getattr(stage, "p2p_per_edge", False) else Transport.ONE_QUEUE


class Messages(NamedTuple):
    """How the messages of a running schedule go."""

    transport: Transport
    receives: Receives


def messages_of(schedule: pipelining.PipelineSchedule) -> Messages:
    """What the messages wait for, and when ranks post receives, in one of zbpipe's schedules or torch's."""
    usual = usual_transport(hooks.stages_of(schedule)[0])
    by_torch = Receives.LATE if pipelining.receives_late(schedule) else Receives.EARLY
    return Messages(getattr(schedule, "transport", usual), getattr(schedule, "receives", by_torch))
