"""Description of the action that torch's executor runs, or failed in."""

from __future__ import annotations

import traceback

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, _wait_batch_p2p

from zbpipe.runtime._torch.hooks import stages_of
from zbpipe.runtime._torch.pipelining import OwnRuntime
from zbpipe.schedule.ir import Op, OpKind, inputs
from zbpipe.simulator.actions import Action, other_end


def find_place_of(error: BaseException, runtime: _PipelineScheduleRuntime) -> str:
    """The step of the schedule (from 0, as torch numbers them), the action, and the message in which `error` was
    raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    executor = next((n for n, frame in enumerate(frames) if frame.f_code is _EXECUTOR), len(frames) - 1)
    found = frames[executor].f_locals  # no other error of torch's executor says so
    if "time_step" not in found:
        return "before step 0"
    waits = any(frame.f_code is _wait_batch_p2p.__code__ for frame in frames[executor:])
    if waits and frames[executor + 1].f_code is _wait_batch_p2p.__code__:
        return _describe_end(runtime)
    return _describe(found["time_step"], found["action"], waits, runtime)


def find_place(runtime: OwnRuntime) -> str:
    """The place (as in `find_place_of`) of a step that another thread is running."""
    place = runtime.place
    if place.action is None:
        return "before step 0"
    if place.begun > len(runtime.pipeline_order_with_comms[runtime.rank]):
        return _describe_end(runtime)
    return _describe(place.begun - 1, place.action, place.waits, runtime)


def _describe(step: int, action: _Action, waits: bool, runtime: _PipelineScheduleRuntime) -> str:
    message = _describe_message(action, runtime) if waits or action.computation_type.value in _MESSAGES else ""
    return f"step {step} of {len(runtime.pipeline_order_with_comms[runtime.rank])}, {action}{message}"


def _describe_end(runtime: _PipelineScheduleRuntime) -> str:
    return f"after step {len(runtime.pipeline_order_with_comms[runtime.rank]) - 1}, waiting for its last sends"


def explain(error: BaseException) -> str | None:
    """The cause of a schedule's `error`, and its remedy, if torch's message lacks them."""
    if "use_reentrant=True" in str(error):
        return (
            "torch infers what stages hand on by torch.autograd.grad, which a checkpoint with use_reentrant=True does"
            " not allow: set use_reentrant=False, or give the shapes by PipelineStage(..., input_args=...,"
            " output_args=...)"
        )
    return None


_EXECUTOR = _PipelineScheduleRuntime._step_microbatches.__code__
_MESSAGES = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")


def _describe_message(action: _Action, runtime: _PipelineScheduleRuntime) -> str:
    """The peer rank of `action`, and the op that it waits for."""
    kind, stage, microbatch = action.computation_type.value, action.stage_index, action.microbatch_index or 0
    kind = kind.removeprefix("WAIT_")
    if kind in _MESSAGES:
        way = "to" if kind.startswith("SEND") else "from"
        return f" {way} rank {_find_rank(other_end(Action(stage, kind, microbatch)).stage, runtime)}"
    *_, feeders = inputs(Op(stage, OpKind(kind), microbatch), runtime._num_stages)
    ops = {str(op) for row in runtime.pipeline_order.values() for op in row}
    source = feeders[0].stage
    awaited = next((str(op) for op in feeders if str(op) in ops), f"stage {source}")
    return f", waiting for {awaited} from rank {_find_rank(source, runtime)}"


def _find_rank(stage: int, runtime: _PipelineScheduleRuntime) -> int:
    """The global rank of a stage."""
    group = stages_of(runtime)[0].group
    rank = runtime.stage_index_to_group_rank[stage]
    return rank if group is None else dist.get_global_rank(group, rank)
