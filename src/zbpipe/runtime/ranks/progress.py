"""Progress of a step, on the host and on the device behind it, and the handling of failures.

On an accelerator, torch's executor launches computations far ahead of their execution. If a message never comes, the
host may be many ops past the waiting one, and NCCL ends the process by itself. So an event follows each computation,
and one the whole step. When a step fails, or stands still for most of the process group's timeout, the events show the
device's progress. The thread that checks it also learns of other ranks' failures, wherever the host waits.

NCCL's own hooks before such an end (torch >= 2.15) need Python's lock in NCCL's watchdog. A thread that holds the lock
while it waits for a full launch queue would keep the process from ending.
"""

from __future__ import annotations

import logging
import time
from atexit import register
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Event, Thread
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from zbpipe.runtime._torch import hooks, pipelining, position
from zbpipe.runtime.device import find_device
from zbpipe.runtime.ranks.agreement import is_alone
from zbpipe.runtime.ranks.failures import (
    PATIENCE,
    SHARED,
    Failure,
    Notice,
    PipelineError,
    answer_in_time,
    end_process,
    make_failure,
)
from zbpipe.runtime.ranks.step_board import StepBoard

MOST = 256
"""Number of remembered computations. A waiting op further behind the host is unknown."""
_SHARE = 0.7
"""Share of the process group's timeout after which the log reports a stuck rank's position."""
_LOOKS = 20
_LONGEST_PAUSE = 0.5
"""Longest interval between two checks, in seconds."""
_GRACE = 3.0
"""Seconds until the process ends if another rank's failure is not raised in it."""
_GLANCE = 0.02
"""Seconds between two checks whether it was raised."""

logger = logging.getLogger(__name__)


