"""Waits for messages over gloo, which another thread can end."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_TAG = 1_000_003
"""Tag of a message that nobody sends."""


def interrupt() -> None:
    """Close this process's connections over gloo. All waits for them raise, on both sides.

    Not those over NCCL: aborted kernels end as if their messages had arrived, and the host would go on with what is in
    the buffers.
    """
    for group in list(distributed_c10d._world.pg_map):
        if "gloo" not in dist.get_backend_config(group) or dist.get_world_size(group) == 1:
            continue
        other = next(rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank())
        with suppress(RuntimeError):
            # gloo has no abort. But when one wait is over its time, gloo closes all connections of its group.
            receive: Any = dist.irecv(torch.empty(1), other, group, tag=_TAG)
            receive.wait(timedelta(milliseconds=1))
