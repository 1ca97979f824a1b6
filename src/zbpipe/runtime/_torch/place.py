"""How far torch's executor is in its list, in numbers that it leaves as it goes.

Its frames say the same. But a thread that reads the frames of another one, while that runs compiled code, ends the
process now and then (on Python 3.11, with torch 2.13 and 2.14).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime


class Place:
    """Of one executor: the thread that runs it writes, others may read."""

    def __init__(self) -> None:
        self.begun = 0
        """Actions of this step that have begun; one more than there are when all have ended."""
        self.action: _Action | None = None
        """The last one that has begun."""
        self._awaited: tuple[int, Sequence[dist.Work]] = 0, ()
        """The last messages that it has waited for, or waits for now, and `begun` then."""

    @property
    def waits(self) -> bool:
        """Whether the action waits for messages: on the device, where that is what waits."""
        since, messages = self._awaited
        return since == self.begun and not all(message.is_completed() for message in messages)

    def wait_for(self, messages: Sequence[dist.Work]) -> None:
        self._awaited = self.begun, messages

    @contextmanager
    def follow(self, runtime: _PipelineScheduleRuntime) -> Iterator[None]:
        """Around the executor's run of the lists that `runtime` has."""
        lists, rank = runtime.pipeline_order_with_comms, runtime.rank
        runtime.pipeline_order_with_comms = {**lists, rank: _Row(lists[rank], self)}
        self.begun, self.action, self._awaited = 0, None, (0, ())
        try:
            yield
        finally:
            runtime.pipeline_order_with_comms = lists
            self._awaited = 0, ()


class Receives(dict[tuple[int, int], list[dist.Work]]):
    """What torch's executor has posted and not waited for yet, by stage and microbatch. It pops what it waits for."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def pop(self, *key: Any) -> Any:
        self._place.wait_for(messages := super().pop(*key))
        return messages


class _Row(list[_Action]):
    """A rank's actions, which torch's executor iterates once."""

    def __init__(self, row: list[_Action], place: Place) -> None:
        super().__init__(row[:])  # not iterated, which may have effects
        self._row = row
        self._place = place

    def __iter__(self) -> Iterator[_Action]:
        place = self._place
        for place.begun, place.action in enumerate(self._row, 1):
            yield place.action
        place.begun += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> list[_Action]:
        """Torch copies the lists to print them when an action fails."""
        return deepcopy(self._row, memo)
