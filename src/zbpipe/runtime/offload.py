"""Copies to the host and back, between a schedule's computations: the copier, a rank's copies, and their memory."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from zbpipe.runtime._torch import hooks, pipelining, tensor_data
from zbpipe.runtime.device import Accelerator, find_device
from zbpipe.runtime.split.stage import find_pending
from zbpipe.schedule.ir import COMPUTATIONS, OFFLOADS, Op, OpKind, Schedule, reload_before
from zbpipe.simulator.timeline import Timeline

logger = logging.getLogger(__name__)

Storages = Sequence[torch.UntypedStorage]


@dataclass(slots=True)
class HostCopy:
    storages: Storages
    """Storages on the device, of zero bytes while only the host copy exists."""
    sizes: tuple[int, ...]
    host: list[Any]
    event: Any
    """End of the last copy, out or back."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


def make_copier(device: torch.device) -> Copier:
    if device.type == "meta":
        raise ValueError("offload needs a stage on an accelerator, or on the CPU in tests, not on meta: omit offload")
    return Copier(find_device(device))


class Copier:
    """Copies through pinned memory, with a stream for each direction.

    For storages that are not used in between, call `copy_out`, `release`, `copy_back` and `wait`, in this order.

    Memory is freed and allocated in the order of the compute stream. So the allocator never reuses it for kernels that
    could run before the copy ends, and `record_stream` is not needed.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._out, self._back = device.new_stream(), device.new_stream()
        self.copied = 0

    @property
    def smallest(self) -> int:
        return self._device.smallest_copy

    def copy_out(self, storages: Storages) -> HostCopy:
        """Begin to copy to the host, after all computations so far."""
        self._out.wait_stream(self._device.current_stream())
        with self._out:
            host = [self._device.copy_to_host(storage) for storage in storages]
        copy = HostCopy(storages, tuple(each.nbytes() for each in storages), host, self._out.record_event())
        self.copied += copy.num_bytes
        return copy

    def release(self, copy: HostCopy) -> None:
        """Free the memory on the device. Computations from now on wait until the copy ends."""
        self._device.current_stream().wait_event(copy.event)
        for storage in copy.storages:
            self._device.resize(storage, 0)

    def copy_back(self, copy: HostCopy) -> None:
        """Allocate memory on the device again and begin to copy back."""
        for storage, size in zip(copy.storages, copy.sizes, strict=True):
            self._device.resize(storage, size)
        # Earlier kernels may still use this memory for another tensor.
        self._back.wait_stream(self._device.current_stream())
        with self._back:
            for content, storage in zip(copy.host, copy.storages, strict=True):
                self._device.copy_from_host(content, storage)
        copy.event = self._back.record_event()

    def wait(self, copy: HostCopy) -> None:
        """Let computations from now on wait until the copy back ends, and free the host's memory."""
        self._device.current_stream().wait_event(copy.event)
        copy.host.clear()


