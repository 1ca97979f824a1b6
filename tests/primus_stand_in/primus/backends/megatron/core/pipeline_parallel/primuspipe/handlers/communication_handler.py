"""How Primus (commit fd1eeab) sends and receives.

A message starts where both ranks have come to it. Before a rank starts messages, it waits for its earlier sends. Ends
of messages that follow each other start together, unless their time steps differ.
"""

from typing import Any

import torch
import torch.distributed as dist
from primus.core.pipeline_parallel.scheduler.scheduler_node import FuncType, SchedulerNode

Row = list[SchedulerNode]
MESSAGES = (FuncType.SF, FuncType.SB, FuncType.RF, FuncType.RB)
waiting: list[SchedulerNode] = []
sent: list[SchedulerNode] = []


def reset_pp_comm_caches() -> None:
    waiting.clear()
    sent.clear()


def find(row: Row, index: int, *kinds: FuncType, chunk: int | None = None) -> Any:
    node = row[index]
    chunk = node.chunk if chunk is None else chunk
    for other in row[:index]:
        if other.func_type in kinds and (other.mini_batch, other.chunk) == (node.mini_batch, chunk):
            return other
    return None


def message(node: Any, index: int, row: Row) -> None:
    args, kind = node.args, node.func_type
    is_own = args["from_pp_rank"] == args["to_pp_rank"]
    if kind in (FuncType.SF, FuncType.SB):
        makers = (FuncType.F,) if kind is FuncType.SF else (FuncType.B, FuncType.BW)
        args["send_buffers"] = find(row, index, *makers).args["outputs"]
    elif is_own:
        send = find(row, index, FuncType.SF if kind is FuncType.RF else FuncType.SB, chunk=args["recv_from_chunk"])
        args["recv_buffers"] = [each.detach().requires_grad_() for each in send.args["send_buffers"]]
    else:
        args["recv_buffers"] = [
            torch.empty(shape, dtype=args["dtype"], requires_grad=True) for shape in args["recv_tensor_shapes"]
        ]
    if not is_own:
        waiting.append(node)
    follows = row[index + 1] if index + 1 < len(row) else None
    if follows and follows.func_type in MESSAGES and (follows.args or {}).get("time_step") == args.get("time_step"):
        return
    if not waiting:
        return
    for earlier in sent:
        earlier.args.pop("req").wait()
    sent[:] = [each for each in waiting if "send_buffers" in each.args]
    for each in sorted(waiting, key=lambda each: (each.args["to_pp_rank"], each.func_type.name)):
        start(each)
    waiting.clear()


def start(node: Any) -> None:
    args = node.args
    for tensor in args.get("send_buffers", ()):
        args["req"] = dist.isend(tensor.detach(), group=args["pp_group"], group_dst=args["to_pp_rank"])
    for tensor in args.get("recv_buffers", ()):
        args["req"] = dist.irecv(tensor.data, group=args["pp_group"], group_src=args["from_pp_rank"])
