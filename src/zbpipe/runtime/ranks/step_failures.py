"""Failures of one schedule's steps: the place of each, and its consequences for later steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from zbpipe.runtime._torch import frames, pipelining
from zbpipe.runtime.ranks.failures import (
    SHARED,
    Failure,
    PipelineError,
    RefusedStepError,
    describe,
    make_failure,
    make_first_notice,
)
from zbpipe.runtime.ranks.progress import Progress
from zbpipe.runtime.ranks.step_board import StepBoard

logger = logging.getLogger(__name__)


class _AbandonedStepError(Exception):
    """Another rank has abandoned the step."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class StepFailures:
    """Failures of one schedule's steps. A failed or refused step affects the next one."""

    def __init__(self, board: StepBoard, *, has_events: bool = True) -> None:
        self._board = board
        self._first = make_first_notice()
        self._progress = Progress(self._look_while_stuck, has_events=has_events)
        self._broken_by: str | None = None
        """Description of a step's failure with pending messages. No other step can follow."""
        self._told: tuple[BaseException, Failure] | None = None
        """The error with which this rank abandoned the present step, in the form known to other ranks."""
        self._heard: Failure | None = None
        """Another rank's failure before this one's: found while the present step was stuck, or when an op failed."""

    @contextmanager
    def begin_step(self) -> Iterator[None]:
        """Context of one whole step, which cannot follow a failed step."""
        if self._broken_by is not None:
            raise PipelineError(
                f"a step of this schedule failed before, and its messages may still be under way ({self._broken_by})."
                " Build the process group and the schedule anew, or end the job"
            )
        self._heard = None
        try:
            yield
        finally:
            self._told = None  # its traceback refers to the schedule

    def refuse(self, error: Exception, name: str) -> None:
        """Report that this rank refuses the present step with `error`."""
        self._told = error, make_failure(error, f", schedule {name}, before step 0")._replace(is_refusal=True)
        self._board.notice.post(self._told[1])

    def tell(self, error: Exception, schedule: pipelining.OwnRuntime, name: str) -> None:
        """Report that an op of the present step failed with `error`, before it is raised."""
        failure = self._make_failure(schedule, name, error, frames.find_place(schedule))
        self._told = error, failure
        if (first := self._board.notice.exchange(failure)) != failure:
            self._heard = first
        logger.error("%s. This rank continues without computing until all ranks of the pipeline know", self._told[1])

    def find_why_abandoned(self) -> Exception | None:
        """An error with another rank's report on the present step; None if no rank has abandoned it."""
        found = self._board.notice.read()
        return None if found is None else _AbandonedStepError(found)

    def end_by_refusal(self) -> None:
        """Refuse all later steps: other ranks may be in the messages of the step that this rank refused."""
        assert self._told is not None, "this rank refused"
        self._broken_by = str(self._told[1])
        self._first.exchange(self._told[1])

    @contextmanager
    def explain_failures(self, schedule: pipelining.OwnRuntime, name: str) -> Iterator[None]:
        """Context of a step of `schedule` that converts an exception into an error that names the op.

        Raises:
            PipelineError: the step failed on this rank, or earlier on another one. KeyboardInterrupt, SystemExit and
            this rank's refusal pass unchanged. RefusedStepError: another rank refuses the step.
        """
        try:
            with self._progress.follow(schedule):
                yield
        except PipelineError:
            raise
        except (_AbandonedStepError, RefusedStepError) as error:
            found = error.failure if isinstance(error, _AbandonedStepError) else self._board.notice.read()
            if found is None or found.is_refusal:
                raise RefusedStepError(f"{found or error}. All ranks have skipped this step") from None
            self._broken_by = f"another rank failed first: {found}"
            self._board.notice.wait_for_readers()
            raise PipelineError(self._broken_by) from None
        except SHARED as error:
            told = self._told[1] if self._told is not None and self._told[0] is error else None
            if told is not None and told.is_refusal:
                self._board.notice.wait_for_readers()
                raise
            failure = told or self._make_failure(schedule, name, error)
            first = self._first.exchange(self._heard or failure)
            self._broken_by = describe(failure, first)
            if first == failure:
                self._board.notice.post(failure)
            (self._board.notice if first == failure else self._first).wait_for_readers()
            if not isinstance(error, Exception):
                raise
            raise PipelineError(self._broken_by) from error

    def _make_failure(
        self, schedule: pipelining.OwnRuntime, name: str, error: BaseException, place: str | None = None
    ) -> Failure:
        places = name, place or frames.find_place_of(error, schedule), self._progress.describe_device()
        return make_failure(error, f", schedule {', '.join(filter(None, places))}", frames.explain(error))

    def _look_while_stuck(self) -> None:
        self._board.answer_for_stuck_step()
        if self._heard is None and (found := self._board.notice.read() or self._first.read()):
            self._heard = found
            logger.error("another rank failed first, and this one waits for it: %s", found)
