"""One policy for failures on every device: the first error of any rank ends the pipeline on all ranks.

A rank that fails posts its error to the job's key-value store and raises it. On other ranks, the thread that follows
the steps (`zbpipe.runtime.ranks.progress`) reads the store while nothing moves. A good step sends nothing for this, and
no host waits for its device. torchrun's store outlives its ranks. Without torchrun, rank 0 has the store, and waits
until the others have read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from zbpipe.runtime._torch import pipelining

_FAILURE = "zbpipe/failure/"
_LINGER = 5.0
"""Longest wait in seconds of the rank with the store for its readers."""
_ROLL_CALL = 2.0
"""Seconds in which a running rank reads a failure. If the rank does not raise it, its process ends soon after."""
PATIENCE = 5.0
"""Seconds to wait for the store, because its host may be the rank that died."""
_LONGEST = 2000
"""Number of an error's characters that other ranks get."""
_GLANCE = 0.05
"""Seconds between two looks at whether all have read."""
SHARED = (Exception, KeyboardInterrupt, SystemExit)
"""Exceptions that are reported to other ranks."""

Answer = TypeVar("Answer")


class PipelineError(RuntimeError):
    """The pipeline cannot continue. The message has the error and its place, from the rank that failed first.

        try:
            schedule.step(batch, target=target)
        except zbpipe.PipelineError as error:
            print(error)    # rank 3, schedule ZBV, action 17 of 90 in step 8, 5F2: ...
            raise

    After it the schedule runs no step, on any rank: end the job, or build the process group and the schedule anew.
    """


class Failure(NamedTuple):
    """An error as other ranks get it."""

    rank: int
    words: str

    def __str__(self) -> str:
        return f"rank {self.rank}{self.words}"

    @property
    def description(self) -> str:
        """The failure as an error of this rank."""
        return str(self) if self.rank == _own_rank() else f"another rank failed first: {self}"


class Notice:
    """A failure of the job in its store. The first posted one stays, and its readers sign it. By default it is the next
    failure, because earlier ones ended earlier schedules."""

    def __init__(self, number: int | None = None) -> None:
        self._store = pipelining.default_store()
        self._key = f"{_FAILURE}{_count_failures(self._store) if number is None else number}"
        self._follows = False

    @property
    def is_current(self) -> bool:
        """Whether the job's process group is still that of the notice."""
        return dist.is_initialized() and pipelining.default_store() is self._store

    def post(self, failure: Failure) -> Failure:
        """Post `failure` if there is none yet. Returns the posted failure, or `failure` if the store is gone."""
        store = self._store
        if store is None:
            return failure
        found = answer_in_time(lambda: store.compare_set(self._key, "", json.dumps(failure)))
        return failure if found is None else Failure(*json.loads(found))

    @cached_property
    def connection(self) -> Any:
        """The store for other threads: calls on one connection wait for each other."""
        return self._store.clone()

    def read(self) -> Failure | None:
        """The posted failure; None if there is none. Called from another thread. This rank is then a reader."""
        if not self._follows:
            self.connection.set(f"{self._key}/follows/{dist.get_rank()}", "")
            self._follows = True
        if not self.connection.check([self._key]):
            return None
        return Failure(*json.loads(self.connection.get(self._key)))

    def sign(self) -> None:
        """Allow the rank with the store to end, when this rank's threads know the failure."""
        answer_in_time(lambda: self._store.set(f"{self._key}/read/{dist.get_rank()}", ""))

    def wait_for_readers(self) -> None:
        """If the store ends with this process, wait until all ranks have read, but not for long."""
        if pipelining.has_store():
            self._wait_for_readers(_LINGER)

    def find_silent_ranks(self) -> list[int]:
        """Ranks that have followed steps and do not read the failure: they were killed, or hang."""
        return [rank for rank in self._wait_for_readers(_ROLL_CALL) if not self._lacks("follows", [rank])]

    def _wait_for_readers(self, seconds: float) -> list[int]:
        """The ranks that do not read in time."""
        silent, deadline = list(range(dist.get_world_size())), time.monotonic() + seconds
        with suppress(RuntimeError):  # the store may be gone
            while (silent := self._lacks("read", silent)) and time.monotonic() < deadline:
                time.sleep(_GLANCE)
            return silent
        return []

    def _lacks(self, kind: str, ranks: Sequence[int]) -> list[int]:
        """The `ranks` without such a key. Takes few calls if nearly all have it."""
        if not ranks or self._store.check([f"{self._key}/{kind}/{rank}" for rank in ranks]):
            return []
        middle = len(ranks) // 2
        return self._lacks(kind, ranks[:middle]) + self._lacks(kind, ranks[middle:]) if middle else list(ranks)


@contextmanager
def share_with_other_ranks() -> Iterator[None]:
    """Context of a whole job that shares the exception that ends it with all ranks.

    Raises:
        PipelineError: another rank failed first, with another error, or was killed. All other exceptions pass
        unchanged; ValueError, KeyboardInterrupt and SystemExit always do.
    """
    try:
        yield
    except PipelineError:
        raise
    except SHARED as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        posted = answer_in_time(lambda: _count_failures(pipelining.default_store()))
        failure, notice = make_failure(error, ""), Notice(max(0, (posted or 0) - 1))
        first = notice.post(failure)
        notice.sign()
        # A rank that was killed between two steps closed the connections of a collective, whose error names no rank.
        is_lost = notice.is_current and re.search("gloo|NCCL", first.words)
        if is_lost and (silent := answer_in_time(notice.find_silent_ranks)):
            words = f"no answer from {name_ranks(silent)}: killed, or stuck (seen by {first})"
            raise PipelineError(words) from error
        notice.wait_for_readers()
        # A refusal by ValueError concerns this rank only.
        if failure.words == first.words or isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise PipelineError(first.description) from error


@contextmanager
def end_at_once() -> Iterator[None]:
    """Context of a whole program: with NCCL, print a fatal exception and end the process at once."""
    # Otherwise the script or the interpreter destroys the communicators. NCCL then waits for pending messages that may
    # never be received, or aborts them on the peers. Some ranks may die before they log the first failure. torchrun
    # sees exit code 1 and ends the other ranks. With gloo this changes nothing.
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        # A process group that uses NCCL (also RCCL) can hang when a peer ends.
        if not (dist.is_initialized() and "ccl" in dist.get_backend_config()):
            raise
        end_process(error)


def end_process(error: BaseException) -> None:
    """Print `error` and end the process. Destroying communicators could wait for ranks that are gone."""
    sys.excepthook(type(error), error, error.__traceback__)
    with suppress(Exception):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def make_failure(error: BaseException, where: str, explained: str | None = None) -> Failure:
    """The failure for an error's root cause, without torch's wrapper, which has a long list of arguments."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = ": ".join(filter(None, (type(error).__name__, explained or " ".join(str(error).split()))))
    interrupted = not isinstance(error, Exception)
    words = f" was interrupted ({text}){where}" if interrupted else f"{where}: {text[:_LONGEST]}"
    return Failure(_own_rank(), words)


def _count_failures(store: Any) -> int:
    number = 0
    while store is not None and store.check([f"{_FAILURE}{number}"]):
        number += 1
    return number


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as "ranks 0-2, 5", from ranks in ascending order. A job may have thousands."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, each)) for each in found)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def answer_in_time(ask: Callable[[], Answer]) -> Answer | None:
    """The store's answer, or None. Its host may have died, so that calls fail or hang."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answers[0] if answers else None
