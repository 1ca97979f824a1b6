"""Steps of another size: all ranks have to know of another number of microbatches, or of other shapes, before they run.

With lists of different lengths ranks would wait for each other's messages forever, and only the rank with stage 0 sees
the input. So the ranks of a pipeline compare what a step with `microbatches=` is to run, in the job's key-value store.
A collective would not do: a rank whose program gave no `microbatches=` is in the messages of its step already. Such a
rank answers by the thread that looks whether its step moves. All other steps ask nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbpipe.runtime import _torch, checks
from zbpipe.runtime.agreement import new_key
from zbpipe.runtime.failures import Failure, PipelineError, RefusedStepError, wait_for_readers
from zbpipe.runtime.logs import name_ranks

_LOOK = timedelta(seconds=1)
"""How long a rank waits before it looks whether the time is up."""
_PATIENCE = 1800.0
"""Seconds, where the process group does not say its timeout."""


@dataclass(frozen=True)
class StepSize:
    """What a step runs on all ranks."""

    microbatches: int
    shapes: int = 0
    """Which shapes its microbatches have: those of the first step are 0, those seen next are 1, and so on."""


@dataclass(frozen=True)
class _Answer:
    """Of one rank."""

    microbatches: int | None = None
    """None where the step was given no `microbatches=`, or was refused."""
    shapes: int | None = None
    """Known on the rank with stage 0."""
    refused: str = ""
    """Why the step was refused before it could be compared."""


class Comparison:
    """The steps of one schedule, numbered alike on all ranks of its pipeline, and what these tell each other of a step:
    its size, and why it is abandoned.

    Args:
        stage: of the schedule.
    """

    def __init__(self, stage: _torch.Stage) -> None:
        self._ranks = tuple(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
        self.is_alone = stage.group_size == 1 or dist.get_backend(stage.group) == "fake"
        self._me = dist.get_rank()
        self._has_read = False
        """Whether this rank knows why the present step is abandoned."""
        self._name = new_key("step", self._ranks)
        self._step = 0
        self._answered = 0
        """The last step in which this rank has answered."""
        self._old: str | None = None
        """The key of its last answer, until all have read that."""

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Around a step: if it is refused before it is compared, the ranks that wait for this one learn why."""
        self._step += 1
        self._has_read = False
        try:
            yield
        except Exception as error:
            if not self.is_alone and not self.has_answered:
                with suppress(RuntimeError):  # the store may be gone, and this error says more
                    self._answer(_Answer(refused=f"{type(error).__name__}: {error}"))
            raise

    def agreed(self, microbatches: int, shapes: int | None, timeout: float | None) -> StepSize:
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
        store = _torch.default_store()
        if self.is_alone or store is None or self.has_answered:
            return
        if any(store.check([self._key(rank)]) for rank in self._ranks if rank != self._me):
            self._answer(_Answer())

    @property
    def has_answered(self) -> bool:
        """Whether this rank has told the others the size of the present step, or why it refuses that."""
        return self._answered == self._step

    def tell_next(self, stage: int, is_unfrozen: bool) -> None:
        """Tell the rank with `stage` whether what it gets in the present step is to have gradients from now on."""
        _torch.default_store().set(self._key(f"unfrozen/{stage}"), str(int(is_unfrozen)))

    def ask_previous(self, stage: int) -> bool:
        """Wait for what the rank before `stage` tells it."""
        store, key = _torch.default_store(), self._key(f"unfrozen/{stage}")
        is_unfrozen = bool(store.get(key) == b"1")
        store.delete_key(key)
        return is_unfrozen

    def post(self, failure: Failure) -> None:
        """Leave word of why the present step is abandoned, if no other rank has."""
        if store := _torch.default_store():
            store.compare_set(self._key("abandoned"), "", json.dumps(failure))

    def found(self) -> Failure | None:
        """Why the present step is abandoned; None if it is not."""
        store = _torch.default_store()
        if store is None or not store.check([self._key("abandoned")]):
            return None
        failure = Failure(*json.loads(store.get(self._key("abandoned"))))
        if not self._has_read:
            self._has_read = True
            store.add(self._key("readers"), 1)
        return failure

    def wait_for_readers(self) -> None:
        """Wait until all other ranks know why the present step is abandoned, but not for long."""
        wait_for_readers(self._key("readers"), len(self._ranks) - 1)

    def _answers(self, timeout: float) -> dict[int, _Answer]:
        store, keys = _torch.default_store(), [self._key(rank) for rank in self._ranks]
        deadline = time.monotonic() + timeout
        while not _are_there(store, keys):
            if time.monotonic() > deadline:
                missing = [rank for rank in self._ranks if not store.check([self._key(rank)])]
                raise PipelineError(
                    f"{name_ranks(missing)} did not come to this step, whose microbatches= all ranks have to give, in"
                    f" {timeout:.0f} seconds"
                )
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return {rank: _Answer(**json.loads(each)) for rank, each in zip(self._ranks, found, strict=True)}

    def _answer(self, answer: _Answer) -> None:
        if (store := _torch.default_store()) is not None:
            store.set(self._key(self._me), json.dumps(asdict(answer)))
        self._answered = self._step

    def _forget(self) -> None:
        """All have answered this time, so all have read what was there before."""
        if self._old is not None:
            _torch.default_store().delete_key(self._old)
        self._old = self._key(self._me)

    def _key(self, of: int | str) -> str:
        return f"{self._name}/{self._step}/{of}"


class StepSizes:
    """The sizes of the steps of one schedule.

    Args:
        stage: of the schedule.
        usual: number of microbatches of a step that is given no other one.
    """

    def __init__(self, stage: _torch.Stage, usual: int) -> None:
        self.usual = usual
        self.last = StepSize(usual)
        """Of the step that runs, or ran last."""
        self.are_set_up = False
        """Whether torch has set up messages for any shapes."""
        self.comparison = Comparison(stage)
        self.keywords_are_alike = False
        """Whether all ranks get keyword inputs of the same shapes. Then other shapes of these are another size."""
        self._keywords: list[Any] = []
        """Their shapes in the first step."""
        self.is_asked = False
        """Whether this step was given `microbatches=`, so that all ranks compare its size."""
        self._inputs: list[Any] = []
        """By their number, shapes; on the rank with stage 0, which alone sees the input."""
        self._set_up: list[_torch.Shapes] = []
        """By the number of shapes, what torch has set up; not up to date for those of the last step."""

    @property
    def last_was_usual(self) -> bool:
        """Whether the last step had the usual number of microbatches, and the shapes of the first step."""
        return self.last == StepSize(self.usual)

    def are_unusual(self, keywords: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all ranks see by these keyword inputs, one dict a microbatch, that the step has another size."""
        shapes = checks.input_shapes(each.values() for each in keywords) if self.keywords_are_alike else []
        if not self.are_set_up:
            self._keywords = shapes
        return len(keywords) != self.usual or shapes != self._keywords

    @contextmanager
    def begun(self, asked: int | None) -> Iterator[None]:
        """Around a step that was given `microbatches=asked`: if it is refused here, waiting ranks learn why."""
        self.is_asked = asked is not None
        try:
            with self.comparison.begun():
                yield
        finally:
            self.is_asked = False

    def agree(self, runtime: _torch.OwnRuntime, inputs: Sequence[Any] | None) -> bool:
        """Before the messages of a step: all ranks learn its size, and set up its shapes.

        Args:
            runtime: whose step it is.
            inputs: its microbatches, where this rank has stage 0.

        Returns whether the shapes are new, so that torch infers them in this step.

        Raises:
            ValueError: different numbers of microbatches, new shapes where torch cannot infer them, or another rank
                refuses the step.
            PipelineError: another rank does not come.
        """
        stage = _torch.stages_of(runtime)[0]
        size, number = StepSize(_torch.num_microbatches(runtime)), None
        if not self.are_set_up:
            self._inputs.clear()  # of a step that was refused
        shapes = checks.input_shapes(inputs or ())
        if stage.is_first:
            number = self._inputs.index(shapes) if shapes in self._inputs else len(self._inputs)
        if self.is_asked:
            size = self.comparison.agreed(size.microbatches, number, _torch.timeout_of(stage))
        is_new = self._use_shapes(runtime, size.shapes)
        if size.shapes == len(self._inputs):
            self._inputs.append(shapes)
        self.last = size
        return is_new

    def return_to_usual(self, runtime: _torch.OwnRuntime) -> None:
        """Set up the shapes of the first step, as `agree` does for a step that is not compared."""
        self._use_shapes(runtime, 0)
        self.last = StepSize(self.usual)

    def _use_shapes(self, runtime: _torch.OwnRuntime, number: int) -> bool:
        if not self.are_set_up or number == self.last.shapes:
            return False
        self._set_up = self._set_up or [_torch.shapes_of(runtime)]
        self._set_up[self.last.shapes] = _torch.shapes_of(runtime)
        if number < len(self._set_up):
            _torch.use_shapes(runtime, self._set_up[number])
            return False
        checks.require_inferred_shapes(runtime)
        # The stages run once to infer them, with weights that count.
        runtime.finish_optimizer_step()
        _torch.forget_shapes(runtime)
        self._set_up.append(_torch.shapes_of(runtime))
        return True


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
