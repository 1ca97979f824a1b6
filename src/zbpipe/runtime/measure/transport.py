"""The transport of a job's messages: from versions and variables, and measured after the first step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zbpipe.costs.model import Receives, Transport
from zbpipe.runtime._torch import messages, pipelining
from zbpipe.runtime.device import find_device
from zbpipe.runtime.ranks import agreement
from zbpipe.runtime.ranks.step_board import StepBoard

_QUEUES = {
    (0, 0): (Transport.ONE_QUEUE, "sends all messages of a process group as batches"),
    (2, 13): (Transport.QUEUE_PER_PEER, "has a communicator for each pair of ranks, unless a device is bound"),
    (2, 15): (Transport.ONE_QUEUE, "has one stream for all messages of a process group"),
}
"""Queues of single messages over NCCL and RCCL, by the first version of torch, and why."""
_ONE_CONNECTION = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 makes streams share a queue, so computations may wait for messages: unset it, unless"
    " tensor parallelism needs it"
)
_WAIT = 0.02
"""Seconds until a posted receive surely waits on the device."""
_LIMIT = 0.2
"""Seconds for computations of microseconds. If they take longer, they wait."""
_GLANCE = 0.001
"""Seconds between two checks whether they are over."""
_WIDTH, _PRODUCTS = 256, 20

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)
_measured = WeakKeyDictionary[Any, "Known"]()
"""Measured transports by a pipeline's process group, because a job may build a schedule for each step."""


class Known(NamedTuple):
    queues: Transport
    """Which messages wait for each other."""
    is_shared: bool
    """Whether computations wait for messages, too."""
    reason: str
    is_measured: bool = False

    @property
    def transport(self) -> Transport:
        return Transport.SHARED if self.is_shared else self.queues


def find_known(
    version: str, environment: Mapping[str, str], *, is_bound: bool = False, per_edge: bool = False, rocm: bool = False
) -> Known:
    """The transport over NCCL or RCCL for this version of torch and these variables.

    Args:
        version: torch's.
        environment: the job's variables.
        is_bound: whether the process group was bound to a device when it was made (`device_id`), as groups for each
            direction of the pipeline are.
        per_edge: whether torch has a group for each edge of the pipeline, even without its variable.
        rocm: whether torch was built for AMD's GPUs.
    """
    number = like = tuple(map(int, version.split(".")[:2]))
    per_edge |= number >= (2, 15) and environment.get("TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P") == "1"
    is_bound |= number == (2, 14) and environment.get("TORCH_DISTRIBUTED_PIPELINE_PER_DIRECTION_P2P") == "1"
    # NCCL's other process group came with 2.14, and is the usual one from 2.15 on.
    if (chosen := environment.get("TORCH_DIST_USE_NCCL2")) and number >= (2, 14):
        like = (2, 15) if chosen == "1" else (2, 14)
    queues, reason = _QUEUES[max(each for each in _QUEUES if each <= like)]
    if per_edge:
        queues, reason = Transport.QUEUE_PER_PEER, "has a group for each edge of the pipeline"
    elif is_bound and queues is Transport.QUEUE_PER_PEER:
        queues, reason = Transport.ONE_QUEUE, "has one communicator for a process group that is bound to a device"
    # On ROCm the effect of variables depends on its version.
    is_shared = environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and not rocm
    return Known(queues, is_shared, _ONE_CONNECTION if is_shared else f"torch {version} {reason}")


def find_known_of(stage: pipelining.Stage) -> Known:
    """The known facts on a stage's messages. Warns once of a costly setting."""
    group: Any = stage.group or dist.group.WORLD
    if group in _measured:
        return _measured[group]
    if pipelining.device_of(stage).type == "cpu":
        return Known(Transport.IDEAL, False, "on the CPU messages do not wait for each other")
    is_bound = getattr(group, "bound_device_id", None) is not None or getattr(stage, "p2p_per_direction", False)
    per_edge, rocm = getattr(stage, "p2p_per_edge", False), torch.version.hip is not None
    known = find_known(torch.__version__, os.environ, is_bound=is_bound, per_edge=per_edge, rocm=rocm)
    if known.is_shared:
        _warn_once(known.reason)
    return known


def find_messages(schedule: pipelining.PipelineSchedule) -> tuple[Transport, Receives]:
    """Transport of the messages, and when ranks post receives, in a schedule of zbpipe or torch."""
    known = find_known_of(pipelining.stages_of(schedule)[0]).transport
    by_torch = Receives.LATE if pipelining.receives_late(schedule) else Receives.EARLY
    return getattr(schedule, "transport", known), getattr(schedule, "receives", by_torch)


class Probe:
    """Measures once, after a step and on the routes of its messages, whether computations wait for messages."""

    def __init__(
        self, stage: pipelining.Stage, of_stages: Sequence[messages.StageMessages], board: StepBoard, queues: Transport
    ) -> None:
        """`of_stages`: messages of all the rank's stages, one of which is `stage`."""
        self._stage, self._messages = stage, of_stages
        self._board, self._queues = board, queues
        self._question = agreement.make_key("transport", ())
        for each in self._messages:
            each.routes = set()

    def find_transport(self) -> Transport:
        """The transport of the job. All ranks of the pipeline have to call this after the same step. Odd ranks receive
        first, then even ranks. Their neighbours send once all ranks have reported whether their computations ended
        while receives waited. So the answer does not depend on a host's delay."""
        me, device = self._stage.group_rank, pipelining.device_of(self._stage)
        group: Any = self._stage.group or dist.group.WORLD
        x = torch.zeros(_WIDTH, _WIDTH, device=device)
        compute = partial(torch.mm, x, x, out=torch.empty_like(x))
        compute()  # a kernel that loads while a receive waits may have to wait for it
        find_device(device).synchronize()
        place = dist.get_process_group_ranks(group).index
        routes = {each for own in self._messages for each in own.routes or () if (place(each[1]) - me) % 2}
        ordered = sorted(routes, key=lambda route: (route[1], route[2].group_name))  # the same at both ends
        are_free = True
        for turn in (1, 0):
            is_receiver = me % 2 == turn
            mine = [each for each in ordered if (each[0] is dist.irecv) == is_receiver]
            begin = partial(messages.post, mine * 2, device)  # a route's second receive waits for the first one
            posted = begin() if is_receiver else []
            is_free = not posted or _runs(compute, find_device(device).new_event())
            are_free &= all(self._board.gather(f"free/{turn}", is_free))
            for work in posted or begin():
                work.wait()
        for each in self._messages:
            each.routes = None
        # Replicas of a pipeline share the collectives of FSDP and TP, which have to run in the same order.
        is_shared = agreement.find_once(self._question, lambda: not are_free)
        _measured[group] = known = Known(self._queues, is_shared, "all ranks measured it", is_measured=True)
        return known.transport


def _runs(compute: Callable[[], object], event: torch.Event) -> bool:
    """Whether computations end while receives wait."""
    time.sleep(_WAIT)
    for _ in range(_PRODUCTS):
        compute()
    event.record()
    until = time.monotonic() + _LIMIT
    while not event.query() and time.monotonic() < until:
        time.sleep(_GLANCE)
    return event.query()
