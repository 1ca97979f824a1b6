"""Ownership of memory between I and W: deferred tensors share none with others, and waste none.

Between I and W, nothing else may change the tensors that W reads: x, dY, and a product's extra tensors. But autograd
passes gradients on without copies, so dY may share its memory with a `.grad`, to which later microbatches add in place;
x may be a buffer that a module reuses; and a backward may keep its incoming gradient. So I ends by copying all memory
with another holder: other tensors, NumPy, or a lender of memory to torch. It also copies small parts of large tensors,
such as the last token's hidden states, to free the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zbpipe.runtime._torch import tensor_data
from zbpipe.runtime.split.products import PendingGradient

_WASTE = 2
"""Ratio of a storage to its deferred bytes from which these are copied. The copy takes no more than it frees."""


def copy_if_shared(pending: Sequence[PendingGradient]) -> None:
    """Copy tensors for W whose memory has other holders, or is mostly unused."""
    memory: dict[int | None, _Memory] = {}
    storages: dict[int, int | None] = {}
    for gradient in pending:
        for tensor in gradient.tensors:  # several layers may share one x
            if not (tensor_data.is_alone(tensor) or id(tensor) in storages):
                storages[id(tensor)] = _count(tensor, memory)
    to_copy = {
        storage
        for storage, found in memory.items()
        if storage is None
        or found.is_foreign
        or tensor_data.count_holders(storage) > found.accounted
        or (found.size and _WASTE * sum(found.parts.values()) <= found.size)
    }
    if to_copy:
        _copy(pending, storages, to_copy)


@dataclass(slots=True)
class _Memory:
    size: int
    """Size in bytes, or 0 if one of the tensors needs all of it."""
    is_foreign: bool
    """Whether it has a holder outside torch, which torch does not count."""
    accounted: int = 0
    parts: dict[tuple[object, ...], int] = field(default_factory=dict)
    """Bytes of each tensor that needs only a part of it."""


def _count(tensor: Tensor, memory: dict[int | None, _Memory]) -> int | None:
    """Count `tensor` and its base as holders of its memory. Returns the storage."""
    storage, number, size, is_torchs_own = tensor_data.find_memory(tensor)
    found = memory.get(storage)
    if found is None:
        found = memory[storage] = _Memory(size, not is_torchs_own)
    found.accounted += number
    if size and tensor.nbytes < size:
        found.parts[_identify_part(tensor)] = tensor.nbytes
    else:
        found.size = 0
    return storage


def _identify_part(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _copy(pending: Sequence[PendingGradient], storages: Mapping[int, int | None], to_copy: set[int | None]) -> None:
    copies: dict[tuple[object, ...], Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in storages or (storage := storages[id(tensor)]) not in to_copy:
            return tensor
        # Several layers may share one x, also as a copy.
        place = storage or id(tensor), *_identify_part(tensor)
        if place not in copies:
            copies[place] = tensor.clone()
        return copies[place]

    for gradient in pending:
        if any(id(each) in storages for each in gradient.tensors):
            gradient.tensors = tuple(map(own, gradient.tensors))
