"""A GPU's twin on the CPU: side streams that run late or early, and memory that is somebody else's once it is freed.

Computations run at once, but events after them are over later, as if the device were behind the host. What goes to
another stream waits in its queue, until the computations wait for it, or a seeded scheduler runs it. A host that asks
for a number, as `item` does, waits until the device has come to it. Memory that is
freed or allocated is overwritten, as if another tensor had it in between. torch's own checker of races,
`torch.cuda._sanitizer`, is told of every access, in the order of the host.

Outside remain the streams of FSDP2, of NCCL and of torch itself, and computations that themselves run behind the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zbpipe.runtime.device import Cpu

POISON = 0xFF
"""A byte of memory that is nobody's. A float of such bytes is NaN."""


class RaceError(AssertionError):
    """Two accesses of one memory that nothing orders."""


class Event:
    def __init__(self, twin: Twin, number: int) -> None:
        self.twin, self.number = twin, number
        self.is_over = True  # as that of a GPU before it is recorded
        """Whether its stream has come so far."""
        self.left = 0
        """How often the device, behind the host, has still to pass it among the computations."""
        self.time = 0.0

    def record(self) -> None:
        self.twin.record(self, self.twin.current)

    def query(self) -> bool:
        self.twin.go_on()
        return self.is_over and not self.left

    def synchronize(self) -> None:
        while self.left:
            self.twin.pass_event()

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


class Stream:
    """A queue of operations. The first stream runs each at once, after those that it waits for."""

    def __init__(self, twin: Twin, number: int) -> None:
        self.twin, self.number = twin, number
        self.queue: deque[Event | Callable[[], None] | tuple[Event]] = deque()
        """Operations, events that were recorded here, and events of others to wait for (in tuples)."""
        self._before: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.twin.checker._handle_event_wait(event.number, self.number)
        self.queue.append((event,))
        self.twin.drain_if_first(self)

    def record_event(self) -> Event:
        return self.twin.record(self.twin.new_event(), self)

    def run_one(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        if isinstance(head, tuple) and not head[0].is_over:
            return False
        self.queue.popleft()
        if isinstance(head, Event):
            head.is_over = True
        elif not isinstance(head, tuple):
            head()
        return True

    def __enter__(self) -> Stream:
        self._before.append(self.twin.current)
        self.twin.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.twin.current = self._before.pop()


class Twin(Cpu):
    def __init__(self, seed: int, *, is_stuck: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._random = Random(seed)
        self.made = 0
        """Number of events."""
        self.checker = _sanitizer.EventHandler()
        self.streams: list[Stream] = []
        self.current = self._new_stream(0)
        self.races: list[Any] = []
        self.is_stuck = is_stuck
        """Whether nothing moves by itself any more."""
        self.passed: list[Event] = []
        """Events among the computations, as the device came to them."""
        self.ahead: deque[Event] = deque()
        """Events among the computations that it has not come to."""

    def _new_stream(self, number: int) -> Stream:
        stream = Stream(self, number)
        self.streams.append(stream)
        if number:  # the checker knows the first
            self.checker._handle_stream_creation(number)
        return stream

    def new_stream(self) -> Any:
        return self._new_stream(len(self.streams))

    def current_stream(self) -> Any:
        return self.current

    def new_event(self, *, timed: bool = False) -> Any:
        self.made += 1
        self.checker._handle_event_creation(self.made)
        return Event(self, self.made)

    def record(self, event: Event, stream: Stream) -> Event:
        self.checker._handle_event_record(event.number, stream.number)
        event.is_over = False
        if stream.number == 0:
            event.left += 1
            self.ahead.append(event)
        stream.queue.append(event)
        self.drain_if_first(stream)
        return event

    def drain_if_first(self, stream: Stream) -> None:
        """Computations run at once, so whatever they wait for runs before."""
        while stream.number == 0 and stream.queue:
            if not stream.run_one():
                ready = [each for each in self.streams[1:] if each.queue]
                assert any(each.run_one() for each in self._random.sample(ready, len(ready))), "a deadlock of streams"

    def go_on(self) -> None:
        for _ in range(0 if self.is_stuck else self._random.choice((0, 0, 1, 3, 20))):
            stream = self._random.choice(self.streams)
            if stream.number:
                stream.run_one()
            else:
                self.pass_event()

    def pass_event(self) -> None:
        """The device comes to the next event among the computations."""
        if self.ahead:
            event = self.ahead.popleft()
            event.left -= 1
            event.time = float(len(self.passed))
            self.passed.append(event)

    def touch(self, what: str, reads: set[int] = frozenset(), writes: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Tell the checker of an operation of the current stream."""
        names = {pointer: [what] for pointer in reads | writes}
        self.races += self.checker._handle_kernel_launch(
            self.current.number, set(reads) - set(writes), set(writes), set(), what, names
        )
        for race in self.races:
            first, second = race.previous_access, race.current_access
            streams = f"on the streams {second.stream} and {first.stream}"
            raise RaceError(f"{second.operator} and, before it, {first.operator}, {streams}")

    # What `Cpu` does at once.

    def synchronize(self) -> None:
        while self.ahead:
            time.sleep(0.1) if self.is_stuck else self.pass_event()

    def copy_to_host(self, storage: torch.UntypedStorage) -> Any:
        content = bytearray(storage.nbytes())
        self.touch("copy to the host", {storage.data_ptr()}, {id(content)})
        self.current.queue.append(lambda: content.__setitem__(slice(None), super(Twin, self).copy_to_host(storage)))
        return content

    def copy_from_host(self, content: Any, storage: torch.UntypedStorage) -> None:
        self.touch("copy from the host", {id(content)}, {storage.data_ptr()})
        self.current.queue.append(lambda: self._write(bytes(content), storage))

    def _write(self, content: bytes, storage: torch.UntypedStorage) -> None:
        assert len(content) == storage.nbytes(), "the memory is still there"
        super().copy_from_host(content, storage)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage.nbytes():
            self._spoil(storage)
        super().resize(storage, size)
        if size:
            self._spoil(storage)
        self.go_on()

    def _spoil(self, storage: torch.UntypedStorage) -> None:
        self.touch("use by another tensor", writes={storage.data_ptr()})
        super().copy_from_host(bytes([POISON]) * storage.nbytes(), storage)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context of computations, which the checker sees, and beside which the other streams run."""
        # The checker would take a millisecond to note the lines of each operation.
        without_lines = SimpleNamespace(StackSummary=SimpleNamespace(extract=lambda *_, **__: []), walk_stack=repr)
        with mock.patch.object(_sanitizer, "traceback", without_lines), _Seen(self):
            yield
        for stream in self.streams:
            while stream.run_one():
                pass


class _Seen(TorchDispatchMode):
    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self._twin = twin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._twin.go_on()
        if func is torch.ops.aten._local_scalar_dense.default:
            self._twin.synchronize()
        result = func(*args, **(kwargs or {}))
        reads, writes = (_memory(each) for each in ((args, kwargs), result))
        self._twin.touch(str(func), reads - writes, writes)
        return result


def _memory(values: Any) -> set[int]:
    storages = [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, Tensor)]
    return {storage.data_ptr() for storage in storages if storage.nbytes()}