class Launched:
    """The host's last launched computations, with an event after each. `new_event` is called for the first `MOST`
    computations. Later ones reuse these events."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._events: list[Any] = []
        self._ops: dict[int, tuple[int | str, str, int | str]] = {}
        """The computation before each event: stage, kind and microbatch, as torch writes them; or another name."""
        self.count = 0

    def around(self, kind: str, stage: int | str, microbatch: int | str, compute: Callable[[], Any]) -> Any:
        """Launch one computation (see `_torch.hooks.hook`)."""
        result = compute()
        place = self.count % MOST
        if place == len(self._events):
            self._events.append(self._new_event())
        self._ops[place] = (stage, kind, microbatch)
        self._events[place].record()
        self.count += 1
        return result

    def count_ended(self) -> int:
        """Number of finished computations, including those no longer remembered."""
        oldest = max(0, self.count - MOST)
        for number in range(oldest, self.count):
            if not self._events[number % MOST].query():
                return number
        return self.count

    def describe(self) -> str:
        """The last finished and the unfinished computations, as text. Empty if nothing was launched."""
        ran, oldest = self.count_ended(), max(0, self.count - MOST)
        if not self.count:
            return ""
        if ran == self.count:
            return f"the device has run everything that was launched, {self._name(ran - 1)} last"
        left = self.count - ran
        last = f"{self._name(ran - 1)} ran last" if ran > oldest else "the last op is not known"
        more = f", nor have {left - 1} after it" if left > 1 else ""
        return f"on the device {last}, {self._name(ran)} has not ended{more}"

    def _name(self, number: int) -> str:
        return "{}{}{}".format(*self._ops[number % MOST])


def _launched_on(device: torch.device) -> Launched | None:
    return None if device.type == "cpu" else Launched(find_device(device).new_event)


_is_ending = Event()
_threads = WeakSet[Thread]()


@register
def _end_threads() -> None:
    # A thread whose store call returns while the interpreter ends would abort the process.
    _is_ending.set()
    for thread in list(_threads):
        thread.join(PATIENCE)


def _watch(progress: ref[StepFailures], schedule: ref[pipelining.OwnRuntime]) -> None:
    """Check while the schedule and its process group exist. This thread keeps neither alive."""
    while (watched := progress()) is not None and (of := schedule()) is not None and dist.is_initialized():
        pause = watched.look(of, time.monotonic())
        del watched, of
        if _is_ending.wait(pause):
            return


class StepFailures:
    """Failures of one schedule's steps. After the first one, on any rank, no step can follow. Another thread looks at
    the progress of steps, also between them: on an accelerator the host is far ahead of the device."""

    def __init__(self, board: StepBoard, *, has_events: bool = True) -> None:
        self._board = board
        self._notice = None if is_alone(None) else Notice()
        self._is_raised = False
        """Whether this rank raised the failure that ended the pipeline."""
        self._has_events = has_events
        self._launched: Launched | None = None
        """Launched computations. None without events, as on the CPU."""
        self._is_started = False
        self._runs = False
        self._steps = 0
        self._seen: tuple[Any, int | None] = None, None
        """The host's position and the device's number of finished computations at the last check."""
        self._since = 0.0
        """Time of the last change of `_seen`."""
        self._is_logged = False
        """Whether the present standstill was logged."""

    @contextmanager
    def begin_step(self, schedule: pipelining.OwnRuntime, name: str, *, is_compared: bool) -> Iterator[None]:
        """Context of one whole step. PipelineError if an earlier one failed, on any rank."""
        self.start(schedule)
        try:
            self._board.begin_step(is_compared=is_compared)
            yield
        except PipelineError:
            raise
        except Exception as error:
            if self._board.ended_by:
                raise PipelineError(self._board.ended_by) from error
            self._board.refuse(make_failure(error, f", schedule {name}, {position.NOT_BEGUN}"))
            raise
        finally:
            self._is_raised = bool(self._board.ended_by)

    def start(self, schedule: pipelining.OwnRuntime) -> None:
        """Start the other thread, before the first step."""
        if not self._is_started:
            self._is_started = True
            self._launched = _launched_on(pipelining.device_of_rank(schedule)) if self._has_events else None
            thread = Thread(target=_watch, args=(ref(self), ref(schedule)), daemon=True, name="zbpipe progress")
            thread.start()
            _threads.add(thread)

    @contextmanager
    def explain_failures(self, schedule: pipelining.OwnRuntime, name: str) -> Iterator[None]:
        """Context of a step's messages that converts an exception of any rank into a PipelineError that names the op.
        KeyboardInterrupt and SystemExit pass unchanged."""
        self._board.begin_messages()
        try:
            with self._follow(schedule):
                yield
        except PipelineError:
            raise
        except SHARED as error:
            places = name, position.find_failure(error, schedule), self._describe_device()
            where = f", schedule {', '.join(filter(None, places))}"
            self._is_raised = True
            # A rank that refuses the step may have closed its connections before this process read the reason.
            notice = self._notice
            refusal = notice and answer_in_time(lambda: self._board.find_other_refusal(notice.connection))
            self._end(self._post(refusal or make_failure(error, where, position.explain(error))))
            if self._notice is not None:
                self._notice.wait_for_readers()
            if not isinstance(error, Exception):
                raise
            raise PipelineError(self._board.ended_by) from error

    @contextmanager
    def _follow(self, schedule: pipelining.OwnRuntime) -> Iterator[None]:
        # A captured step runs later, many times, and events would become part of the graph.
        if find_device(pipelining.device_of_rank(schedule)).is_capturing():
            yield
            return
        self._steps += 1
        launched = self._launched
        self._runs = True
        try:
            with hooks.hook(schedule, hooks.HookOrder.FOLLOW, launched.around) if launched else nullcontext():
                yield
            if launched:  # reductions and the last sends follow the last computation
                launched.around("the rest of the step", "", "", lambda: None)
        finally:
            self._runs = False

    def _describe_device(self) -> str:
        with suppress(RuntimeError):
            return self._launched.describe() if self._launched else ""
        return ""  # the device no longer answers

    def _post(self, failure: Failure) -> Failure:
        return failure if self._notice is None else self._notice.post(failure)

    def _end(self, failure: Failure) -> None:
        if self._board.ended_by:  # by the other thread
            return
        self._board.ended_by = failure.description
        pipelining.interrupt()
        if self._notice is not None:
            self._notice.sign()

    # Called from the other thread.

    def look(self, schedule: pipelining.OwnRuntime, now: float) -> float:
        """Follow other ranks' failures while nothing moves on the host. Log once if host or device are stuck for most
        of the timeout. Returns the seconds to the next check."""
        host = self._steps, self._runs, schedule.position.begun
        is_idle = host == self._seen[0]
        if is_idle or self._seen[0] is None:
            with suppress(RuntimeError):  # the store may be gone; the process group notices first
                self._follow_others(schedule)
        timeout = pipelining.timeout_of(pipelining.stages_of(schedule)[0])
        if timeout is None:
            return _LONGEST_PAUSE
        # A query breaks the capture of a graph. So outside of steps, ask the device late, and not after it is done.
        launched, before = self._launched.count if self._launched else 0, self._seen[1] if is_idle else None
        ended = before
        if is_idle and (self._runs or now - self._since > _SHARE * timeout / 2) and before != launched:
            with suppress(RuntimeError):
                ended = self._launched.count_ended() if self._launched else None
        has_moved = not is_idle or (before is not None and ended != before)
        self._seen = host, ended
        is_waiting = self._runs or (ended is not None and ended < launched)
        if has_moved:
            self._since, self._is_logged = now, False
        elif is_waiting and now - self._since > _SHARE * timeout and not self._is_logged:
            self._is_logged = True
            place = position.describe_position(schedule) if self._runs else "the end of its step"
            logger.error(
                "nothing has moved for %.0f seconds, and the process group gives up after %.0f: rank %d is at %s",
                *(now - self._since, timeout, dist.get_rank()),
                ", ".join(filter(None, (place, self._describe_device()))),
            )
        return min(timeout / _LOOKS, _LONGEST_PAUSE)

    def _follow_others(self, schedule: pipelining.OwnRuntime) -> None:
        """End the pipeline if another rank has ended it."""
        if self._notice is None or self._board.ended_by:
            return
        failure = self._notice.read()
        if failure is None and (refusal := self._board.find_other_refusal(self._notice.connection)) is not None:
            failure = self._post(refusal)
        if failure is None or self._board.ended_by:
            return
        schedule.position.is_stopped = True
        self._end(failure)
        if failure.rank == dist.get_rank():
            return  # the training loop raises it
        logger.error("%s", failure.description)
        until = time.monotonic() + _GRACE
        while not self._is_raised and self._notice.is_current:
            if time.monotonic() > until:
                # The host waits for a device, a collective or a disk, without the other rank maybe forever.
                reason = f"Rank {dist.get_rank()} ends, because it reached no other op within {_GRACE:.0f} seconds"
                end_process(PipelineError(f"{failure.description.rstrip('.')}. {reason}"))
            time.sleep(_GLANCE)
