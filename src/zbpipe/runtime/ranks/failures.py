"""Errors that name the first failure of the job, on any rank.

If another rank fails, a rank sees only marks instead of values, a closed connection or a timeout. So the rank that
fails first writes its error to the job's key-value store, and the others read it before they raise theirs. torchrun
keeps the store alive after its ranks have ended. Without torchrun rank 0 has the store, and waits until the others have
read. None of this runs unless a step fails.

torch >= 2.14 lets an exception leave a step only after its pending sends have been received (with gloo; NCCL does not
wait). Ranks post receives in the order of the sends, so this takes until the receivers get there: about 10 ms if no
rank is slow.
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
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from zbpipe.runtime._torch import pipelining

_FIRST = "zbpipe/first_failure"
_LINGER = 15.0
"""Longest wait in seconds of the rank with the store for its readers. A stuck rank reads every 2 seconds."""
_PATIENCE = 5.0
"""Seconds to wait for the store: its host may be the rank that died."""
_LONGEST = 2000
"""Number of an error's characters that other ranks get."""
_GLANCE = 0.01
"""Seconds between two looks at whether all have read."""
SHARED = (Exception, KeyboardInterrupt, SystemExit)
"""Exceptions that are reported to other ranks."""

Answer = TypeVar("Answer")


class PipelineError(RuntimeError):
    """The pipeline cannot continue. The message has the error and its place, from the rank that failed first.

        try:
            schedule.step(batch, target=target)
        except zbpipe.PipelineError as error:
            print(error)    # rank 3, schedule ZBV, step 17 of 90, 5F2: OutOfMemoryError: ...
            raise

    End the job after it: the other ranks may wait for messages of this one.
    """


class RefusedStepError(ValueError):
    """A step cannot run as requested, and all ranks know."""


class Failure(NamedTuple):
    """An error in the form that other ranks get."""

    rank: int
    words: str
    is_refusal: bool = False
    """Whether it was raised before the step began, so that the next step can follow."""

    def __str__(self) -> str:
        return f"rank {self.rank}{self.words}"


class Notice:
    """A failure in the job's store, under one key. The first posted failure stays, and its readers are counted.

    `others` is the number of other ranks that read it.
    """

    def __init__(self, key: str, others: int) -> None:
        self._key = key
        self._readers = f"{key}/readers"
        self._others = others
        self._is_counted = False

    def post(self, failure: Failure) -> Failure:
        """Post `failure` if there is none yet. Returns the posted failure; `failure` if the store is gone."""
        store = pipelining.default_store()
        if store is None:
            return failure
        found = _answer_in_time(lambda: store.compare_set(self._key, "", json.dumps(failure)))
        return failure if found is None else Failure(*json.loads(found))

    def exchange(self, failure: Failure) -> Failure:
        """Like `post`, and counts another rank's failure as read."""
        first = self.post(failure)
        if first != failure:
            _answer_in_time(self._count)
        return first

    def read(self) -> Failure | None:
        """The failure posted by another rank; None if there is none."""
        store = pipelining.default_store()
        if store is None or not store.check([self._key]):
            return None
        failure = Failure(*json.loads(store.get(self._key)))
        if failure.rank == dist.get_rank():
            return None
        self._count()
        return failure

    def wait_for_readers(self) -> None:
        """If the store ends with this process, wait until all others have read, but not for long."""
        if not pipelining.has_store():
            return
        store, deadline = pipelining.default_store(), time.monotonic() + _LINGER
        with suppress(RuntimeError):  # the store may be gone
            while store.add(self._readers, 0) < self._others and time.monotonic() < deadline:
                time.sleep(_GLANCE)

    def _count(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            pipelining.default_store().add(self._readers, 1)


def make_first_notice() -> Notice:
    """The job's first failure."""
    return Notice(_FIRST, dist.get_world_size() - 1 if dist.is_initialized() else 0)


@contextmanager
def share_with_other_ranks() -> Iterator[None]:
    """Context of a whole job that shares the exception that ends it with all ranks.

    Raises:
        PipelineError: another rank failed first, with another error. All other exceptions pass unchanged; ValueError,
        KeyboardInterrupt and SystemExit always do.
    """
    try:
        yield
    except PipelineError:
        raise
    except SHARED as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        failure, notice = make_failure(error, ""), make_first_notice()
        first = notice.exchange(failure)
        if first == failure:
            notice.wait_for_readers()
        # A refusal by ValueError does not concern the others.
        if failure.words == first.words or isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise PipelineError(describe(failure, first)) from error


@contextmanager
def end_at_once() -> Iterator[None]:
    """Context of a whole program: with NCCL, print a fatal exception and end the process at once."""
    # Otherwise the script or the interpreter destroys the communicators. NCCL then waits for pending messages that may
    # never be received, or aborts them on the peers, and some ranks may die before they can log the first failure.
    # torchrun sees the exit code 1 and ends the other ranks. With gloo this changes nothing.
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        # A process group that uses NCCL (RCCL goes by that name) can hang when a peer ends.
        if not (dist.is_initialized() and "ccl" in dist.get_backend_config()):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        with suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def make_failure(error: BaseException, where: str, explained: str | None = None) -> Failure:
    """The failure for an error's root cause: torch's stages wrap a module's exception in a long list of its
    arguments."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = ": ".join(filter(None, (type(error).__name__, explained or " ".join(str(error).split()))))
    interrupted = not isinstance(error, Exception)
    words = f" was interrupted ({text}){where}" if interrupted else f"{where}: {text[:_LONGEST]}"
    return Failure(dist.get_rank() if dist.is_initialized() else 0, words)


def describe(failure: Failure, first: Failure) -> str:
    if first.rank == failure.rank:
        return str(failure)
    return f"another rank failed first: {first}. Then this one: {failure}"


def _answer_in_time(ask: Callable[[], Answer]) -> Answer | None:
    """The store's answer; None without one: its host may have died, so that calls fail or hang."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answers[0] if answers else None
