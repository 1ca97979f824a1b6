"""What waits for W belongs to it alone: nobody may change x or dY of a layer in place between I and W.

Autograd hands gradients on without copies, so dY may lie in the same memory as somebody's `.grad`: a parameter that is
added through a view gets a view of dY for its gradient, and later microbatches add to it in place. Likewise x may be
a buffer that a module uses again, or a backward may keep the gradient that it got. Memory that others hold as well is
therefore copied, at the end of I.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from zbpipe.runtime import _torch
from zbpipe.runtime.split.products import PendingGradient


def take_over(pending: Sequence[PendingGradient], known: Iterable[Tensor]) -> None:
    """Make x and dY in `pending` belong to nobody else, by copies where others hold their memory, too.

    Args:
        pending: all that one I has left behind.
        known: tensors that others hold and that nobody changes.
    """
    accounted: dict[int | None, int] = {}
    """By memory, how many tensors that are known here lie in it."""
    storages = [(_count(gradient.x, accounted), _count(gradient.dy, accounted)) for gradient in pending]
    ours = list(accounted)
    for tensor in {id(each): each for each in known}.values():
        _count(tensor, accounted)
    shared = {storage for storage in ours if storage is None or _torch.num_holders(storage) > accounted[storage]}
    if shared:
        _copy(pending, storages, shared)


def _count(tensor: Tensor, accounted: dict[int | None, int]) -> int | None:
    """Add to its memory's tensors those that it makes; returns which memory that is."""
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
