"""NCCL's point-to-point messages between ranks that share one GPU: copies into memory shared by CUDA IPC.

Two flags for each sender and receiver order the copies on their streams, as NCCL does: a send waits until its receive
is posted, and the receive for the copy. A queue of messages is a stream. Everything else goes through `fifo.py`, over
gloo. On the CPU messages go through shared files, and queues are threads. The GPU's part has not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import fifo
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

LIMIT = 60.0
"""Seconds that a wait of the host may take."""
QUEUES = {"one queue": "fifo_one_queue", "queue per peer": "fifo_queue_per_peer"}
"""By the transport the backend of `fifo.py` that has its queues."""
POSTED, FILLED = 0, 1
"""Places of the flags: whose value is the number of the last message that was posted, or copied."""
_KERNELS = """import triton, triton.language as tl
@triton.jit(do_not_specialize=["value"])
def wait(flag, value):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < value: pass
@triton.jit(do_not_specialize=["value"])
def write(flag, value): tl.atomic_xchg(flag, value, sem="release", scope="sys")
"""
"""In a file of their own, because triton reads their source. They take a unit of the GPU each, as NCCL's do."""


class Flags(NamedTuple):
    """Operations on a flag, in the order of the current stream: its tensor, its place there, and the value."""

    wait: Callable[[Tensor, int, int], object]
    write: Callable[[Tensor, int, int], object]


def make_flags(device: torch.device, folder: Path) -> Flags:
    """The flags of the host; or of memory operations on streams, or of kernels if those fail on any rank."""
    if device.type == "cpu":
        return Flags(_wait_on_host, lambda flags, place, value: flags[place].fill_(value))
    works = False
    with suppress(OSError, AttributeError, RuntimeError):
        library = ctypes.CDLL("libcuda.so.1")
        # Both with flag 0: wait until the flag is at least the value; write after all that came before.
        flags = Flags(partial(_call, library.cuStreamWaitValue32_v2), partial(_call, library.cuStreamWriteValue32_v2))
        tried = torch.zeros(2, dtype=torch.int32, device=device)
        flags.write(tried, FILLED, 5)
        flags.wait(tried, FILLED, 5)
        works = tried.tolist() == [0, 5]
    if all(gathered(works)):
        return flags
    (folder / "spin_kernels.py").write_text(_KERNELS)
    sys.path.insert(0, str(folder))
    kernels = __import__("spin_kernels")
    return Flags(partial(_launch, kernels.wait), partial(_launch, kernels.write))


def _wait_on_host(flags: Tensor, place: int, value: int) -> None:
    until = time.monotonic() + LIMIT
    while int(flags[place]) < value:
        if time.monotonic() > until:
            raise RuntimeError(f"flag {place} is {int(flags[place])}, not {value}, after {LIMIT:.0f} s")
        time.sleep(2e-5)


def _call(function: Any, flags: Tensor, place: int, value: int) -> None:
    kinds = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    values = torch.cuda.current_stream().cuda_stream, flags.data_ptr() + 4 * place, value, 0
    if code := function(*(kind(each) for kind, each in zip(kinds, values, strict=True))):
        raise RuntimeError(f"{function.__name__} returned {code}")


def _launch(kernel: Any, flags: Tensor, place: int, value: int) -> None:
    kernel[(1,)](flags[place:], value, num_warps=1)


@dataclass
class Edge:
    """From one rank to another: memory and flags of the receiver, and the number of messages so far."""

    slot: Tensor
    flags: Tensor
    count: int = 0


