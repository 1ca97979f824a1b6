"""The failures of one schedule's steps: where each happened, and what follows from it for later steps."""

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
    """The failures of one schedule's steps: one that failed, or was refused, has consequences for the next."""

    def __init__(self, board: StepBoard) -> None:
        self._board = board
        self._first = make_first_notice()
        self._progress = Progress(self._look_while_stuck)
        self._broken_by: str | None = None
        """How a step failed while messages were under way; no other step can follow."""
        self._told: tuple[BaseException, Failure] | None = None
        """The error by which this rank abandoned the present step, as the other ranks know it."""
        self._heard: Failure | None = None
        """Another rank's failure, found while the present step did not move."""

    @contextmanager
    def begin_step(self) -> Iterator[None]:
        """Around one whole step, which cannot follow one that failed."""
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
        self._told = error, make_failure(error, f", schedule {name}, before step 0")._replace(is_refusal=True)
        self._board.notice.post(self._told[1])

    def tell(self, error: Exception, schedule: pipelining.OwnRuntime, name: str) -> None:
        """Leave word that an op of the present step failed by `error`, before it is raised."""
        self._told = error, self._make_failure(schedule, name, error, frames.find_place(schedule))
        self._board.notice.post(self._told[1])
        logger.error("%s. This rank goes on without computing, until all ranks of the pipeline know", self._told[1])

    def find_why_abandoned(self) -> Exception | None:
        """An error with what another rank says of the present step; None if no rank has abandoned it."""
        found = self._board.notice.read()
        return None if found is None else _AbandonedStepError(found)

    def end_by_refusal(self) -> None:
        """Refuse all later steps: other ranks may be in the messages of the one that this rank has refused."""
        assert self._told is not None, "this rank refused"
        self._broken_by = str(self._told[1])
        self._first.exchange(self._told[1])

    @contextmanager
    def explain_failures(self, schedule: pipelining.OwnRuntime, name: str) -> Iterator[None]:
        """Around what `schedule` runs in a step: turn an exception into an error that names the op.

        Raises:
            PipelineError: the step failed on this rank, or on another one before. KeyboardInterrupt and SystemExit pass
                as they are, as does what this rank has refused the step by.
            RefusedStepError: another rank refuses the step.
        """
        try:
            with self._progress.follow(schedule):
                yield
        except PipelineError:
            raise
        except (_AbandonedStepError, RefusedStepError) as error:
            found = error.failure if isinstance(error, _AbandonedStepError) else self._board.notice.read()
            if found is None or found.is_refusal:
                raise RefusedStepError(f"{found or error}. All ranks have left out this step") from None
            self._broken_by = f"another rank failed first: {found}"
            raise PipelineError(self._broken_by) from None
        except SHARED as error:
            told = self._told[1] if self._told is not None and self._told[0] is error else None
            if told is not None and told.is_refusal:
                self._board.notice.wait_for_readers()
                raise
            failure = told or self._make_failure(schedule, name, error)
            first = self._first.exchange(failure)
            self._broken_by = describe(failure, self._heard or first)
            if first == failure:
                self._board.notice.post(failure)
                self._board.notice.wait_for_readers()
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
