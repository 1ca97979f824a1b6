"""What waits between I and W lies in memory of its own, and keeps no more of it than it needs.

Nobody else may change what W reads in place between I and W: x, dY, and further tensors of a product. Autograd passes
gradients on without copies, so dY may share its memory with a `.grad`: a parameter that is added through a view gets a
view of dY as its gradient, and later microbatches add to it in place. x may be a buffer that a module uses again, or a
backward may keep the gradient that it got. So I ends by copying all memory that somebody else holds, too: other
tensors, NumPy, or whoever has lent it to torch.

It also copies small parts of large tensors, such as the last token's hidden states, so that the rest becomes free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zbpipe.runtime._torch import autograd
from zbpipe.runtime.split.products import PendingGradient

_WASTE = 2
"""Where memory is this many times what waits in it, what waits is copied: the copy takes at most what it frees."""


def copy_if_shared(pending: Sequence[PendingGradient]) -> None:
    """Copy what W reads where others hold its memory, too, or where most of that memory is of no more use."""
    memory: dict[int | None, _Memory] = {}
    storages = [[_count(each, memory) for each in gradient.tensors] for gradient in pending]
    to_copy = {
        storage
        for storage, found in memory.items()
        if storage is None or found.is_foreign or autograd.count_holders(storage) > found.accounted or found.is_wasted()
    }
    if to_copy:
        _copy(pending, storages, to_copy)


@dataclass(slots=True)
class _Memory:
    """Of some tensors that wait."""

    size: int
    """Bytes, or 0 if one of the tensors needs them all."""
    is_foreign: bool
    """Whether somebody outside of torch has it, whom the number of holders does not show."""
    accounted: int = 0
    """How many of the tensors that hold it are known."""
    parts: dict[tuple[object, ...], int] = field(default_factory=dict)
    """Bytes of each tensor that is a part of it."""

    def is_wasted(self) -> bool:
        return 0 < _WASTE * sum(self.parts.values()) <= self.size


def _count(tensor: Tensor, memory: dict[int | None, _Memory]) -> int | None:
    """Count `tensor` (and what it is a view of) for its memory; returns which memory that is."""
    storage, number, size = autograd.find_memory(tensor)
    found = memory.get(storage)
    if found is None:
        found = memory[storage] = _Memory(size, not autograd.is_torchs_own(tensor))
    found.accounted += number
    if tensor.nbytes < size:
        found.parts[_identify_part(tensor)] = tensor.nbytes
    else:
        found.size = 0
    return storage


def _identify_part(tensor: Tensor) -> tuple[object, ...]:
    """Of its memory."""
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _copy(
    pending: Sequence[PendingGradient], storages: Sequence[Sequence[int | None]], to_copy: set[int | None]
) -> None:
    copies: dict[tuple[object, ...], Tensor] = {}

    def own(tensor: Tensor, storage: int | None) -> Tensor:
        if storage not in to_copy:
            return tensor
        # Several layers may have the same x, which stays one.
        place = storage or id(tensor), *_identify_part(tensor)
        if place not in copies:
            copies[place] = tensor.clone()
        return copies[place]

    for gradient, places in zip(pending, storages, strict=True):
        if not to_copy.isdisjoint(places):
            gradient.tensors = tuple(map(own, gradient.tensors, places))
