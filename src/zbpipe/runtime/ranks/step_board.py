"""Reports of the ranks on their present step in the job's key-value store: its size, and why it is abandoned.

With lists of different lengths ranks would wait for each other's messages forever, and only the rank with stage 0 sees
the input. So the ranks compare the size of a step with `microbatches=`. A collective is not possible: a rank whose
program passed no `microbatches=` is already in the messages of its step. Such a rank answers from the thread that
checks its progress. All other steps compare nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.logs import group_ranks, name_ranks
from zbpipe.runtime.ranks.agreement import is_alone, make_key
from zbpipe.runtime.ranks.failures import Notice, PipelineError, RefusedStepError

_LOOK = timedelta(seconds=1)
"""Interval at which a waiting rank checks its timeout."""
_PATIENCE = 1800.0
"""Timeout in seconds if the process group does not report one."""


@dataclass(frozen=True)
class StepSize:
    """Size of a step on all ranks."""

    microbatches: int
    shapes: int = 0
    """Number of the microbatches' shapes: 0 for the first step's, 1 for the next new ones, then 2."""


@dataclass(frozen=True)
class _Answer:
    """Answer of one rank."""

    microbatches: int | None = None
    """None if the step got no `microbatches=`, or was refused."""
    shapes: int | None = None
    """Known on the rank with stage 0."""
    refused: str = ""
    """Why the step was refused before it could be compared."""


class StepBoard:
    """Reports of a pipeline's ranks on the present step of one schedule. All ranks number the steps in the same way."""

    def __init__(self, stage: pipelining.Stage) -> None:
        self._ranks = tuple(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
        self.is_alone = is_alone(stage.group)
        self._me = dist.get_rank()
        self._name = make_key("step", self._ranks)
        self._step = 0
        self.is_compared = False
        """Whether the present step got `microbatches=`, so that all ranks compare its size."""
        self.notice = self._make_notice()
        self._answered = 0
        """The last step in which this rank has answered."""
        self._old: str | None = None
        """Key of this rank's last answer, until all have read it."""

    @contextmanager
    def begin_step(self, is_compared: bool) -> Iterator[None]:
        """Context of a step: if it is refused before the comparison, the waiting ranks learn why."""
        self._step += 1
        self.is_compared = is_compared
        self.notice = self._make_notice()
        try:
            yield
        except Exception as error:
            if not self.is_alone and not self.has_answered:
                with suppress(RuntimeError):  # the store may be gone, and the original error says more
                    self._answer(_Answer(refused=f"{type(error).__name__}: {error}"))
            raise
        finally:
            self.is_compared = False

    def agree_on_size(self, microbatches: int, shapes: int | None, timeout: float | None) -> StepSize:
        """The size of this step, after all ranks of the pipeline have called this. Stage 0's rank knows the `shapes`.

        Raises:
            ValueError: the ranks got different numbers.
            RefusedStepError: the ranks got different numbers and all know it, or another rank refuses the step.
            PipelineError: another rank does not reach the step.
        """
        if self.is_alone:
            return StepSize(microbatches, shapes or 0)
        self._answer(_Answer(microbatches, shapes))
        answers = self._wait_for_answers(timeout or _PATIENCE)
        for rank, each in answers.items():
            if each.refused:
                raise RefusedStepError(f"rank {rank} refuses this step: {each.refused}")
        if any(each.microbatches != microbatches for each in answers.values()):
            # Ranks without a number are in the messages of a usual step, and learn of it there.
            know = all(each.microbatches is not None for each in answers.values())
            groups = group_ranks({rank: each.microbatches for rank, each in answers.items()})
            found = ", ".join(f"{number or 'none'} on {name_ranks(of)}" for number, of in groups.items())
            raise (RefusedStepError if know else ValueError)(
                f"the ranks were given different microbatches=: {found}. Give the same number to step on all ranks of"
                " the pipeline, or none"
            )
        if self._old is not None:  # all have answered now, so all have read the previous answers
            pipelining.default_store().delete_key(self._old)
        self._old = self._key(self._me)
        return StepSize(microbatches, next(each.shapes for each in answers.values() if each.shapes is not None))

    def answer_for_stuck_step(self) -> None:
        """Tell waiting ranks that this rank's step got no `microbatches=`. Called from another thread."""
        # Call it when a step is stuck, after its comparison if there is one.
        store = pipelining.default_store()
        if self.is_alone or store is None or self.has_answered:
            return
        if any(store.check([self._key(rank)]) for rank in self._ranks if rank != self._me):
            self._answer(_Answer())

    def pass_on_unfreezing(self, schedule: pipelining.OwnRuntime) -> None:
        """Before a step's messages, request gradients for newly unfrozen parameters."""
        # In a model that begins with frozen stages, only a stage's own rank sees that its parameters are no longer
        # frozen. Then the next stage has to send gradients, which the messages' setup lacks. So ranks report to the
        # next rank.
        is_ready = pipelining.is_set_up(schedule) and pipelining.can_infer_shapes(schedule)
        if not pipelining.trains(schedule) or not is_ready:
            return
        store = pipelining.default_store()
        own = {stage.stage_index for stage in schedule.own_stages}
        is_unfrozen = False
        for stage in schedule.own_stages:
            index, has_none = stage.stage_index, stage.is_without_gradients("inputs")
            if index - 1 not in own:
                is_unfrozen = False
                if has_none and not self.is_alone:
                    key = self._key(f"unfrozen/{index}")
                    is_unfrozen = store.get(key) == b"1"
                    store.delete_key(key)
            if has_none and is_unfrozen:
                stage.give_gradients("inputs")
            if stage.is_without_gradients("outputs"):
                if is_unfrozen := is_unfrozen or stage.is_unfrozen:
                    stage.give_gradients("outputs")
                if index + 1 not in own and not self.is_alone:
                    store.set(self._key(f"unfrozen/{index + 1}"), str(int(is_unfrozen)))

    @property
    def has_answered(self) -> bool:
        """Whether this rank has reported the size of the present step, or why it refuses the step."""
        return self._answered == self._step

    def _wait_for_answers(self, timeout: float) -> dict[int, _Answer]:
        store, keys = pipelining.default_store(), [self._key(rank) for rank in self._ranks]
        deadline = time.monotonic() + timeout
        while not _are_there(store, keys):
            if time.monotonic() > deadline:
                missing = [rank for rank in self._ranks if not store.check([self._key(rank)])]
                raise PipelineError(
                    f"{name_ranks(missing)} did not reach this step in {timeout:.0f} seconds, but all ranks have to"
                    " give its microbatches="
                )
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return {rank: _Answer(**json.loads(each)) for rank, each in zip(self._ranks, found, strict=True)}

    def _answer(self, answer: _Answer) -> None:
        if (store := pipelining.default_store()) is not None:
            store.set(self._key(self._me), json.dumps(asdict(answer)))
        self._answered = self._step

    def _make_notice(self) -> Notice:
        """The notice of why the present step is abandoned."""
        return Notice(self._key("abandoned"), len(self._ranks) - 1)

    def _key(self, of: int | str) -> str:
        """A key in the store for the present step, the same on all ranks."""
        return f"{self._name}/{self._step}/{of}"


def _are_there(store: Any, keys: list[str]) -> bool:
    """Wait for a while; returns whether all keys are in the store."""
    began = time.monotonic()
    try:
        store.wait(keys, _LOOK)
    except RuntimeError:
        if time.monotonic() - began < _LOOK.total_seconds() / 2:
            raise  # not a timeout: the store is gone
        return False
    return True
