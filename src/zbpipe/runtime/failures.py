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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from zbpipe.runtime import _torch

_FIRST = "zbpipe/first_failure"
_PATIENCE = 5.0
"""Seconds for the store to answer: its host may be the rank that died."""
_LONGEST = 2000
"""Characters of an error that are told."""

Answer = TypeVar("Answer")


class PipelineError(RuntimeError):
    """The pipeline cannot go on. Says what failed where, and if another rank failed first, what that rank said."""


class Failure(NamedTuple):
    """What a rank tells the others."""

    rank: int
    where: str
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank}{self.where}: {self.error}"


@contextmanager
def named(schedule: _torch.ScheduleRuntime, name: str) -> Iterator[None]:
    """Around one step of `schedule`: an exception becomes an error that names the op at which it came up.

    Raises:
        PipelineError: the step failed on this rank, or on another one before.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        failure = _failure(error, f", schedule {name}, {_torch.place_of(error, schedule)}")
        raise _error(failure, _first_of_all(failure)) from error


@contextmanager
def told_to_other_ranks() -> Iterator[None]:
    """Around a whole job: the other ranks learn of an exception that ends it here, and this rank learns of theirs.

    Raises:
        PipelineError: another rank failed first, by another error. Else exceptions pass as they are, and so does every
            ValueError.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        failure = _failure(error, "")
        first = _first_of_all(failure)
        # What is refused by a ValueError has nothing to do with the others.
        if failure.error == first.error or isinstance(error, ValueError):
            raise
        raise _error(failure, first) from error


def _failure(error: BaseException, where: str) -> Failure:
    """By the cause at the root: torch's stages wrap what a module raises in a long list of its arguments."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Failure(dist.get_rank() if dist.is_initialized() else 0, where, text[:_LONGEST])


def _error(failure: Failure, first: Failure) -> PipelineError:
    if first.rank == failure.rank:
        return PipelineError(str(failure))
    return PipelineError(f"another rank failed first: {first}. Then this one: {failure}")


def _first_of_all(failure: Failure) -> Failure:
    """The job's first failure: what is in the store, else `failure`, which then stands there for the others."""
    store = _torch.default_store()
    if store is None:
        return failure
    found = _answer_in_time(lambda: store.compare_set(_FIRST, "", json.dumps(failure)))
    return failure if found is None else Failure(*json.loads(found))


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
