"""Nobody else may change x or dY of a deferred product in place between I and W.

Autograd passes gradients on without copies, so dY may share its memory with a `.grad`: a parameter that is added
through a view gets a view of dY as its gradient, and later microbatches add to it in place. Likewise x may be a buffer
that a module uses again, or a backward may keep the gradient that it got. So I ends by copying all memory that somebody
else holds, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from zbpipe.runtime import _torch
from zbpipe.runtime.split.products import PendingGradient


def take_over(pending: Sequence[PendingGradient], known: Iterable[Tensor]) -> None:
    """Copy x and dY in `pending` where others hold their memory, too.

    Args:
        pending: all that one I has deferred.
        known: tensors that others hold but never change.
    """
    accounted: dict[int | None, int] = {}
    """By memory, how many tensors known here lie in it."""
    storages = [(_count(gradient.x, accounted), _count(gradient.dy, accounted)) for gradient in pending]
    ours = list(accounted)
    for tensor in {id(each): each for each in known}.values():
        _count(tensor, accounted)
    shared = {storage for storage in ours if storage is None or _torch.num_holders(storage) > accounted[storage]}
    if shared:
        _copy(pending, storages, shared)


def _count(tensor: Tensor, accounted: dict[int | None, int]) -> int | None:
    """Count `tensor` (and what it is a view of) for its memory; returns which memory that is."""
    storage, number = _torch.place_in_memory(tensor)
    accounted[storage] = accounted.get(storage, 0) + number
    return storage


def _copy(
    pending: Sequence[PendingGradient], storages: Sequence[tuple[int | None, int | None]], shared: set[int | None]
) -> None:
    copies: dict[tuple[object, ...], Tensor] = {}

    def own(tensor: Tensor, storage: int | None) -> Tensor:
        if storage not in shared:
            return tensor
        # Several layers may have the same x, which stays one.
        place = storage or id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in copies:
            copies[place] = tensor.clone()
        return copies[place]

    for gradient, (x, dy) in zip(pending, storages, strict=True):
        gradient.x, gradient.dy = own(gradient.x, x), own(gradient.dy, dy)
