"""Which memory can go: tensors that autograd has saved in F, or deferred gradients, with no other owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from zbpipe.runtime._torch import autograd


class Saved:
    """What autograd saves of one forward. It holds none of it, so it keeps nothing alive."""

    def __init__(self) -> None:
        self._tensors: list[ReferenceType[Tensor]] = []

    def record(self) -> AbstractContextManager[None]:
        """Within, all that autograd saves for a backward is noted."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        # A tensor of our own: whoever else has the one that autograd saves then shows as one more holder of its memory.
        own = tensor.detach()
        self._tensors.append(ref(own))
        return own

    def list_alive(self) -> list[Tensor]:
        """What a backward can still ask for."""
        found = (each() for each in self._tensors)
        return [tensor for tensor in found if tensor is not None]


def find_unshared(tensors: Sequence[Tensor], smallest: int) -> list[torch.UntypedStorage]:
    """The storages, of at least `smallest` bytes, that only `tensors` lie in; they may go while nobody uses these."""
    # Parameters, buffers, the inputs and outputs of a stage and all that a module or its user keeps have other tensors
    # in the same memory, and stay.
    own: dict[int, dict[int, Tensor]] = defaultdict(dict)
    """By storage, and by identity the tensors in it."""
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
