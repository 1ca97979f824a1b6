"""Position of torch's executor in its list, recorded while it runs, and its description.

The executor's frames would show it, too. But reading the frames of a thread that runs compiled code sometimes crashes
the process (Python 3.11, torch 2.13 and 2.14).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, _wait_batch_p2p

from zbpipe.runtime._torch.messages import SEND_OF, WAIT_KINDS
from zbpipe.schedule.ir import Op, OpKind, inputs
from zbpipe.simulator.actions import Action, other_end


class StoppedError(Exception):
    """Another thread has stopped the executor."""


class Position:
    """Position of one executor. Its thread writes, others may read."""

    def __init__(self) -> None:
        self.step = 0
        self.begun = 0
        """Number of this step's actions that have begun; one more when all have ended."""
        self.action: _Action | None = None
        self.is_stopped = False
        """Set by another thread: the executor must not begin another action."""
        self._awaited: tuple[int, Sequence[dist.Work]] = 0, ()
        """`begun` at the last wait for messages, and these messages."""

    @property
    def waits(self) -> bool:
        """Whether the action waits for messages, on the host or on the device."""
        since, messages = self._awaited
        return since == self.begun and not all(message.is_completed() for message in messages)

    def wait_for(self, messages: Sequence[dist.Work]) -> None:
        self._awaited = self.begun, messages

    @contextmanager
    def follow(self, runtime: _PipelineScheduleRuntime) -> Iterator[None]:
        """Context for the executor's run of `runtime`'s lists."""
        lists, rank = runtime.pipeline_order_with_comms, runtime.rank
        row = lists[rank]
        runtime.pipeline_order_with_comms = {**lists, rank: Row(row[:], lambda: self._walk(row, runtime))}
        self.step += runtime._has_backward
        self.begun, self.action, self._awaited = 0, None, (0, ())
        try:
            yield
        finally:
            runtime.pipeline_order_with_comms = lists
            self._awaited = 0, ()

    def _walk(self, row: Sequence[_Action], runtime: Any) -> Iterator[_Action]:
        for self.begun, self.action in enumerate(row, 1):
            if self.is_stopped:
                raise StoppedError
            if (sent := SEND_OF.get(self.action.computation_type)) is None:
                yield self.action
            else:  # not by the executor, which takes several times as long for this as for the wait
                _wait_batch_p2p(runtime.sends_under_way.pop(self.action._replace(computation_type=sent)))
        self.begun += 1


class Receives(dict[tuple[int, int], list[dist.Work]]):
    """Receives that torch's executor has posted, by stage and microbatch. It pops those that it waits for."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self._position = position

    def pop(self, *key: Any) -> Any:
        self._position.wait_for(messages := super().pop(*key))
        return messages


class Row(list[_Action]):
    """A rank's actions. torch's executor iterates them once, as `walk` yields them."""

    def __init__(self, row: Sequence[_Action], walk: Callable[[], Iterator[_Action]]) -> None:
        super().__init__(row)
        self._walk = walk

    def __iter__(self) -> Iterator[_Action]:
        return self._walk()

    def __deepcopy__(self, memo: dict[int, Any]) -> list[_Action]:
        """torch copies the lists to print them when an action fails. A walk may have side effects."""
        return [action for action in self[:] if action.computation_type not in WAIT_KINDS]


def find_failure(error: BaseException, runtime: _PipelineScheduleRuntime) -> str:
    """The action that raised `error`, its number, the step, and the message; or `error.place`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(frame.f_code is _EXECUTOR and "time_step" in frame.f_locals for frame in frames):
        return getattr(error, "place", NOT_BEGUN)
    return describe_position(runtime, any(frame.f_code is _wait_batch_p2p.__code__ for frame in frames))


def describe_position(runtime: Any, waits: bool | None = None) -> str:
    """As `find_failure`, for a step that another thread is running."""
    position: Position = runtime.position
    if position.action is None:
        return NOT_BEGUN
    if position.begun > len(runtime.pipeline_order_with_comms[runtime.rank]):
        return f"after action {_describe_step(runtime)}, waiting for its last sends"
    return _describe(position.begun, position.action, position.waits if waits is None else waits, runtime)


NOT_BEGUN = "before its first action"
"""The place of a refused step."""


def _describe(number: int, action: _Action, waits: bool, runtime: _PipelineScheduleRuntime) -> str:
    message = _describe_message(action, runtime) if waits or action.computation_type.value in _MESSAGES else ""
    return f"action {number} of {_describe_step(runtime)}, {action}{message}"


def _describe_step(runtime: Any) -> str:
    actions, step = len(runtime.pipeline_order_with_comms[runtime.rank]), runtime.position.step
    return f"{actions} in {'' if runtime._has_backward else 'the evaluation after '}step {step}"


def explain(error: BaseException) -> str | None:
    """The cause of a schedule's `error`, and its remedy, unless torch's message has them."""
    if "use_reentrant=True" in str(error):
        return (
            "torch infers what stages pass on by torch.autograd.grad, which a checkpoint with use_reentrant=True does"
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
    group = runtime._stages[0].group
    rank = runtime.stage_index_to_group_rank[stage]
    return rank if group is None else dist.get_global_rank(group, rank)
