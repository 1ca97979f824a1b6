"""What waits for W belongs to it alone: nobody may change x or dY of a layer in place between I and W.

Autograd hands gradients on without copies, so dY may lie in the same memory as somebody's `.grad`: a parameter that is
added through a view gets a view of dY for its gradient, and later microbatches add to it in place. Likewise x may be
a buffer that a module uses again, or a backward may keep the gradient that it got. Memory that others hold as well is
therefore copied, at the end of I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from zbpipe.runtime import _torch
from zbpipe.runtime.products import PendingGradient


def take_over(pending: list[PendingGradient], known: Iterable[Tensor]) -> None:
    """Make x and dY in `pending` belong to nobody else, by copies where others hold their memory, too.

    Args:
        pending: all that one I has left behind, and the only place that refers to these very tensors.
        known: tensors that others hold and that nobody changes.
    """
    pending[:] = [each._replace(x=_torch.bare(each.x), dy=_torch.bare(each.dy)) for each in pending]
    ours = [tensor for gradient in pending for tensor in (gradient.x, gradient.dy)]
    accounted = Counter(map(_torch.storage_of, [*ours, *{id(tensor): tensor for tensor in known}.values()]))
    shared = {storage for storage in map(_torch.storage_of, ours) if _torch.num_holders(storage) > accounted[storage]}
    copies: dict[tuple[object, ...], Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        storage = _torch.storage_of(tensor)
        if storage not in shared:
            return tensor
        # Several layers may have the same x, which stays one.
        place = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in copies:
            copies[place] = tensor.clone()
        return copies[place]

    if shared:
        pending[:] = [each._replace(x=own(each.x), dy=own(each.dy)) for each in pending]
