"""Hooks around a rank's computations, in a defined order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from zbpipe.runtime._torch.pipelining import PipelineSchedule, ScheduleRuntime, stages_of
from zbpipe.runtime._torch.stage_work import Around, StageWork, find_work

Call = Callable[..., Any]


class HookOrder(IntEnum):
    """Order of hooks, from the outermost to the innermost. An outer hook sees the effects of inner ones."""

    SCALE = 0
    """Scales earlier steps' gradients before the first computation that adds to them."""
    FOLLOW = 1
    """Records the computations that the host has launched."""
    RECORD = 2
    COPY = 3


@contextmanager
def hook(schedule: PipelineSchedule, order: HookOrder, around: Around) -> Iterator[None]:
    """Context in which every computation of this rank runs through `around`, the loss as one more F of the last stage.
    Waits for messages are outside. Hooks may end in any order."""
    works = [find_work(stage) or StageWork(stage) for stage in stages_of(schedule)]
    if not works[0].hooks:
        cast(Any, schedule)._maybe_compute_loss = partial(_compute_loss, schedule._maybe_compute_loss)
    added = order, around
    for work in works:
        work.hooks.append(added)
        work.hooks.sort(key=itemgetter(0))
    try:
        yield
    finally:
        for work in works:
            work.hooks.remove(added)
            if type(work) is StageWork and not work.hooks:  # a stage of torch's own schedule
                work.release()
        if not works[0].hooks:
            del cast(Any, schedule)._maybe_compute_loss


def _compute_loss(compute: Call, stage: Any, output: Any, targets: Any, microbatch: int, *more: Any) -> Any:
    run = partial(compute, stage, output, targets, microbatch, *more)
    work = find_work(stage)
    return work.loss(microbatch, run) if work is not None and stage.is_last else run()


@contextmanager
def saved_from_scaling(runtime: ScheduleRuntime, kept: Sequence[Tensor]) -> Iterator[None]:
    """Context of a step that multiplies `kept` gradients by the number of microbatches, because its end divides all."""
    # Just before the step adds to them, so that a step that fails earlier does not change them. A separate copy would
    # double their memory. Dividing the loss instead would miss gradients of a loss with its own backwards, and would
    # round differently from torch's schedules.
    left = list(kept)
    last = runtime._num_stages - 1

    def save_first(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        if left and (kind != "F" or stage == last):
            with torch.no_grad():
                for each in left:
                    each.mul_(runtime._n_microbatches)
            left.clear()
        return compute()

    with hook(runtime, HookOrder.SCALE, save_first) if kept else nullcontext():
        yield
