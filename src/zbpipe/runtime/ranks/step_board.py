"""What ranks report of their present step in the job's key-value store: its size, and why it is abandoned.

With lists of different lengths ranks would wait for each other's messages forever, and only the rank with stage 0 sees
the input. So the ranks compare what a step with `microbatches=` is to run. A collective would not do: a rank whose
program gave no `microbatches=` is in the messages of its step already. Such a rank answers by the thread that looks
whether its step moves. All other steps ask nobody.
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
from zbpipe.runtime.logs import name_ranks
from zbpipe.runtime.ranks.agreement import is_alone, new_key
from zbpipe.runtime.ranks.failures import Notice, PipelineError, RefusedStepError

_LOOK = timedelta(seconds=1)
"""How long a rank waits before it looks whether the time is up."""
_PATIENCE = 1800.0
"""Seconds, where the process group does not say its timeout."""


@dataclass(frozen=True)
class StepSize:
    """What a step runs on all ranks."""

    microbatches: int
    shapes: int = 0
    """Which shapes its microbatches have: those of the first step are 0, the next ones seen are 1, then 2."""


@dataclass(frozen=True)
class _Answer:
    """Of one rank."""

    microbatches: int | None = None
    """None where the step was given no `microbatches=`, or was refused."""
    shapes: int | None = None
    """Known on the rank with stage 0."""
    refused: str = ""
    """Why the step was refused before it could be compared."""


class StepBoard:
    """What the ranks of a pipeline report of the present step of one schedule; all ranks number the steps alike.

    Args:
        stage: of the schedule.
    """

    def __init__(self, stage: pipelining.Stage) -> None:
        self._ranks = tuple(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
        self.is_alone = is_alone(stage.group)
        self._me = dist.get_rank()
        self._name = new_key("step", self._ranks)
        self._step = 0
        self.is_compared = False
        """Whether the present step was given `microbatches=`, so that all ranks compare its size."""
        self.notice = self._new_notice()
        self._answered = 0
        """The last step in which this rank has answered."""
        self._old: str | None = None
        """The key of its last answer, until all have read that."""

    @contextmanager
    def begin_step(self, is_compared: bool) -> Iterator[None]:
        """Around a step: if it is refused before it is compared, the ranks that wait for this one learn why."""
        self._step += 1
        self.is_compared = is_compared
        self.notice = self._new_notice()
        try:
            yield
        except Exception as error:
            if not self.is_alone and not self.has_answered:
                with suppress(RuntimeError):  # the store may be gone, and this error says more
                    self._answer(_Answer(refused=f"{type(error).__name__}: {error}"))
            raise
        finally:
            self.is_compared = False

    def agree_on_size(self, microbatches: int, shapes: int | None, timeout: float | None) -> StepSize:
        """The size of this step, after all ranks of the pipeline have called this.

        Args:
            microbatches: that this rank's step was given.
            shapes: of its input, where it has stage 0.
            timeout: seconds to wait for the others.

        Raises:
            ValueError: the ranks were not given the same number.
            RefusedStepError: the same, where all ranks know, or another rank refuses the step.
            PipelineError: another rank does not come.
        """
        mine = _Answer(microbatches, shapes)
        if self.is_alone:
            return StepSize(microbatches, shapes or 0)
        self._answer(mine)
        answers = self._answers(timeout or _PATIENCE)
        for rank, each in answers.items():
            if each.refused:
                raise RefusedStepError(f"rank {rank} refuses this step: {each.refused}")
        if any(each.microbatches != microbatches for each in answers.values()):
            # Ranks that were given no number are in the messages of a usual step, and learn of it there.
            know = all(each.microbatches is not None for each in answers.values())
            raise (RefusedStepError if know else ValueError)(
                f"the ranks were given different microbatches=: {_by_number(answers)}. Give the same number to step on"
                " all ranks of the pipeline, or none"
            )
        self._forget()
        return StepSize(microbatches, next(each.shapes for each in answers.values() if each.shapes is not None))

    def answer_for_stuck_step(self) -> None:
        """Tell ranks that wait for this one that its step was given no `microbatches=`. For another thread.

        Call it when a step, which has been compared if it was to be compared, does not move.
        """
        store = pipelining.default_store()
        if self.is_alone or store is None or self.has_answered:
            return
        if any(store.check([self.key(rank)]) for rank in self._ranks if rank != self._me):
            self._answer(_Answer())

    @property
    def has_answered(self) -> bool:
        """Whether this rank has told the others the size of the present step, or why it refuses that."""
        return self._answered == self._step

    def _answers(self, timeout: float) -> dict[int, _Answer]:
        store, keys = pipelining.default_store(), [self.key(rank) for rank in self._ranks]
        deadline = time.monotonic() + timeout
        while not _are_there(store, keys):
            if time.monotonic() > deadline:
                missing = [rank for rank in self._ranks if not store.check([self.key(rank)])]
                raise PipelineError(
                    f"{name_ranks(missing)} did not come to this step, whose microbatches= all ranks have to give, in"
                    f" {timeout:.0f} seconds"
                )
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return {rank: _Answer(**json.loads(each)) for rank, each in zip(self._ranks, found, strict=True)}

    def _answer(self, answer: _Answer) -> None:
        if (store := pipelining.default_store()) is not None:
            store.set(self.key(self._me), json.dumps(asdict(answer)))
        self._answered = self._step

    def _forget(self) -> None:
        """All have answered this time, so all have read what was there before."""
        if self._old is not None:
            pipelining.default_store().delete_key(self._old)
        self._old = self.key(self._me)

    def _new_notice(self) -> Notice:
        """Why the present step is abandoned."""
        return Notice(self.key("abandoned"), len(self._ranks) - 1)

    def key(self, of: int | str) -> str:
        """A key in the store for the present step, the same on all ranks."""
        return f"{self._name}/{self._step}/{of}"


def _are_there(store: Any, keys: list[str]) -> bool:
    """Whether all keys have come, after a while."""
    began = time.monotonic()
    try:
        store.wait(keys, _LOOK)
    except RuntimeError:
        if time.monotonic() - began < _LOOK.total_seconds() / 2:
            raise  # not the time is up, the store is gone
        return False
    return True


def _by_number(answers: dict[int, _Answer]) -> str:
    numbers = dict.fromkeys(each.microbatches for each in answers.values())
    ranks = {number: [rank for rank, each in answers.items() if each.microbatches == number] for number in numbers}
    return ", ".join(f"{'none' if number is None else number} on {name_ranks(of)}" for number, of in ranks.items())
