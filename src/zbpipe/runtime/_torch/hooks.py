"""Hooks around a rank's computations, in one list with a defined order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, cast

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase

from zbpipe.runtime._torch.attributes import replaced

Call = Callable[..., Any]

Around = Callable[[str, int, int, Callable[[], Any]], Any]
"""Takes kind, stage and microbatch of a computation, and the computation. Runs it and returns its result."""


class HookOrder(IntEnum):
    """Order of hooks, from the outermost to the innermost. An outer hook sees the effects of inner ones."""

    SCALE = 0
    """Scales the gradients of earlier steps before the first computation that adds to them."""
    FOLLOW = 1
    """Records the computations that the host has launched."""
    CHECK = 2
    """Runs a microbatch once more. The recorded times exclude it."""
    RECORD = 3
    """Measures times and memory."""
    COPY = 4
    """Issues copies to the host and back."""


def stages_of(schedule: _PipelineSchedule) -> list[_PipelineStageBase]:
    """The stages of this rank. torch's schedules with one stage per rank keep it under another name."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else cast(Any, schedule)._stages


@contextmanager
def hook(schedule: _PipelineSchedule, order: HookOrder, around: Around) -> Iterator[None]:
    """Context in which every computation of this rank runs through `around`, the loss as one more F of the last stage.

    Waits for messages are outside the hook. Hooks may end in any order.
    """
    hooks: _Hooks = vars(schedule).get("_hooks") or _Hooks(schedule)
    own = order, around
    hooks.add(own)
    try:
        yield
    finally:
        hooks.remove(own)


class _Hooks:
    """Hooks of one schedule, attached while there are any."""

    def __init__(self, schedule: _PipelineSchedule) -> None:
        self._sorted: list[tuple[HookOrder, Around]] = []
        self._patches = ExitStack()
        vars(schedule)["_hooks"] = self
        self._patches.callback(vars(schedule).pop, "_hooks")
        for stage in stages_of(schedule):
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                compute = partial(self._stage_computes, name, stage.stage_index, getattr(stage, name))
                self._patches.enter_context(replaced(stage, **{name: compute}))
        loss = partial(self._loss_computes, schedule._maybe_compute_loss)
        self._patches.enter_context(replaced(schedule, _maybe_compute_loss=loss))

    def add(self, new: tuple[HookOrder, Around]) -> None:
        self._sorted.append(new)
        self._sorted.sort(key=lambda hook: hook[0])

    def remove(self, old: tuple[HookOrder, Around]) -> None:
        self._sorted.remove(old)
        if not self._sorted:
            self._patches.close()

    def _run(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        for _, around in reversed(self._sorted):
            compute = partial(around, kind, stage, microbatch, compute)
        return compute()

    def _stage_computes(self, name: str, stage: int, compute: Call, chunk: int, *args: Any, **kwargs: Any) -> Any:
        kind = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(name)
        kind = kind or ("B" if kwargs.get("full_backward", True) else "I")
        return self._run(kind, stage, chunk, partial(compute, chunk, *args, **kwargs))

    def _loss_computes(self, compute: Call, *args: Any, **kwargs: Any) -> Any:
        stage, _, _, chunk, *_ = args
        if not stage.is_last:
            return compute(*args, **kwargs)
        return self._run("F", stage.stage_index, chunk, partial(compute, *args, **kwargs))


class Routed(partial[Any]):
    """A call, and the function that it is routed through."""


@contextmanager
def route_calls(schedule: _PipelineSchedule, forward: Call, loss: Call, backward: Call) -> Iterator[None]:
    """Context in which this rank's forwards, losses and backwards run through these functions, which get call and
    arguments.

    Args:
        schedule: a schedule of torch or zbpipe.
        forward: wraps the forward of a stage's module: `(call, *args, **kwargs)`, with the inputs as the module sees
            them.
        loss: wraps the loss: `(call, output, target, **kwargs)`.
        backward: wraps a backward: `(call, kind, tensors, last_backward=...)`, where `tensors` has the
            "output_grads" (None on the last stage) and its "input_values". The first part of its result is the
            gradients of these.
    """
    with ExitStack() as patches:
        for stage in stages_of(schedule):
            calls = {
                "forward_maybe_with_nosync": partial(forward, stage.forward_maybe_with_nosync),
                "backward_maybe_with_nosync": Routed(backward, stage.backward_maybe_with_nosync),
            }
            patches.enter_context(replaced(stage, **calls))
        if schedule._loss_fn is not None:
            patches.enter_context(replaced(schedule, _loss_fn=partial(loss, schedule._loss_fn)))
        yield
