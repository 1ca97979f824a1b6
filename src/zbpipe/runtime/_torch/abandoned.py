"""Steps that a rank abandons: messages continue, with a mark instead of values.

Ranks wait for each other's messages and match them by their order. So a rank that refuses a step, or fails in it, still
sends and receives everything in its list, but computes nothing. A rank that receives a mark asks for the reason, and
also abandons the step. In the end no rank waits, no message is left over, and the next step begins on all ranks.
"""

from __future__ import annotations

from ctypes import string_at
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor

_BYTE = 0xFF
"""Each byte of a mark: NaN in every floating dtype, but a NaN that arithmetic never produces."""


def can_send_marks(stage: _PipelineStageBase) -> bool:
    """Whether the stage's neighbours can distinguish marks from values. On an accelerator each check would block the
    host. In a fake process group nobody knows why a message looks like a mark."""
    has_neighbours = stage.group_size > 1 and dist.get_backend(stage.group) != "fake"
    return has_neighbours and torch.device(stage.device).type == "cpu"


def is_marked(stage: _PipelineStageBase, kind: str, microbatch: int) -> bool:
    """Whether what `stage` has received for this F, I or B is a mark."""
    # Values can look like a mark, such as a mask of integers that are all -1. So the other ranks are asked.
    if kind == "W":
        return False
    received = (stage.args_recv_info if kind == "F" else stage.grad_recv_info).get(microbatch, ())
    return any(_is_mark(buffer) for info in received if (buffer := getattr(info, "buffer", None)) is not None)


def _is_mark(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel():
        return False
    # The first byte is almost always enough, and takes a microsecond.
    if string_at(tensor.data_ptr(), 1)[0] != _BYTE:
        return False
    return bool((tensor.detach().contiguous().view(-1).view(torch.uint8) == _BYTE).all())


def mark_outputs(stage: _PipelineStageBase) -> tuple[Tensor, ...]:
    """A mark for each output of the stage's module."""
    if stage.is_last:
        return ()
    known: Any = stage
    # torch 2.11 keeps them on the stage itself.
    metas = known._stage_meta.outputs if hasattr(stage, "_stage_meta") else known.get_outputs_meta()
    return tuple(_make_mark(meta, stage.device) for meta in metas)


def mark_input_gradients(stage: _PipelineStageBase) -> tuple[Tensor | None, ...]:
    """A mark for each gradient that the previous stage receives."""
    received = stage.args_recv_info[0]
    if hasattr(stage, "_get_grad_send_meta"):
        metas = [None if info.is_root_arg else stage._get_grad_send_meta(n) for n, info in enumerate(received)]
    else:
        metas = [getattr(info, "buffer", None) for info in received]
    return tuple(None if meta is None else _make_mark(meta, stage.device) for meta in metas)


def _make_mark(like: Any, device: torch.device | str) -> Tensor:
    local = like.to_local() if isinstance(like, DTensor) else like
    count = torch.Size(local.shape).numel() * local.dtype.itemsize
    return torch.full((count,), _BYTE, dtype=torch.uint8, device=device).view(local.dtype).view(local.shape)
