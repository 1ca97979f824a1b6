"""A tensor's data: its memory, its holders, its changes, and its content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes


def version_of(tensor: Tensor) -> int:
    return tensor._version


def versions_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple([each._version for each in tensors])


def without_base(output: Tensor) -> Tensor:
    """An autograd Function's output that can be changed in place."""
    # Before torch 2.15 `F.linear` returns a view for three-dimensional inputs with a bias. Autograd refuses in-place
    # changes of a Function's view.
    return output.data if output._is_view() else output


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, to read and write without collectives."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, so that NaN is an ordinary number."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])
    # In a 64-bit sum the signs of an even number of elements would cancel out.
    return bits ^ (bits >> 31) if bits.dtype is torch.int64 else bits


HIDDEN = -(1 << 63)
"""The fingerprint of tensors with hidden content, such as results of pending collectives."""


def fingerprint(tensor: Tensor) -> Tensor:
    """A checksum on the device; `HIDDEN` for tensors with hidden content."""
    tensor = own_part(tensor).detach()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return torch.full((), HIDDEN, dtype=torch.int64, device=tensor.device)
    by_place = _bits(tensor)  # sums of integers do not depend on the order of the summation
    if by_place.dim() > 1 and by_place.numel() > _FEW:
        columns = by_place.sum(tuple(range(by_place.dim() - 1)), dtype=torch.int64)
        by_place = torch.cat([columns, by_place.sum(-1, dtype=torch.int64).flatten()])
    number = by_place.numel()
    factors = _FACTORS[:number] if tensor.is_cpu and number <= _FEW else _make_factors(number, tensor.device)
    return (by_place.flatten() * factors).sum()


_FEW = 1 << 12
"""Largest number of elements with a factor for each."""


def _make_factors(number: int, device: torch.device) -> Tensor:
    """A different factor per element, or per row and column, so that exchanged numbers change the sum."""
    factors = torch.arange(1, number + 1, device=device) * -7046029254386353131
    return factors ^ (factors >> 29)


with _disable_current_modes():  # a job may import this among fake tensors
    _FACTORS = _make_factors(_FEW, torch.device("cpu"))


def is_expanded(tensor: Tensor) -> bool:
    """Whether a tensor is larger than its memory. torch refuses to write into those."""
    storage = find_storage(tensor)
    return storage is not None and storage.nbytes() < tensor.nbytes


def find_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's memory; None if the tensor hides it, as results of pending collectives do."""
    tensor = own_part(tensor)
    return tensor.untyped_storage() if type(tensor) is Tensor and tensor.layout is torch.strided else None


def group_by_storage(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage | None, list[Tensor]]]:
    """Each memory with its tensors. Tensors that hide theirs are groups of their own."""
    groups: dict[int, tuple[torch.UntypedStorage | None, list[Tensor]]] = {}
    for each in {id(each): each for each in tensors}.values():
        storage = find_storage(each)
        groups.setdefault(id(each) if storage is None else storage._cdata, (storage, []))[1].append(each)
    return list(groups.values())


def has_others(storage: torch.UntypedStorage, own: Iterable[Tensor]) -> bool:
    """Whether others hold this memory of `own`: other tensors, or users outside of torch, such as NumPy."""
    # A view keeps its base alive.
    known = {id(each) for tensor in map(own_part, own) for each in (tensor, tensor._base) if each is not None}
    return not storage.resizable() or count_holders(storage) > len(known)


def is_alone(tensor: Tensor) -> bool:
    """Whether a plain tensor needs all of its memory, and nothing else holds it, as far as torch counts."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    is_alone = torch._C._storage_Use_Count(storage._cdata) == 1 + _ASKING
    return is_alone and storage.resizable() and storage.nbytes() == tensor.nbytes


def count_holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata)) - _ASKING


def _count_asking() -> int:
    alone = torch.empty(1)
    return int(torch._C._storage_Use_Count(alone.untyped_storage()._cdata)) - 1


_ASKING = _count_asking()
"""The Python object of a storage, which counts as a holder."""


def find_grad_dtype(weight: Tensor, gradient: Tensor) -> torch.dtype:
    """The dtype in which autograd accumulates `gradient` of `weight`."""
    # FSDP2 sets `grad_dtype` to get wider gradients. None means the gradient's own dtype. torch before 2.13 lacks it.
    return cast(torch.dtype, getattr(weight, "grad_dtype", weight.dtype) or gradient.dtype)


def identify_view(tensor: Tensor) -> tuple[int, int] | None:
    """The viewed tensor, by its id, and the place where the view begins; None if it is no view."""
    base = tensor._base
    return None if base is None else (id(base), int(tensor.storage_offset()))


def base_of(tensor: Tensor) -> Tensor | None:
    return tensor._base


def storage_of(tensor: Tensor) -> int:
    """A key of the tensor's storage."""
    return int(tensor.untyped_storage()._cdata)
