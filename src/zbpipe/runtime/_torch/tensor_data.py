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


def _local(tensor: Tensor) -> Tensor:
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
    tensor = _local(tensor).detach()
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


def find_memory(tensor: Tensor) -> tuple[int | None, int, int, bool]:
    """A tensor's storage, the number of holders that the tensor counts as, the storage's bytes, and whether only torch
    has it: neither lent to nor borrowed from others such as NumPy."""
    # A view keeps its base alive, so it counts as two. No storage for tensors that hide it, such as results of pending
    # collectives.
    tensor = tensor if type(tensor) is Tensor else _local(tensor)
    number = 1 if tensor._base is None else 2
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None, number, 0, True
    storage = tensor.untyped_storage()
    return storage._cdata, number, storage.nbytes(), storage.resizable()


def is_alone(tensor: Tensor) -> bool:
    """Whether a plain tensor needs all of its memory, and nothing else holds it, as far as torch counts."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    is_alone = torch._C._storage_Use_Count(storage._cdata) == 1 + _ASKING
    return is_alone and storage.resizable() and storage.nbytes() == tensor.nbytes


def list_holders(tensor: Tensor) -> list[Tensor]:
    """Tensors that hold the memory of `tensor`: itself and its base. Empty unless it is a plain tensor."""
    if type(tensor) is not Tensor:
        return []
    return [tensor] if tensor._base is None else [tensor, tensor._base]


def count_holders(storage: int) -> int:
    return int(torch._C._storage_Use_Count(storage)) - _ASKING


def _count_asking() -> int:
    alone = torch.empty(1)
    return int(torch._C._storage_Use_Count(alone.untyped_storage()._cdata)) - 1


_ASKING = _count_asking()
"""The extra Python object of `find_memory`, which counts as a holder."""


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
    """The key of the tensor's storage, as in `find_memory`."""
    return int(tensor.untyped_storage()._cdata)
