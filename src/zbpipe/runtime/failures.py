"""Errors that name the first failure of the job, on whatever rank it happened.

If another rank fails, a rank itself sees only a closed connection or a timeout. So the rank that fails first writes its
error to the job's key-value store (torch's own, which torchrun keeps alive after its ranks have ended), and the others
read it there before they raise theirs. None of this runs while no step fails.

torch >= 2.14 lets an exception out of a step only after its sends under way have been received (with gloo; NCCL does
not wait for that). Ranks post receives in the order of the sends, so that takes about as long as the receivers need to
get there: a hundredth of a second if no rank is slow.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from zbpipe.runtime import _torch
from zbpipe.runtime.progress import Progress

_FIRST = "zbpipe/first_failure"
_PATIENCE = 5.0
"""Seconds to wait for the store: its host may be the rank that died."""
_LONGEST = 2000
"""Characters of an error that other ranks get."""
_SHARED = (Exception, KeyboardInterrupt, SystemExit)
"""What the other ranks learn of."""

Answer = TypeVar("Answer")


class PipelineError(RuntimeError):
    """The pipeline cannot go on. The message says what failed where, on the rank that failed first.

        try:
            schedule.step(batch, target=target)
        except zbpipe.PipelineError as error:
            print(error)    # rank 3, schedule ZBV, step 17 of 90, 5F2: OutOfMemoryError: ...
            raise

    End the job after it: the other ranks may wait for messages of this one.
    """


class Failure(NamedTuple):
    """An error, as the other ranks get it."""

    rank: int
    words: str

    def __str__(self) -> str:
        return f"rank {self.rank}{self.words}"


class Steps:
    """The steps of one schedule: one that failed, or was refused, has consequences for the next.

    Args:
        when_stuck: called by another thread, now and then, while a step does not move.
    """

    def __init__(self, when_stuck: Callable[[], None]) -> None:
        self._progress = Progress(when_stuck)
        self._broken_by: str | None = None
        """How a step failed while messages were under way; no other step can follow."""
        self._refusal: Failure | None = None
        """Why the last step was refused before anything was sent. It stays in the store until the next step begins."""

    @contextmanager
    def begun(self, name: str) -> Iterator[None]:
        """Around one whole step of the schedule called `name`: if it is refused, the other ranks learn why.

        Raises:
            PipelineError: an earlier step failed.
        """
        if self._broken_by is not None:
            raise PipelineError(
                f"a step of this schedule failed before, and its messages may still be under way ({self._broken_by})."
                " Build the process group and the schedule anew, or end the job"
            )
        if self._refusal is not None:
            _take_back(self._refusal)
            self._refusal = None
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            self._refusal = _failure(error, f", schedule {name}, before step 0")
            _first_of_all(self._refusal)
            raise

    @contextmanager
    def named(self, schedule: _torch.OwnRuntime, name: str) -> Iterator[None]:
        """Around what `schedule` runs in a step: turn an exception into an error that names the op.

        Raises:
            PipelineError: the step failed on this rank, or on another one before. KeyboardInterrupt and SystemExit pass
                as they are.
        """
        try:
            with self._progress.followed(schedule):
                yield
        except PipelineError:
            raise
        except _SHARED as error:
            places = name, _torch.place_of(error, schedule), self._progress.on_device()
            where = f", schedule {', '.join(filter(None, places))}"
            failure = _failure(error, where, _torch.explained(error, schedule))
            self._broken_by = _in_words(failure, _first_of_all(failure))
            if not isinstance(error, Exception):
                raise
            raise PipelineError(self._broken_by) from error


@contextmanager
def shared_with_other_ranks() -> Iterator[None]:
    """Around a whole job: the other ranks learn of an exception that ends it here, and this rank learns of theirs.

    Raises:
        PipelineError: another rank failed first, with another error. All other exceptions pass as they are, and always
            ValueError, KeyboardInterrupt and SystemExit.
    """
    try:
        yield
    except PipelineError:
        raise
    except _SHARED as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        failure = _failure(error, "")
        first = _first_of_all(failure)
        # What is refused by a ValueError has nothing to do with the others.
        if failure.words == first.words or isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise PipelineError(_in_words(failure, first)) from error


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Around a whole program: with NCCL, print an exception that ends it and end the process at once.

    Otherwise the script or the interpreter destroys the communicators. NCCL then waits for messages under way that may
    never be received, or aborts them on the peers, and some ranks may die before they can log what failed first.
    torchrun sees the exit code 1 and ends the other ranks. With gloo this changes nothing.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not _has_communicators():
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        with suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def _failure(error: BaseException, where: str, explained: str | None = None) -> Failure:
    """By the cause at the root: torch's stages wrap what a module raises in a long list of its arguments."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = ": ".join(filter(None, (type(error).__name__, explained or " ".join(str(error).split()))))
    interrupted = not isinstance(error, Exception)
    words = f" was interrupted ({text}){where}" if interrupted else f"{where}: {text[:_LONGEST]}"
    return Failure(dist.get_rank() if dist.is_initialized() else 0, words)


def _has_communicators() -> bool:
    """Whether a process group uses NCCL (RCCL goes by that name), which can hang when a peer ends."""
    return dist.is_initialized() and "ccl" in dist.get_backend_config()


def _in_words(failure: Failure, first: Failure) -> str:
    if first.rank == failure.rank:
        return str(failure)
    return f"another rank failed first: {first}. Then this one: {failure}"


def _first_of_all(failure: Failure) -> Failure:
    """The job's first failure: what is in the store, else `failure`, which this puts there for the others."""
    store = _torch.default_store()
    if store is None:
        return failure
    found = _answer_in_time(lambda: store.compare_set(_FIRST, "", json.dumps(failure)))
    return failure if found is None else Failure(*json.loads(found))


def _take_back(failure: Failure) -> None:
    """Remove `failure` from the store, if it is the job's first one."""
    if store := _torch.default_store():
        _answer_in_time(lambda: store.compare_set(_FIRST, json.dumps(failure), ""))


def _answer_in_time(ask: Callable[[], Answer]) -> Answer | None:
    """What the store answers; None if it does not: its host may have died, so that calls fail or hang."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answers[0] if answers else None
