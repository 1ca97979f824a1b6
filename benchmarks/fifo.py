"""NCCL's point-to-point messages without NCCL: process groups over gloo whose messages run through queues.

NCCL runs the messages of a stream one after the other, and each of them only when both ends are there. gloo has no such
queue, so what blocks on a GPU, or reads a tensor too early, runs well over gloo. Importing this module registers three
backends with `torch.distributed`, by what shares a queue:

- "fifo_one_queue": all messages of the group, as with torch 2.15's "nccl", and RCCL in the worst case;
- "fifo_queue_per_peer": all messages from and to one other rank;
- "fifo_queue_per_edge": all messages from, or all messages to, one other rank.

A message begins when those before it in its queue are over, and is over when both ends have met: only then its bytes
are read, so a change of the tensor after the send was posted is seen, as on a GPU. Messages that were posted in one
batch begin together. Collectives go to gloo. No wait is longer than the group's timeout.

What is read or kept too long becomes NaN (integers: their largest number). A receive's tensor is so from the post until
the receive is waited for. A floating-point tensor that was sent is so from the wait on, unless another tensor lies in
its memory or autograd has its history: that is the gradient of a stage's input, which nobody may use once it is sent;
the activation that was sent may be needed for the sender's own backward.

Tensors on a GPU go through the memory of the host, so several ranks can share one GPU. A queue has a stream of its own
there: a message waits for the stream that posted it, as it was at the post, and the stream that waits for the message
waits for the queue's. Other than with NCCL, the host waits, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zbpipe.runtime._torch.tensor_data import count_holders, find_storage

BACKENDS: dict[str, Callable[[int, bool], Hashable]] = {
    "fifo_one_queue": lambda peer, sends: None,
    "fifo_queue_per_peer": lambda peer, sends: peer,
    "fifo_queue_per_edge": lambda peer, sends: (peer, sends),
}
"""By name of the backend the queue of a message, by its peer and whether it is a send."""


class FifoGroup(dist.ProcessGroup):
    """A process group whose messages between two ranks run through queues; everything else is gloo's."""

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        # Twice the limit: whoever waits for a message sees that it was not met, however late the wait begins.
        self._gloo = dist.ProcessGroupGloo(store, rank, size, 2 * timeout)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._queue_of = BACKENDS[backend]
        self._queues: dict[Hashable, _Queue] = {}
        self._limit = timeout.total_seconds()
        self.late: Callable[[], float] = lambda: 0.0
        """Seconds by which the next message that this rank receives is late, though it holds up none behind it."""

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Message:
        return self._posted([_Send(tensors[0], peer, tag)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Message:
        return self._posted([_Receive(tensors[0], peer, tag)])

    def batch(self, operations: list[dist.P2POp]) -> Message:
        kinds = {dist.isend: _Send, dist.irecv: _Receive}
        return self._posted([kinds[each.op](each.tensor, each.group_peer, each.tag) for each in operations])

    def collective(self, name: str, *args: Any, **options: Any) -> Any:
        """One of gloo's, by torch's name of it."""
        run = getattr(self._gloo, name if hasattr(self._gloo, name) else _OLDER_NAMES[name])
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if not any(each.is_cuda for each in tensors):
            return run(*args, **options)
        hosts = {id(each): each.detach().cpu() for each in tensors}
        through = partial(tree_map_only, Tensor, lambda each: hosts[id(each)])
        run(*through(args), **through(options)).wait()
        for each in tensors:
            each.detach().copy_(hosts[id(each)])
        return Message({}, self._limit)

    def one_by_one(self, name: str, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Message:
        """Several of gloo's collectives, as torch's functional collectives ask for them."""
        for output, given in zip(outputs, inputs, strict=True):
            self.collective(name, output, given, *options).wait()
        return Message({}, self._limit)

    def _posted(self, transfers: list[_Transfer]) -> Message:
        by_queue: dict[Hashable, list[_Transfer]] = {}
        for transfer in transfers:
            by_queue.setdefault(self._queue_of(transfer.peer, isinstance(transfer, _Send)), []).append(transfer)
        running = {}
        for key, together in by_queue.items():
            queue = self._queues.setdefault(key, _Queue())
            running[queue.add(partial(self._run, queue, together))] = together
        return Message(running, self._limit)

    def _run(self, queue: _Queue, together: list[_Transfer]) -> float:
        """When it arrives, by the monotonic clock."""
        with torch.no_grad():
            works = [transfer.begin(self._gloo, queue.stream(transfer.tensor.device)) for transfer in together]
            for work in works:
                work.wait()
            for transfer in together:
                transfer.arrived(queue.stream(transfer.tensor.device))
            receives = any(isinstance(transfer, _Receive) for transfer in together)
            return time.monotonic() + (self.late() if receives else 0.0)


_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
_COLLECTIVES = {*_OLDER_NAMES, *_OLDER_NAMES.values()} | {
    *("allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "barrier", "broadcast"),
    *("gather", "reduce", "reduce_scatter", "scatter"),
}
# `ProcessGroup` would do the same, but for a class in Python it calls gloo without giving Python's lock away, and
# gloo's threads need it to drop tensors.
for _name in _COLLECTIVES:
    setattr(FifoGroup, _name, partialmethod(FifoGroup.collective, _name))
for _name, _each in {
    "allgather_into_tensor_coalesced": "all_gather_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
}.items():
    setattr(FifoGroup, _name, partialmethod(FifoGroup.one_by_one, _each))


class Message(dist.Work):
    """What was posted together."""

    def __init__(self, running: dict[Future[float], list[_Transfer]], limit: float) -> None:
        super().__init__()
        self._running = running
        self._limit = limit

    def is_completed(self) -> bool:
        return all(each.done() for each in self._running)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all is over.

        Raises:
            RuntimeError: it was not in time, or the message or one before it failed.
        """
        limit = timeout.total_seconds() if timeout else self._limit
        deadline = time.monotonic() + limit
        while self._running:
            future, transfers = next(iter(self._running.items()))
            try:
                arrives = future.result(deadline - time.monotonic())
            except TimeoutError:
                names = ", ".join(map(str, transfers))
                raise RuntimeError(f"fifo: {names}: not met within {limit:g} s") from None
            time.sleep(max(0.0, arrives - time.monotonic()))
            for transfer in transfers:
                transfer.waited_for()
            del self._running[future]
        return True


class _Queue:
    """Runs one message after the other; after one that failed, none."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fifo")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._error: BaseException | None = None

    def add(self, run: Callable[[], float]) -> Future[float]:
        return self._thread.submit(self._run, run)

    def _run(self, run: Callable[[], float]) -> float:
        if self._error is not None:
            raise RuntimeError(f"fifo: a message before this one failed: {self._error}")
        try:
            return run()
        except BaseException as error:
            self._error = error
            raise

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The queue's own; None for tensors of the host."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Transfer:
    """One end of one message."""

    def __init__(self, tensor: Tensor, peer: int, tag: int) -> None:
        self.tensor, self.peer, self.tag = tensor, peer, tag
        # As the network does it: autograd does not see what is read and written.
        self.data = tensor.data
        self.posted = _mark(tensor.device)
        self.done: torch.cuda.Event | None = None

    def begin(self, gloo: Any, stream: torch.cuda.Stream | None) -> dist.Work:
        """Start it, in the queue's thread."""
        raise NotImplementedError

    def arrived(self, stream: torch.cuda.Stream | None) -> None:
        """It is over, in the queue's thread."""

    def waited_for(self) -> None:
        """The thread that posted it has waited for it."""

    def on_queue(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        """Within, the device's work is the queue's, and comes after what was there at the post."""
        if stream is None or self.posted is None:
            return contextlib.nullcontext()
        stream.wait_event(self.posted)
        return torch.cuda.stream(stream)

    def __str__(self) -> str:
        return f"{type(self).__name__.strip('_').lower()} with rank {self.peer}, {tuple(self.tensor.shape)}"


class _Send(_Transfer):
    def begin(self, gloo: Any, stream: torch.cuda.Stream | None) -> dist.Work:
        if stream is None:
            return gloo.send([self.data], self.peer, self.tag)
        with self.on_queue(stream):
            host = self.data.cpu()
            self.done = _mark(self.data.device)
        return gloo.send([host], self.peer, self.tag)

    def waited_for(self) -> None:
        _wait_for(self.done)
        del self.data
        storage = find_storage(self.tensor)
        alone = storage is not None and count_holders(storage) == 1
        if alone and self.tensor.is_floating_point() and not self.tensor.requires_grad:
            spoil(self.tensor)


class _Receive(_Transfer):
    def __init__(self, tensor: Tensor, peer: int, tag: int) -> None:
        spoil(tensor)
        super().__init__(tensor, peer, tag)
        self.bytes = torch.empty_like(self.data, device="cpu")

    def begin(self, gloo: Any, stream: torch.cuda.Stream | None) -> dist.Work:
        return gloo.recv([self.bytes], self.peer, self.tag)

    def arrived(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            with self.on_queue(stream):
                self.data.copy_(self.bytes)
                self.done = _mark(self.data.device)

    def waited_for(self) -> None:
        if self.tensor.device.type == "cpu":
            self.data.copy_(self.bytes)
        _wait_for(self.done)


def spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    else:
        tensor.data.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Where the current stream of a GPU is; None on the host, where everything that was called is over."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _create(backend: str, options: Any, _: Any) -> FifoGroup:
    return FifoGroup(backend, options.store, options.group_rank, options.group_size, options.timeout)


for _backend in BACKENDS:
    dist.Backend.register_backend(_backend, partial(_create, _backend), extended_api=True, devices=["cpu", "cuda"])

_batch_isend_irecv = dist.batch_isend_irecv


def _batch(operations: list[dist.P2POp]) -> list[Any]:
    group = operations[0].group or dist.group.WORLD
    return [group.batch(operations)] if isinstance(group, FifoGroup) else _batch_isend_irecv(operations)


# torch starts a batch at once for its own backends alone, and which these are differs between its versions.
dist.batch_isend_irecv = _batch  # type: ignore[assignment]