def connect(device: torch.device, folder: Path, num_bytes: int) -> dict[tuple[int, int], Edge]:
    """This rank's edges, by sender and receiver. All ranks call it."""
    me, others = dist.get_rank(), [each for each in range(dist.get_world_size()) if each != dist.get_rank()]
    if device.type == "cpu":
        share = partial(torch.from_file, shared=True, size=num_bytes + 64, dtype=torch.uint8)
        pairs = [pair for pair in permutations([me, *others], 2) if me in pair]
        files = {pair: share(str(folder / "{}-{}".format(*pair))) for pair in pairs}
        return {pair: Edge(memory[64:], memory[:8].view(torch.int32)) for pair, memory in files.items()}
    make = partial(torch.zeros, device=device)
    mine = {each: (make(num_bytes, dtype=torch.uint8), make(2, dtype=torch.int32)) for each in others}
    torch.cuda.synchronize()
    shared = gathered({source: [reduce_tensor(each) for each in own] for source, own in mine.items()})
    found = {(source, me): Edge(*own) for source, own in mine.items()}
    return found | {(me, each): Edge(*(rebuild(*args) for rebuild, args in shared[each][me])) for each in others}


def gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class _Queue:
    """Runs one message after the other: a stream, or a thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1)

    def run(self, steps: Sequence[Callable[[], object]]) -> Any:
        """Returns an event, or a future."""
        if self._stream is None:
            return self._thread.submit(lambda: [step() for step in steps])
        self._stream.wait_stream(torch.cuda.current_stream())  # after what was launched before the post, as NCCL's
        with torch.cuda.stream(self._stream):
            for step in steps:
                step()
        return self._stream.record_event()


class _Message(dist.Work):
    """Messages that were posted together. Their tensors live until the wait."""

    def __init__(self, marks: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._marks, self._tensors = marks, tensors

    def is_completed(self) -> bool:
        return all(each.done() if isinstance(each, Future) else each.query() for each in self._marks)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for each in self._marks:
            each.result(LIMIT) if isinstance(each, Future) else torch.cuda.current_stream().wait_event(each)
        self._marks, self._tensors = (), ()
        return True


class IpcGroup(fifo.FifoGroup):
    """A process group of all ranks, whose messages go through the memory of `edges`."""

    edges: dict[tuple[int, int], Edge]
    flags: Flags

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        return self._post([(True, tensors[0], peer)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        return self._post([(False, tensors[0], peer)])

    def batch(self, operations: list[dist.P2POp]) -> Any:
        return self._post([(each.op is dist.isend, each.tensor, each.group_peer) for each in operations])

    def _post(self, ends: Sequence[tuple[bool, Tensor, int]]) -> _Message:
        by_queue: dict[Any, list[tuple[bool, Tensor, int]]] = {}
        for end in ends:
            by_queue.setdefault(self._queue_of(end[2], end[0]), []).append(end)
        marks, kept = [], []
        for key, together in by_queue.items():
            posts, sends, receives = list[Any](), list[Any](), list[Any]()  # in this order a batch cannot block itself
            for is_send, tensor, peer in together:
                edge = self.edges[(self.rank(), peer) if is_send else (peer, self.rank())]
                edge.count += 1
                data = tensor.data.contiguous() if is_send else tensor.data  # autograd sees nothing of it
                kept += [tensor, data]
                data = data.view(-1).view(torch.uint8)
                slot, number = edge.slot[: data.numel()], edge.count
                wait, write = (partial(each, edge.flags) for each in self.flags)
                if is_send:
                    sends += [partial(wait, POSTED, number), partial(slot.copy_, data), partial(write, FILLED, number)]
                else:
                    posts += [partial(write, POSTED, number)]
                    receives += [partial(wait, FILLED, number), partial(data.copy_, slot)]
            queue: Any = self._queues.setdefault(key, _Queue(together[0][1].device))  # type: ignore[arg-type]
            marks.append(queue.run([*posts, *sends, *receives]))
        return _Message(marks, kept)


def new_group(transport: str, edges: dict[tuple[int, int], Edge], flags: Flags) -> Any:
    """A process group of all ranks with the queues of `transport`."""
    name = QUEUES[transport].replace("fifo", "ipc")
    fifo.BACKENDS[name] = fifo.BACKENDS[QUEUES[transport]]

    def create(options: Any, _: Any) -> IpcGroup:
        group = IpcGroup(name, options.store, options.group_rank, options.group_size, options.timeout)
        group.edges, group.flags = edges, flags
        return group

    if name.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    return dist.new_group(backend=name, timeout=timedelta(seconds=LIMIT))
