"""What waits for W belongs to it alone: nobody may change x or dY of a layer in place between I and W.

Autograd hands gradients on without copies, so dY may lie in the same memory as somebody's `.grad`: a parameter that is
added through a view gets a view of dY for its gradient, and later microbatches add to it in place. Likewise x may be
a buffer that a module uses again. Memory that others hold as well is therefore copied, at the end of I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from zbpipe.runtime import _torch
from zbpipe.runtime.products import PendingGradient


def owned(pending: Sequence[PendingGradient], known: Iterable[Tensor]) -> list[PendingGradient]:
    """`pending`, with copies of what others hold as well.

    Args:
        pending: all that one I has left behind.
        known: tensors that others hold and that nobody changes.
    """
    shared = _shared_storages([each for gradient in pending for each in (gradient.x, gradient.dy)], known)
    if not shared:
        return list(pending)
    copies: dict[tuple[object, ...], Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        storage = _torch.storage_of(tensor)
        if storage not in shared:
            return tensor
        place = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in copies:
            copies[place] = tensor.clone()
        return copies[place]

    return [gradient._replace(x=own(gradient.x), dy=own(gradient.dy)).stamped() for gradient in pending]


def _shared_storages(tensors: Sequence[Tensor], known: Iterable[Tensor]) -> set[int | None]:
    """Where `tensors` lie together with tensors that are neither among them nor known."""
    ours = {_torch.storage_of(tensor) for tensor in tensors} - {None}
    accounted = Counter(map(_torch.storage_of, _with_bases([*tensors, *known])))
    return {storage for storage in ours if storage is not None and _torch.num_holders(storage) > accounted[storage]}


def _with_bases(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each once; a view keeps the tensor that it is a view of."""
    found = {id(tensor): tensor for tensor in tensors}
    found |= {id(tensor._base): tensor._base for tensor in found.values() if tensor._base is not None}
    return list(found.values())
