"""The handlers of Primus (commit fd1eeab) for its nodes, in short: what they read, start and wait for."""

from typing import Any

from megatron.core.pipeline_parallel.schedules import backward_step, forward_step
from primus.backends.megatron.core.pipeline_parallel.primuspipe.handlers.communication_handler import (
    MESSAGES,
    Row,
    find,
    message,
)
from primus.core.pipeline_parallel.handler import wgrad_handler
from primus.core.pipeline_parallel.handler.wgrad_handler import WGradRunningCache
from primus.core.pipeline_parallel.scheduler.scheduler_node import FuncType


def received(row: Row, index: int, kind: FuncType) -> Any:
    message = find(row, index, kind)
    if message is None:
        return [None]
    if "req" in message.args:
        message.args.pop("req").wait()
    return message.args.pop("recv_buffers")


def forward(node: Any, index: int, row: Row) -> None:
    args = node.args
    args["inputs"] = received(row, index, FuncType.RF)
    args["outputs"], _ = forward_step(
        forward_step_func=args["forward_step_func"],
        data_iterator=args["data_iterator"][node.chunk],
        model=args["models"][node.chunk],
        input_tensor=args["inputs"],
        forward_data_store=args["forward_data_store"],
        is_last_stage=(node.meta["pp_rank"], node.chunk)
        == (node.meta["last_pp_stage_rank"], node.meta["vpp_size"] - 1),
    )


def backward(node: Any, index: int, row: Row) -> None:
    made = find(row, index, FuncType.F).args
    gradient = received(row, index, FuncType.RB)
    WGradRunningCache.current = (node.mini_batch, node.chunk) if node.func_type is FuncType.B else None
    found = backward_step(
        input_tensor=made.pop("inputs"), output_tensor=made.pop("outputs"), output_tensor_grad=gradient
    )
    node.args["outputs"] = [each.clone() for each in found if each is not None]


megatron_primuspipe_handler_dict = {
    FuncType.F: forward,
    FuncType.B: backward,
    FuncType.BW: backward,
    FuncType.W: wgrad_handler.run,
    **dict.fromkeys(MESSAGES, message),
}
