"""What a rank says when a step fails, on itself or on another rank.

Of a failure elsewhere a rank sees no more than a closed connection or a timeout. So the rank that fails first leaves
its error in the job's key-value store, torch's own, which torchrun keeps alive beyond its ranks, and the others look
there before they raise theirs. Nothing of this runs while nothing fails.

torch >= 2.14 lets an exception out of a step only when its sends under way are received (over gloo; NCCL does not hold
the process up for that). Receives are posted in the order in which the schedule sends, so that takes no longer than the
receivers take to get there: a hundredth of a second where nobody is slow.
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
"""Seconds for the store to answer: its host may be the rank that died."""
_LONGEST = 2000
"""Characters of an error that are told."""
_TOLD = (Exception, KeyboardInterrupt, SystemExit)

Answer = TypeVar("Answer")


class PipelineError(RuntimeError):
    """The pipeline cannot go on. Says what failed where, and if another rank failed first, what that rank said."""


class Failure(NamedTuple):
    """What a rank tells the others."""

    rank: int
    words: str

    def __str__(self) -> str:
        return f"rank {self.rank}{self.words}"


class Steps:
    """The steps of one schedule, as far as those that failed, or were refused, concern the next one."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._broken_by: str | None = None
        """How a step failed with messages under way."""
        self._refusal: Failure | None = None
        """Why the last step was refused before anything was sent. It stands in the store until the next one begins."""

    @contextmanager
    def begun(self, name: str) -> Iterator[None]:
        """Around one whole step of the schedule called `name`: the other ranks learn why this one does not take part.

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
    def named(self, schedule: _torch.ScheduleRuntime, name: str) -> Iterator[None]:
        """Around what `schedule` runs in a step: an exception becomes an error that names the op at which it came up.

        Raises:
            PipelineError: the step failed on this rank, or on another one before. What interrupts the process
                (KeyboardInterrupt, SystemExit) passes as it is.
        """
        try:
            with self._progress.followed(schedule):
                yield
        except PipelineError:
            raise
        except _TOLD as error:
            places = name, _torch.place_of(error, schedule), self._progress.on_device()
            where = f", schedule {', '.join(filter(None, places))}"
            failure = _failure(error, where, _torch.explained(error, schedule))
            self._broken_by = _in_words(failure, _first_of_all(failure))
            if not isinstance(error, Exception):
                raise
            raise PipelineError(self._broken_by) from error


@contextmanager
def told_to_other_ranks() -> Iterator[None]:
    """Around a whole job: the other ranks learn of an exception that ends it here, and this rank learns of theirs.

    Raises:
        PipelineError: another rank failed first, by another error. Else exceptions pass as they are, and so does every
            ValueError, and what interrupts the process.
    """
    try:
        yield
    except PipelineError:
        raise
    except _TOLD as error:
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
    """Around a whole program: an exception that ends it over NCCL ends the process here, once it is printed.

    The ordinary way out destroys the communicators, by the script or by the interpreter. NCCL then waits for messages
    under way, of which the peers may never come, or aborts them on the peers, which die of that before they can tell
    what failed first. torchrun sees the exit code 1 and ends the other ranks. Over gloo nothing is changed.
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
    """Whether this process is in a group of NCCL's kind (RCCL goes by its name): one that a peer's end can hang."""
    return dist.is_initialized() and "ccl" in dist.get_backend_config()


def _in_words(failure: Failure, first: Failure) -> str:
    if first.rank == failure.rank:
        return str(failure)
    return f"another rank failed first: {first}. Then this one: {failure}"


def _first_of_all(failure: Failure) -> Failure:
    """The job's first failure: what is in the store, else `failure`, which then stands there for the others."""
    store = _torch.default_store()
    if store is None:
        return failure
    found = _answer_in_time(lambda: store.compare_set(_FIRST, "", json.dumps(failure)))
    return failure if found is None else Failure(*json.loads(found))


def _take_back(failure: Failure) -> None:
    """Free the place of the job's first failure, if `failure` has it."""
    if store := _torch.default_store():
        _answer_in_time(lambda: store.compare_set(_FIRST, json.dumps(failure), ""))


def _answer_in_time(ask: Callable[[], Answer]) -> Answer | None:
    """None for no answer: the store may be gone with its host, which shows as an error or as silence."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answers[0] if answers else None