class Copies:
    """Runs a rank's copies around its computations. Its stages are already split."""

    def __init__(self, stages: Sequence[pipelining.Stage], copier: Copier) -> None:
        device = pipelining.device_of(stages[0])
        if device.type not in ("cuda", "cpu"):
            logger.warning("offload is untried on %s: compare the losses with a job without it", device.type)
        self.copier = copier
        self._stages = {stage.stage_index: stage for stage in stages}
        self._logged: set[tuple[int, OpKind]] = set()

    def follow(self, timeline: Timeline) -> None:
        rank = timeline.schedule.placement.rank_of[next(iter(self._stages))]
        self._issued = _group_by_issue(timeline.schedule, rank)
        self._released = _group_by_release(timeline, rank)
        self._ops = frozenset(copy for copies in self._issued.values() for copy in copies)

    @contextmanager
    def issue_during(self, schedule: pipelining.ScheduleRuntime) -> Iterator[None]:
        self._saved: dict[tuple[int, int], Saved] = {}
        self._copies: dict[Op, HostCopy] = {}
        """Copies, by their op that copies out."""
        self._unreleased: set[Op] = set()
        self._before_loss: set[Op] = set()
        with hooks.hook(schedule, hooks.HookOrder.COPY, self.around):
            yield

    def around(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        if not self._ops or not self._stages[stage].has_backward:
            return compute()
        op = Op(stage, OpKind(kind), microbatch)
        reload = reload_before(op)
        if reload is not None and reload in self._ops:
            self.copier.wait(self._copies.pop(_find_copied(reload)))
        is_saved = op.kind is OpKind.F and op._replace(kind=OpKind.OF) in self._ops
        with self._saved.setdefault((stage, microbatch), Saved()).record() if is_saved else nullcontext():
            result = compute()
        if self._loss_comes(op):
            return result
        for copy in self._issued.get(op, ()):
            self._issue(copy)
        for copy in self._released.get(op, ()):
            self._release(copy)
        return result

    def _loss_comes(self, op: Op) -> bool:
        """Whether this is the first part of the last stage's F. The second part is the loss."""
        if op.kind is not OpKind.F or not self._stages[op.stage].is_last or op in self._before_loss:
            return False
        self._before_loss.add(op)
        return True

    def _issue(self, copy: Op) -> None:
        if copy.kind not in OFFLOADS:
            out = _find_copied(copy)
            self._release(out)
            self.copier.copy_back(self._copies[out])
            return
        if copy.kind is OpKind.OF:
            tensors = self._saved.pop((copy.stage, copy.microbatch)).list_alive()
        else:
            pending = find_pending(self._stages[copy.stage], copy.microbatch)
            tensors = [tensor for gradient in pending for tensor in gradient.tensors]
        storages = find_unshared(tensors, self.copier.smallest)
        del tensors
        self._copies[copy] = self.copier.copy_out(storages)
        self._unreleased.add(copy)
        # Log the bytes once per stage, because tensors with other owners are not offloaded.
        what, num_bytes = (copy.stage, copy.kind), self._copies[copy].num_bytes
        if num_bytes and what not in self._logged:
            self._logged.add(what)
            logger.info("%s copies %.1f MiB to the host", copy, num_bytes / 2**20)

    def _release(self, copy: Op) -> None:
        if copy in self._unreleased:
            self._unreleased.remove(copy)
            self.copier.release(self._copies[copy])


def _find_copied(reload: Op) -> Op:
    return reload._replace(kind=OpKind.OF if reload.kind is OpKind.RF else OpKind.OI)


def _group_by_issue(schedule: Schedule, rank: int) -> dict[Op, list[Op]]:
    found: dict[Op, list[Op]] = defaultdict(list)
    computation = None
    for op in schedule.ops[rank]:
        if op.kind in COMPUTATIONS:
            computation = op
        elif computation is not None:
            found[computation].append(op)
    return found


def _group_by_release(timeline: Timeline, rank: int) -> dict[Op, list[Op]]:
    """Copies out, by the computation that frees their memory: the last one that begins before the copy ends."""
    found: dict[Op, list[Op]] = defaultdict(list)
    spans = timeline.spans[rank]
    for copy in timeline.copies[rank]:
        if copy.op.kind in OFFLOADS:
            # Unknown costs: the copy takes no time.
            begun = [span.op for span in spans if span.start < copy.end or copy.end == copy.start == span.start]
            found[begun[-1]].append(copy.op)
    return found


class Saved:
    """Weak references to the tensors that autograd saves in one forward."""

    def __init__(self) -> None:
        self._tensors: list[ReferenceType[Tensor]] = []

    def record(self) -> AbstractContextManager[None]:
        """Context that records all tensors that autograd saves for a backward."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        # A new tensor object, so that other owners of the saved tensor count as holders of its memory.
        own = tensor.detach()
        self._tensors.append(ref(own))
        return own

    def list_alive(self) -> list[Tensor]:
        """Saved tensors that a backward can still use."""
        found = (each() for each in self._tensors)
        return [tensor for tensor in found if tensor is not None]


def find_unshared(tensors: Sequence[Tensor], smallest: int) -> list[torch.UntypedStorage]:
    """Storages of at least `smallest` bytes that only `tensors` share. They can be offloaded while unused."""
    # Parameters, buffers, a stage's inputs and outputs, and tensors that a module or its user keeps have other tensors
    # in the same memory, and stay.
    plain = [each for each in tensors if type(each) is Tensor]
    return [
        storage
        for storage, own in tensor_data.group_by_storage(plain)
        if storage is not None and storage.nbytes() >= max(smallest, 1) and not tensor_data.has_others(storage, own)
    ]
