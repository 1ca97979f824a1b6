"""Position of torch's executor in its list, recorded while it runs.

The executor's frames show the same. But a thread that reads another thread's frames while it runs compiled code
sometimes crashes the process (on Python 3.11, with torch 2.13 and 2.14).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime


class StoppedError(Exception):
    """Another thread has stopped the executor."""


class Place:
    """Position of one executor. Its thread writes, others may read."""

    def __init__(self) -> None:
        self.begun = 0
        """Number of actions of this step that have begun; one more than the number of actions when all have ended."""
        self.action: _Action | None = None
        """The last action that has begun."""
        self.is_stopped = False
        """Whether the executor must not begin another action. Another thread sets it."""
        self._awaited: tuple[int, Sequence[dist.Work]] = 0, ()
        """`begun` at the last wait for messages, and these messages."""

    @property
    def waits(self) -> bool:
        """Whether the action waits for messages, on the host or on the device."""
        since, messages = self._awaited
        return since == self.begun and not all(message.is_completed() for message in messages)

    def wait_for(self, messages: Sequence[dist.Work]) -> None:
        self._awaited = self.begun, messages

    @contextmanager
    def follow(self, runtime: _PipelineScheduleRuntime) -> Iterator[None]:
        """Context for the executor's run of `runtime`'s lists."""
        lists, rank = runtime.pipeline_order_with_comms, runtime.rank
        runtime.pipeline_order_with_comms = {**lists, rank: _Row(lists[rank], self)}
        self.begun, self.action, self._awaited = 0, None, (0, ())
        try:
            yield
        finally:
            runtime.pipeline_order_with_comms = lists
            self._awaited = 0, ()


class Receives(dict[tuple[int, int], list[dist.Work]]):
    """Receives that torch's executor has posted, by stage and microbatch. It pops those that it waits for."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def pop(self, *key: Any) -> Any:
        self._place.wait_for(messages := super().pop(*key))
        return messages


class _Row(list[_Action]):
    """A rank's actions, which torch's executor iterates once."""

    def __init__(self, row: list[_Action], place: Place) -> None:
        super().__init__(row[:])  # not iterated, because iteration may have side effects
        self._row = row
        self._place = place

    def __iter__(self) -> Iterator[_Action]:
        place = self._place
        for place.begun, place.action in enumerate(self._row, 1):
            if place.is_stopped:
                raise StoppedError
            yield place.action
        place.begun += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> list[_Action]:
        """Torch copies the lists to print them when an action fails."""
        return deepcopy(self._row, memo)
