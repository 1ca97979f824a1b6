"""Memory to offload: tensors saved by autograd in F, or deferred gradients, with no other owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from zbpipe.runtime._torch import autograd


class Saved:
    """Weak references to the tensors that autograd saves in one forward."""

    def __init__(self) -> None:
        self._tensors: list[ReferenceType[Tensor]] = []

    def record(self) -> AbstractContextManager[None]:
        """Context that records all tensors that autograd saves for a backward."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        # A new tensor object: other owners of the saved tensor then count as one more holder of its memory.
        own = tensor.detach()
        self._tensors.append(ref(own))
        return own

    def list_alive(self) -> list[Tensor]:
        """Saved tensors that a backward can still use."""
        found = (each() for each in self._tensors)
        return [tensor for tensor in found if tensor is not None]


def find_unshared(tensors: Sequence[Tensor], smallest: int) -> list[torch.UntypedStorage]:
    """Storages of at least `smallest` bytes that only `tensors` share. They can be offloaded while these are unused."""
    # Parameters, buffers, a stage's inputs and outputs, and tensors that a module or its user keeps have other tensors
    # in the same memory, and stay.
    own: dict[int, dict[int, Tensor]] = defaultdict(dict)
    """Tensors in each storage, by identity."""
    for tensor in tensors:
        for each in autograd.list_holders(tensor):
            place, *_ = autograd.find_memory(each)
            if place is not None:
                own[place][id(each)] = each
    found = []
    for place, here in own.items():
        storage = next(iter(here.values())).untyped_storage()
        is_alone = autograd.count_holders(place) == len(here)
        if is_alone and storage.resizable() and storage.nbytes() >= max(smallest, 1):
            found.append(storage)
    return found
