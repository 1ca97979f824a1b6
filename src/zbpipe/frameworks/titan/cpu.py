"""TorchTitan on a machine without an accelerator: the CPU stands in for it.

For trying things out: gloo between the processes, no CUDA graphs, and plain causal attention, because FlexAttention has
no backward on the CPU (documents packed into one sequence see each other).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from zbpipe.runtime._torch.autograd import set_available_device_type

NOTICE = (
    "zbpipe: no accelerator found, so this trains on the CPU"
    " (gloo, causal attention in place of FlexAttention, no CUDA graphs)"
)


def is_needed() -> bool:
    """Whether torch sees no accelerator."""
    return not torch.accelerator.is_available()


def stand_in() -> None:
    """Make the CPU answer where TorchTitan asks for its device. Call this before torchtitan is imported."""
    set_available_device_type("cpu")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    answers = {
        "get_device_name": lambda device=None: platform.processor() or platform.machine(),
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=memory),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)
    # torch's own answer is the string "cpu", but TorchTitan passes it on as an index.
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]


def make_summing(parallelize_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`parallelize_fn`, with FSDP2 set to sum and to scale by itself: gloo has no reduction that scales."""

    def parallelize(*args: Any, **kwargs: Any) -> Any:
        model = parallelize_fn(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize
