"""Reports of the ranks on unusual steps, in the job's key-value store: their sizes, and refusals.

With lists of different lengths, ranks would wait for each other's messages forever, and only the rank with stage 0 sees
the input. So the ranks compare the size of a step with `microbatches=`. A collective is impossible, because a rank
without `microbatches=` is already in its step's messages.

A rank that refuses a step reports it and continues. If all ranks refuse, their next step follows. A rank that does not
refuse waits for messages that will not come. It finds the report, and ends the pipeline. Usual steps access no store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining, position
from zbpipe.runtime._torch.shapes import Shapes, StepShapes, describe_inputs, freeze
from zbpipe.runtime.ranks.agreement import group_ranks, is_alone, make_key
from zbpipe.runtime.ranks.failures import Failure, PipelineError, name_ranks

_LOOK = timedelta(seconds=1)
"""Interval at which a waiting rank checks its timeout."""
_PATIENCE = 1800.0
"""Timeout in seconds if the process group does not report one."""
_LINGER = 5.0
"""Longest wait for the other ranks, in seconds, of a refusing rank with the store."""


class Table(NamedTuple):
    """What stage 0's rank, which sees the input, tells all ranks of a step."""

    usual: Shapes
    """Shapes of inputs in steps without `microbatches=`: those of the last such step for which torch has set up
    messages, else those of the first step."""
    set_up: Shapes
    """Inputs for which torch has set up messages."""
    inputs: tuple[Shapes, ...] = ()
    """By microbatch."""


class StepBoard:
    """Reports of a pipeline's ranks on the steps of one schedule. All ranks number the steps alike."""

    def __init__(self, stage: pipelining.Stage) -> None:
        self._stage = stage
        self._ranks = tuple(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
        self.is_alone = is_alone(stage.group)
        self._me = dist.get_rank()
        self._name = make_key("step", self._ranks)
        self._step = 0
        self.is_compared = False
        """Whether the present step has `microbatches=`, so that all ranks compare its size."""
        self.ended_by = ""
        """The failure that ended the pipeline."""
        self._run = 0
        """The last step whose messages this rank began."""
        self._events = 0
        """Number of this rank's comparisons and refusals, the same on all ranks with the same steps."""
        self._refused: str | None = None
        """Prefix of the keys with which ranks report that they refuse the last step; None if this rank did not."""
        self._answered = 0
        """The last step that this rank has answered."""
        self._old: str | None = None
        """Key of this rank's last answer, until all have read it."""

    def begin_step(self, *, is_compared: bool) -> None:
        """Begin a step. If this rank refused the last one, first wait until all ranks have."""
        if (refused := self._refused) is not None:
            self._refused = None
            with suppress(PipelineError):  # of an earlier step
                keys = {rank: f"{refused}/{rank}" for rank in self._ranks}
                self._wait_for(keys, "refused the last step, like this one")
        if self.ended_by:
            raise PipelineError(
                f"this schedule runs no other step, because one failed ({self.ended_by}). Build the process group and"
                " the schedule anew, or end the job"
            )
        self._step += 1
        self.is_compared = is_compared and not self.is_alone

    def begin_messages(self) -> None:
        """Report to this process's other thread that the step is not refused."""
        self._run = self._step

    def refuse(self, failure: Failure) -> None:
        if self.is_alone or (store := pipelining.default_store()) is None:
            return
        with suppress(RuntimeError):  # the store may be gone, and the original error says more
            if self.is_compared and self._answered != self._step:
                self._answer(refused=failure.words)
                self._report(failure)
            self._events += 1
            self._refused = key = self._report(failure)
            store.set(f"{key}/{self._me}", "")
            if pipelining.has_store():  # it ends with this process
                deadline = time.monotonic() + _LINGER
                while not _are_there(store, [f"{key}/{rank}" for rank in self._ranks]) and not self.ended_by:
                    if time.monotonic() > deadline:
                        break

    def find_other_refusal(self, store: Any) -> Failure | None:
        """The report on a step that another rank refuses and this one runs. Called from another thread."""
        if self.is_alone:
            return None
        key = f"{self._name}/event/{self._events}"
        if not store.check([key]):
            return None
        step, (rank, words) = json.loads(store.get(key))
        return Failure(rank, f"{words} (rank {self._me} runs this step)") if step <= self._run else None

    def compare(self, given: int | tuple[int, ...], table: Table | None) -> Table:
        """The step's table, once all ranks of the pipeline have called this. Only stage 0's rank has it before.
        ValueError if the ranks got different numbers, or another rank refuses the step."""
        self._answer(given, table)
        keys = {rank: self._key(rank) for rank in self._ranks}
        if not _are_there(pipelining.default_store(), [*keys.values()]):
            words = f"it got microbatches={_write(given)}; give all ranks of the pipeline the same, or none"
            reported = self._report(Failure(self._me, f", {position.NOT_BEGUN}: {words}"))
            self._wait_for(keys, "reached this step, but all ranks have to give its microbatches=")
            pipelining.default_store().delete_key(reported)
        sizes, tables, refusals = zip(*self._read(keys), strict=True)
        for rank, refused in zip(keys, refusals, strict=True):
            if refused:
                raise ValueError(f"{Failure(rank, refused)}. All ranks skip this step")
        groups = group_ranks(dict(zip(keys, sizes, strict=True)))
        counts = {each if isinstance(each, int) else len(each) for each in groups}
        if len(counts) > 1 or len([each for each in groups if not isinstance(each, int)]) > 1:
            found = ", ".join(f"{_write(each)} on {name_ranks(of)}" for each, of in groups.items())
            raise ValueError(
                f"the ranks were given different microbatches=: {found}. Give the same to step on all ranks of the"
                " pipeline, or none"
            )
        if self._old is not None:  # all have answered now, so all have read the previous answers
            pipelining.default_store().delete_key(self._old)
        self._old = self._key(self._me)
        return Table(*next(each for each in tables if each is not None))

    def give(self, name: str, value: str) -> None:
        if not self.is_alone:
            pipelining.default_store().set(self._key(name), value)

    def take(self, name: str, group_rank: int) -> str:
        """Wait for the value that a rank of the pipeline gives this one."""
        store, key = pipelining.default_store(), self._key(name)
        self._wait_for({self._ranks[group_rank]: key}, "reached this step")
        value: str = store.get(key).decode()
        store.delete_key(key)
        return value

    def gather(self, name: str, value: bool) -> list[bool]:
        """The values of all ranks of the pipeline, which have to call this in the same step."""
        keys = {rank: self._key(f"{name}/{rank}") for rank in self._ranks}
        pipelining.default_store().set(keys[self._me], json.dumps(value))
        self._wait_for(keys, "reached the end of this step")
        return self._read(keys)

    def _read(self, keys: Mapping[int, str]) -> list[Any]:
        store = pipelining.default_store()
        found = store.multi_get([*keys.values()]) if store.has_extended_api() else map(store.get, keys.values())
        return [freeze(json.loads(each)) for each in found]

    def _report(self, failure: Failure) -> str:
        """Report the last event, so that ranks that run this step end the pipeline. Returns the report's key."""
        key = f"{self._name}/event/{self._events - 1}"
        pipelining.default_store().compare_set(key, "", json.dumps((self._step, failure)))
        return key

    def _wait_for(self, keys: Mapping[int, str], what: str) -> None:
        """Wait until the ranks' keys are in the store. PipelineError if a rank has not done `what` in time."""
        store = pipelining.default_store()
        timeout = pipelining.timeout_of(self._stage) or _PATIENCE
        deadline = time.monotonic() + timeout
        while not _are_there(store, [*keys.values()]):
            if self.ended_by:
                raise PipelineError(self.ended_by)
            if time.monotonic() > deadline:
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                self.ended_by = f"{name_ranks(missing)} has not {what}, and {timeout:.0f} seconds are over"
                self._events += 1
                self._report(Failure(self._me, f", {position.NOT_BEGUN}: {self.ended_by}"))
                raise PipelineError(self.ended_by)

    def _answer(self, given: int | tuple[int, ...] = 0, table: Table | None = None, refused: str = "") -> None:
        """Tell all ranks this step's `microbatches=`, or the reason for which this rank refuses it."""
        self._events += 1
        pipelining.default_store().set(self._key(self._me), json.dumps((given, table, refused)))
        self._answered = self._step

    def _key(self, of: int | str) -> str:
        """A store key for the present step, the same on all ranks."""
        return f"{self._name}/{self._step}/{of}"


def _are_there(store: Any, keys: list[str]) -> bool:
    """Wait for a while. Returns whether all keys are in the store."""
    began = time.monotonic()
    try:
        store.wait(keys, _LOOK)
    except RuntimeError:
        if time.monotonic() - began < _LOOK.total_seconds() / 2:
            raise  # not a timeout: the store is gone
        return False
    return True


def _write(given: int | tuple[int, ...]) -> str:
    return str(given if isinstance(given, int) else [*given])


def _describe(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Shapes:
    """Shapes of a microbatch's inputs; keyword inputs only count where there are no others."""
    return describe_inputs(args or (kwargs or {}).values())


class StepSizes:
    """Sizes of a pipeline's steps: the number of microbatches, and the shapes of their inputs."""

    def __init__(self, board: StepBoard, usual: int) -> None:
        self._board = board
        self.usual = usual
        """Default number of microbatches of a step."""
        self.are_set_up = False
        """Whether torch has set up messages for any shapes."""
        self.keywords_are_alike = False
        """Whether all ranks get keyword inputs of the same shapes. New ones are then a new size."""
        self._keywords: Shapes | None = None
        """Shapes of the first step's keyword inputs, if they are alike."""
        self._seen: Table | None = None
        """The usual shapes and torch's setup, on stage 0's rank."""
        self._told: Table | None = None
        """The last table that all ranks know, with torch's present setup; None if they do not know that."""
        self.inputs: Sequence[Shapes] | None = None
        """Shapes of the inputs of the running step, or of the last one; None for those of torch's setup."""

    @property
    def last_is_typical(self) -> bool:
        """Whether the microbatches of the last step had the shapes of steps without `microbatches=`, or differed from
        each other, as in all steps of packed samples. Measurements count such steps."""
        shapes = {*(self.inputs or ())}
        return len(shapes) != 1 or (self._told is not None and shapes == {self._told.usual})

    def find_number(self, microbatches: Any, keywords: object) -> Any:
        """The `microbatches=` of a step, or their number if a framework has split them; None for the usual size."""
        if microbatches is not None or not isinstance(keywords, list) or not keywords:
            return microbatches
        shapes = [describe_inputs(each.values()) for each in keywords] if self.keywords_are_alike else []
        if not self.are_set_up:
            self._keywords = shapes[0] if shapes else None
        is_usual = len(keywords) == self.usual and all(each == self._keywords for each in shapes)
        return None if is_usual else len(keywords)

    def agree(self, runtime: pipelining.OwnRuntime, given: Any, args: Any, kwargs: Any) -> None:
        """Agree with all ranks on the shapes of the step's inputs before its messages, if it was `given` a size."""
        is_set_up, told, seen, table = pipelining.is_set_up(runtime), self._told, self._seen, None
        for work in runtime.works:
            work.messages.learn_last_step()
        if given is None:
            # A new setup is for this step's inputs, which only one rank knows.
            self._told = told = told if is_set_up else None
            is_usual = told is None or told.usual == told.set_up
            self.inputs = [told.usual] * self.usual if told and not is_usual else None
            expected = (seen.set_up if is_usual else seen.usual) if is_set_up and seen else None
            checks.require_usual_shapes(runtime, args, expected)
            return
        if pipelining.stages_of(runtime)[0].is_first:
            found = tuple(map(_describe, args, kwargs))
            seen = seen or Table(found[0], found[0])
            table = Table(seen.usual, seen.set_up if is_set_up else found[0], found)
        self._told = self._board.compare(given, table) if self._board.is_compared else table
        assert self._told is not None
        self.inputs = self._told.inputs
        checks.require_weighed_loss(runtime, self.inputs)
        if is_set_up and (told is None or told.set_up != self._told.set_up):
            self._learn_setup(runtime, self._told.set_up)

    def follow_setup(self, runtime: pipelining.OwnRuntime, args: Any, kwargs: Any) -> None:
        """torch has set up messages for microbatch 0 of the running step, which has these inputs."""
        self.are_set_up = True
        if pipelining.stages_of(runtime)[0].is_first:
            found = _describe(args, kwargs)
            self._seen = Table(self._seen.usual if self._seen and self.inputs else found, found)
        if self.inputs is not None:
            self._learn_setup(runtime, self.inputs[0])

    @staticmethod
    def _learn_setup(runtime: pipelining.OwnRuntime, inputs: Shapes) -> None:
        for work in runtime.works:
            work.messages.learn_setup(inputs)

    def give_to_messages(self, runtime: pipelining.OwnRuntime) -> None:
        """Let messages have the shapes of the running step."""
        set_up, step = self._told and self._told.set_up, None
        if self.inputs is not None and any(each != set_up for each in self.inputs):
            if not self._board.is_alone:
                checks.require_inferred_shapes(runtime)
            step = StepShapes(
                self.inputs,
                give=lambda name, shapes: self._board.give(name, json.dumps(shapes)),
                take=lambda name, rank: cast(Shapes, freeze(json.loads(self._board.take(name, rank)))),
            )
        works = runtime.works
        for work, then in zip(works, [*works[1:], None], strict=True):
            is_next = then is not None and then.stage.stage_index == work.stage.stage_index + 1
            work.messages.follow(step, then.messages if then and is_next else None)

    def pass_on_unfreezing(self, schedule: pipelining.OwnRuntime) -> None:
        """Before a step's messages, request gradients for newly unfrozen parameters."""
        # If training begins with frozen stages, only a stage's own rank sees that its parameters are no longer frozen.
        # The next stage then has to send gradients, which the messages' setup lacks. So ranks report to the next rank.
        is_ready = pipelining.is_set_up(schedule) and pipelining.can_infer_shapes(schedule)
        if not pipelining.trains(schedule) or not is_ready:
            return
        own = {work.stage.stage_index for work in schedule.works}
        is_unfrozen = False
        for work in schedule.works:
            messages = work.messages
            index, has_none = work.stage.stage_index, messages.is_without_gradients("inputs")
            if index - 1 not in own:
                waits, rank_of = has_none and not self._board.is_alone, schedule.stage_index_to_group_rank
                is_unfrozen = waits and self._board.take(f"unfrozen/{index}", rank_of[index - 1]) == "1"
            if has_none and is_unfrozen:
                messages.give_gradients("inputs")
            if messages.is_without_gradients("outputs"):
                if is_unfrozen := is_unfrozen or messages.is_unfrozen:
                    messages.give_gradients("outputs")
                if index + 1 not in own:
                    self._board.give(f"unfrozen/{index + 1}", str(int(is_unfrozen)))
