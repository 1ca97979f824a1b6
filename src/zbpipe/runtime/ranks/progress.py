"""How far a step has come: on the host, and on the device, which is behind it.

On an accelerator torch's executor launches computations far ahead of what runs. If a message never comes, the host may
be many ops after the one that waits for it, and NCCL ends the process by itself. So an event follows each computation.
When a step fails, or nothing moves for most of the process group's timeout, the events show what the device has run.

This does not use NCCL's own hooks before such an end (torch >= 2.15). They would need Python's lock in NCCL's watchdog,
and a thread that holds the lock while it waits for a full launch queue would keep the process from ending.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Thread
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from zbpipe.runtime._torch import frames, hooks, pipelining

MOST = 256
"""Computations that are remembered. If the host is further ahead, it is not known which one waits."""
_SHARE = 0.7
"""Of the process group's timeout. If nothing moves for that share, the log reports the place of this rank."""
_LOOKS = 20
"""Checks in one timeout."""
_LONGEST_PAUSE = 2.0
"""Seconds between two checks."""

logger = logging.getLogger(__name__)


class Launched:
    """The last computations that the host launched, and an event after each.

    `new_event` is called for the first `MOST` computations; later ones use these events again.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._events: list[Any] = []
        self._ops: list[tuple[int, str, int]] = []
        """The computation before each event: stage, kind and microbatch, as torch writes them."""
        self.count = 0

    def around(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        """Launch one computation (see `_torch.hooks.hook`)."""
        result = compute()
        place = self.count % MOST
        if place == len(self._events):
            self._events.append(self._new_event())
            self._ops.append((stage, kind, microbatch))
        self._ops[place] = (stage, kind, microbatch)
        self._events[place].record()
        self.count += 1
        return result

    def count_ended(self) -> int:
        """How many of all launched computations have ended, counting all that are no longer remembered."""
        oldest = max(0, self.count - MOST)
        for number in range(oldest, self.count):
            if not self._events[number % MOST].query():
                return number
        return self.count

    def describe(self) -> str:
        """What ran last, and what has not ended; empty if nothing was launched."""
        ran, oldest = self.count_ended(), max(0, self.count - MOST)
        if not self.count:
            return ""
        if ran == self.count:
            return f"the device has run all that was launched, {self._name(ran - 1)} last"
        left = self.count - ran
        last = f"{self._name(ran - 1)} ran last" if ran > oldest else "what ran last is not known"
        more = f", nor have {left - 1} after it" if left > 1 else ""
        return f"on the device {last}, {self._name(ran)} has not ended{more}"

    def _name(self, number: int) -> str:
        return "{}{}{}".format(*self._ops[number % MOST])


class Progress:
    """Of the steps of one schedule, on this rank. While a step does not move, another thread calls `when_stuck`."""

    def __init__(self, when_stuck: Callable[[], None] = lambda: None) -> None:
        self._when_stuck = when_stuck
        self._launched: Launched | None = None
        """None on the CPU, where host and device are the same."""
        self._runs = False
        """Whether a step runs now."""
        self._steps = 0
        self._seen: tuple[Any, int | None] = None, None
        """At the last check: where the host was, and how many computations the device had run."""
        self._since = 0.0
        """Since when that has not changed."""
        self._is_logged = False
        """Whether the log reports that."""

    @contextmanager
    def follow(self, schedule: pipelining.OwnRuntime) -> Iterator[None]:
        """Around what `schedule` runs in a step."""
        device = pipelining.device_of(hooks.stages_of(schedule)[0])
        # A captured step runs later, many times, and events in it would become part of the graph.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        self._steps += 1
        if self._steps == 1:
            self._launched = _launched_on(device)
            Thread(target=_watch, args=(ref(self), ref(schedule)), daemon=True, name="zbpipe progress").start()
        launched = self._launched
        self._runs = True
        try:
            with hooks.hook(schedule, hooks.HookOrder.FOLLOW, launched.around) if launched else nullcontext():
                yield
        finally:
            self._runs = False

    def describe_device(self) -> str:
        """What the device has run, in words; empty on the CPU, and for a device that no longer answers."""
        with suppress(RuntimeError):
            return self._launched.describe() if self._launched else ""
        return ""

    def look(self, schedule: pipelining.OwnRuntime, now: float) -> float:
        """Log, once, that nothing has moved for most of the timeout. Returns the seconds until the next check."""
        timeout = pipelining.timeout_of(hooks.stages_of(schedule)[0])
        if timeout is None:
            return _LONGEST_PAUSE
        host = (self._steps, schedule.place.begun) if self._runs else None
        if host is not None and host == self._seen[0]:
            with suppress(RuntimeError):  # the store may be gone, as the process group knows first
                self._when_stuck()
        # Ask the device only if the host does not move: the query would break the capture of a graph.
        seen = host, self._count_ended() if host is not None and host == self._seen[0] else None
        if host is None or seen != self._seen:
            self._seen, self._since, self._is_logged = seen, now, False
        elif now - self._since > _SHARE * timeout and not self._is_logged:
            self._is_logged = True
            logger.error(
                "nothing has moved for %.0f seconds, and the process group gives up after %.0f: rank %d is at %s",
                *(now - self._since, timeout, dist.get_rank()),
                ", ".join(filter(None, (frames.find_place(schedule), self.describe_device()))),
            )
        return min(timeout / _LOOKS, _LONGEST_PAUSE)

    def _count_ended(self) -> int | None:
        with suppress(RuntimeError):
            return self._launched.count_ended() if self._launched else None
        return None


def _launched_on(device: torch.device) -> Launched | None:
    return None if device.type == "cpu" else Launched(lambda: torch.Event(device))


def _watch(progress: ref[Progress], schedule: ref[pipelining.OwnRuntime]) -> None:
    """Check as long as the schedule and its process group exist; this thread keeps neither alive."""
    while (watched := progress()) is not None and (of := schedule()) is not None and dist.is_initialized():
        pause = watched.look(of, time.monotonic())
        del watched, of
        time.sleep(pause)
