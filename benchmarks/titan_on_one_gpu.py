"""TorchTitan on ranks that share one GPU, or the CPU: the program of each rank, with the arguments of its trainer.

    torchrun --nproc-per-node 4 benchmarks/titan_on_one_gpu.py --job.config_file FILE ...

NCCL refuses two ranks on one GPU. So all groups have the backend of `fifo.py`, whose messages go through the host and
keep NCCL's order. That shows whether the job works and gives the right losses, and nothing about speed.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

import fifo  # noqa: F401  # registers its backends
import torch
import torch.distributed as dist
import torch.distributed.fsdp

os.environ["LOCAL_RANK"] = "0"  # all on the same device
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
dist.Backend.default_device_backend_map[device.type] = "fifo_one_queue"
_fully_shard: Any = torch.distributed.fsdp.fully_shard


def fully_shard(module: Any, *args: Any, **options: Any) -> Any:
    """FSDP2's, that sums and scales by itself: gloo has no reduction that scales."""
    sharded = _fully_shard(module, *args, **options)
    for each in sharded if isinstance(sharded, list) else [sharded]:
        each.set_force_sum_reduction_for_comms(True)
    return sharded


torch.distributed.fsdp.fully_shard = fully_shard
runpy.run_module("zbpipe.titan.train", run_name="__main__", alter_sys=True)
