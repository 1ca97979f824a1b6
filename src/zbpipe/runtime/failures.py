"""Errors that name the first failure of the job, on whatever rank it happened.

If another rank fails, a rank itself sees marks in place of values, a closed connection or a timeout. So the rank that
fails first writes its error to the job's key-value store, and the others read it there before they raise theirs.
torchrun keeps the store alive after its ranks have ended. Elsewhere rank 0 has it, and waits until the others have
read. None of this runs while no step fails.

torch >= 2.14 lets an exception out of a step only after its sends under way have been received (with gloo; NCCL does
not wait for that). Ranks post receives in the order of the sends, so that takes about as long as the receivers need to
get there: a hundredth of a second if no rank is slow.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from zbpipe.runtime import _torch
from zbpipe.runtime.progress import Progress

_FIRST = "zbpipe/first_failure"
_READERS = f"{_FIRST}/readers"
_LINGER = 15.0
"""Most seconds that the rank with the store waits until the others have read; one that does not move looks every 2."""
_PATIENCE = 5.0
"""Seconds to wait for the store: its host may be the rank that died."""
_LONGEST = 2000
"""Characters of an error that other ranks get."""
_GLANCE = 0.01
"""Seconds between two looks at whether all have read."""
_SHARED = (Exception, KeyboardInterrupt, SystemExit)
"""What the other ranks learn of."""

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class PipelineError(RuntimeError):
    """The pipeline cannot go on. The message says what failed where, on the rank that failed first.

        try:
            schedule.step(batch, target=target)
        except zbpipe.PipelineError as error:
            print(error)    # rank 3, schedule ZBV, step 17 of 90, 5F2: OutOfMemoryError: ...
            raise

    End the job after it: the other ranks may wait for messages of this one.
    """


class RefusedStepError(ValueError):
    """A step cannot run as it was asked for, and all ranks know."""


class Failure(NamedTuple):
    """An error, as the other ranks get it."""

    rank: int
    words: str
    is_refusal: bool = False
    """Whether it was raised before the step began, so that the next step can follow."""

    def __str__(self) -> str:
        return f"rank {self.rank}{self.words}"


class Board(Protocol):
    """Where the ranks of a pipeline leave word of their present step."""

    def post(self, failure: Failure) -> None:
        """Say why the step is abandoned, if no other rank has."""

    def found(self) -> Failure | None:
        """Why it is abandoned; None if it is not."""

    def wait_for_readers(self) -> None:
        """Wait until all other ranks have found it, but not for long."""

    def answer_for_stuck_step(self) -> None:
        """Called by another thread, now and then, while the step does not move."""


class _AbandonedStepError(Exception):
    """Another rank has abandoned the step."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Steps:
    """The steps of one schedule: one that failed, or was refused, has consequences for the next.

    Args:
        board: for its ranks.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._progress = Progress(self._look_while_stuck)
        self._broken_by: str | None = None
        """How a step failed while messages were under way; no other step can follow."""
        self._told: tuple[BaseException, Failure] | None = None
        """The error by which this rank abandoned the present step, as the other ranks know it."""
        self._heard: Failure | None = None
        """Another rank's failure, found while the present step did not move."""

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Around one whole step.

        Raises:
            PipelineError: an earlier step failed.
        """
        if self._broken_by is not None:
            raise PipelineError(
                f"a step of this schedule failed before, and its messages may still be under way ({self._broken_by})."
                " Build the process group and the schedule anew, or end the job"
            )
        self._heard = None
        try:
            yield
        finally:
            self._told = None  # its traceback holds the schedule

    def refuse(self, error: Exception, name: str) -> None:
        """Leave word that this rank refuses the present step by `error`."""
        self._told = error, _failure(error, f", schedule {name}, before step 0")._replace(is_refusal=True)
        with suppress(RuntimeError):  # the store may be gone, and this error says more
            self._board.post(self._told[1])

    def tell(self, error: Exception, schedule: _torch.OwnRuntime, name: str) -> None:
        """Leave word that an op of the present step failed by `error`, before it is raised."""
        self._told = error, self._failure_in(schedule, name, error, _torch.place_now(schedule))
        with suppress(RuntimeError):
            self._board.post(self._told[1])
        logger.error("%s. This rank goes on without computing, until all ranks of the pipeline know", self._told[1])

    def why_abandoned(self) -> Exception | None:
        """An error with what another rank says of the present step; None if no rank has abandoned it."""
        found = self._board.found()
        return None if found is None else _AbandonedStepError(found)

    def end_by_refusal(self) -> None:
        """Refuse all later steps: other ranks may be in the messages of the one that this rank has refused."""
        assert self._told is not None, "this rank refused"
        self._broken_by = str(self._told[1])
        _first_of_all(self._told[1])

    @contextmanager
    def named(self, schedule: _torch.OwnRuntime, name: str) -> Iterator[None]:
        """Around what `schedule` runs in a step: turn an exception into an error that names the op.

        Raises:
            PipelineError: the step failed on this rank, or on another one before. KeyboardInterrupt and SystemExit pass
                as they are, as does what this rank has refused the step by.
            RefusedStepError: another rank refuses the step.
        """
        try:
            with self._progress.followed(schedule):
                yield
        except PipelineError:
            raise
        except (_AbandonedStepError, RefusedStepError) as error:
            found = error.failure if isinstance(error, _AbandonedStepError) else self._board.found()
            if found is None or found.is_refusal:
                raise RefusedStepError(f"{found or error}. All ranks have left out this step") from None
            self._broken_by = f"another rank failed first: {found}"
            raise PipelineError(self._broken_by) from None
        except _SHARED as error:
            told = self._told[1] if self._told is not None and self._told[0] is error else None
            if told is not None and told.is_refusal:
                self._linger()
                raise
            failure = told or self._failure_in(schedule, name, error)
            first = _first_of_all(failure)
            self._broken_by = _in_words(failure, self._heard or first)
            if first == failure:
                with suppress(RuntimeError):
                    self._board.post(failure)
                self._linger()
            if not isinstance(error, Exception):
                raise
            raise PipelineError(self._broken_by) from error

    def _failure_in(
        self, schedule: _torch.OwnRuntime, name: str, error: BaseException, place: str | None = None
    ) -> Failure:
        places = name, place or _torch.place_of(error, schedule), self._progress.on_device()
        return _failure(error, f", schedule {', '.join(filter(None, places))}", _torch.explained(error))

    def _linger(self) -> None:
        """If the store ends with this process, let the others read it before."""
        if _torch.has_store():
            self._board.wait_for_readers()

    def _look_while_stuck(self) -> None:
        self._board.answer_for_stuck_step()
        if self._heard is None and (found := self._board.found() or _read_first()):
            self._heard = found
            logger.error("another rank failed first, and this one waits for it: %s", found)


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
        if first == failure and _torch.has_store():
            wait_for_readers(_READERS, dist.get_world_size() - 1)
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
    first = failure if found is None else Failure(*json.loads(found))
    if first != failure:
        _answer_in_time(lambda: store.add(_READERS, 1))
    return first


def _read_first() -> Failure | None:
    """The job's first failure, if another rank has left one."""
    store = _torch.default_store()
    found = store.get(_FIRST) if store is not None and store.check([_FIRST]) else b""
    failure = Failure(*json.loads(found)) if found else None
    if failure is None or failure.rank == dist.get_rank():
        return None
    store.add(_READERS, 1)
    return failure


def wait_for_readers(key: str, number: int) -> None:
    """Wait until so many ranks have counted themselves in the store under `key`, but not for long."""
    store, deadline = _torch.default_store(), time.monotonic() + _LINGER
    with suppress(RuntimeError):  # the store may be gone
        while store.add(key, 0) < number and time.monotonic() < deadline:
            time.sleep(_GLANCE)


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
