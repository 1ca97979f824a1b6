"""Failures and refusals of one schedule's steps: the place of each, and its consequences for all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from zbpipe.runtime._torch import pipelining, position, waits
from zbpipe.runtime.ranks.agreement import is_alone
from zbpipe.runtime.ranks.failures import (
    SHARED,
    Failure,
    Notice,
    PipelineError,
    answer_in_time,
    end_process,
    make_failure,
)
from zbpipe.runtime.ranks.progress import Progress
from zbpipe.runtime.ranks.step_board import StepBoard

_GRACE = 3.0
"""Seconds until a process ends in which another rank's failure has not been raised."""
_GLANCE = 0.02
"""Seconds between two looks at whether it has."""

logger = logging.getLogger(__name__)


class StepFailures:
    """Failures of one schedule's steps. After the first one, on any rank, no other step can follow."""

    def __init__(self, board: StepBoard, *, has_events: bool = True) -> None:
        self._board = board
        self._notice = None if is_alone(None) else Notice()
        self._progress = Progress(self._look, has_events=has_events)
        self._is_raised = False
        """Whether the failure that ended the pipeline was raised on this rank."""

    @contextmanager
    def begin_step(self, schedule: pipelining.OwnRuntime, name: str, *, is_compared: bool) -> Iterator[None]:
        """Context of one whole step of the `schedule` with this name.

        Raises:
            PipelineError: an earlier step failed, on any rank.
        """
        self._progress.start(schedule)
        try:
            self._board.begin_step(is_compared=is_compared)
            yield
        except PipelineError:
            raise
        except Exception as error:
            if self._board.ended_by:
                raise PipelineError(self._board.ended_by) from error
            self._board.refuse(make_failure(error, f", schedule {name}, before step 0"))
            raise
        finally:
            self._is_raised = bool(self._board.ended_by)

    @contextmanager
    def explain_failures(self, schedule: pipelining.OwnRuntime, name: str) -> Iterator[None]:
        """Context of a step of `schedule` that converts an exception into an error that names the op.

        Raises:
            PipelineError: the step failed on this rank, or earlier on another one. KeyboardInterrupt and SystemExit
            pass unchanged.
        """
        try:
            with self._progress.follow(schedule):
                yield
        except PipelineError:
            raise
        except SHARED as error:
            places = name, position.find_failure(error, schedule), self._progress.describe_device()
            where = f", schedule {', '.join(filter(None, places))}"
            self._is_raised = True
            # A rank that refuses the step may have closed its connections before this process has read why.
            refusal = answer_in_time(self._board.find_other_refusal)
            self._end(self._post(refusal or make_failure(error, where, position.explain(error))))
            if self._notice is not None:
                self._notice.wait_for_readers()
            if not isinstance(error, Exception):
                raise
            raise PipelineError(self._board.ended_by) from error

    def _post(self, failure: Failure) -> Failure:
        """The job's first failure."""
        return failure if self._notice is None else self._notice.post(failure)

    def _end(self, failure: Failure) -> None:
        if self._board.ended_by:  # the other thread was first
            return
        self._board.ended_by = failure.description
        waits.interrupt()
        if self._notice is not None:
            self._notice.count_as_reader()

    def _look(self, schedule: pipelining.OwnRuntime) -> None:
        """Called from another thread while nothing moves: end the pipeline if another rank has."""
        if self._notice is None or self._board.ended_by:
            return
        failure = self._notice.read()
        if failure is None and (refusal := self._board.find_other_refusal()) is not None:
            failure = self._post(refusal)
        if failure is None or self._board.ended_by:
            return
        logger.error("%s", failure.description)
        schedule.position.is_stopped = True
        self._end(failure)
        until = time.monotonic() + _GRACE
        while not self._is_raised and self._notice.is_current:
            if time.monotonic() > until:
                # The host waits for a device, a collective, or a disk. Without the other rank it may wait forever.
                reason = f"Rank {dist.get_rank()} ends, because it reached no other op within {_GRACE:.0f} seconds"
                end_process(PipelineError(f"{failure.description}. {reason}"))
            time.sleep(_GLANCE)
