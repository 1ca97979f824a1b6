"""The private names of torch that zbpipe stands on, all in this one file.

Written for torch 2.15.0 and 2.13.0. What differs between versions is asked of the installed torch, not of its version
number.
"""

from __future__ import annotations

import inspect
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.pipelining.schedules import (
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from zbpipe.ir import Op, Schedule

PipelineSchedule = _PipelineSchedule
"""What all of torch's schedules are."""

ScheduleRuntime = _PipelineScheduleRuntime
"""The `PipelineScheduleMulti` that lowers a list of compute actions to sends, receives and unshards, and runs it."""

Stage = _PipelineStageBase
"""What all of torch's stages are, `PipelineStage` among them."""

SCHEDULE_OPTIONS = frozenset(inspect.signature(ScheduleZBVZeroBubble.__init__).parameters) - {
    "self",
    "stages",
    "n_microbatches",
}
"""The keyword arguments that the installed torch's multi-stage schedules take."""


def torch_class(name: str) -> type[_PipelineSchedule]:
    """torch's own class under torch's name for it."""
    return cast(type[_PipelineSchedule], get_schedule_class(name))


def lower(runtime: _PipelineScheduleRuntime, schedule: Schedule) -> None:
    """Hand `schedule` to torch: it checks the order once more, adds the communication and keeps both lists."""
    runtime.pipeline_order = {rank: [_action(op) for op in ops] for rank, ops in enumerate(schedule)}
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)


def lowered_table(runtime: _PipelineScheduleRuntime) -> str:
    """All ranks' actions with the communication that torch added, as torch's CSV."""
    return "\n".join(",".join(map(str, row)) for _, row in sorted(runtime.pipeline_order_with_comms.items()))


def to_other_ranks(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """The sends and receives whose peer is not this very process."""
    return [operation for operation in operations if operation.peer != dist.get_rank()]


def _action(op: Op) -> _Action | None:
    return _Action(op.stage, _ComputationType(op.kind.value), op.microbatch)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called on it."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def has_hooks(weight: Tensor) -> bool:
    """Whether hooks want to see the gradient of `weight`: `register_hook`, `register_post_accumulate_grad_hook`."""
    return bool(weight._backward_hooks) or bool(weight._post_accumulate_grad_hooks)


def grad_dtype(weight: Tensor, gradient: Tensor) -> torch.dtype:
    """The dtype in which autograd would keep `gradient` of `weight`.

    FSDP2 asks for wider gradients through `grad_dtype`, None meaning "as they come"; torch before 2.13 has no such
    attribute and wants the weight's own dtype.
    """
    return cast(torch.dtype, getattr(weight, "grad_dtype", weight.dtype) or gradient.dtype)


def set_available_device_type(device_type: str) -> None:
    """Make `device_type` torch's answer to the question which accelerator this machine has."""
    torch._utils._get_available_device_type = lambda: device_type
