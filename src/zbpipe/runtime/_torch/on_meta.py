"""A layer on the meta device: ops that a GPU fuses, FLOPs of attention, and bytes of tensors, also on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zbpipe.runtime._torch.attributes import replaced

_FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`, which torch splits into products on the meta device."""
    result: Tensor = _FORWARD(query, key, value, attn_mask, True, dropout_p, is_causal)[0]
    return result


def _forward(query: Any, key: Any, value: Any, *more: Any, **_: Any) -> int:
    """FLOPs of q times k, and of the result times v; half of each under a causal mask."""
    batch, heads, length, width = query
    return int(batch * heads * length * key[2] * 2 * (width + value[3]) * _share(more, 3))


def _backward(grad: Any, query: Any, key: Any, value: Any, *more: Any, **_: Any) -> int:
    """FLOPs of recomputed scores, and of two products for each of the forward's two."""
    batch, heads, length, width = query
    return int(batch * heads * length * key[2] * 2 * (3 * width + 2 * value[3]) * _share(more, 7))


def _share(more: tuple[Any, ...], place: int) -> float:
    """0.5 if `is_causal`, the argument at this place after the value, is set; else 1. torch omits defaults."""
    return 0.5 if len(more) > place and more[place] else 1.0


def _grouped(one: Any, other: Any, *_: Any, **__: Any) -> int:
    """FLOPs of experts' products. Their groups of rows or columns add up to these sizes."""
    groups = one[0] if len(one) == len(other) == _WITH_GROUPS else 1
    return int(groups * 2 * one[-2] * one[-1] * other[-1])


_WITH_GROUPS = 3
"""Dimensions of a factor with a matrix for each group."""
OPERATIONS = {_FORWARD: _forward, _BACKWARD: _backward, torch.ops.aten._grouped_mm: _grouped}
"""FLOP formulas for torch's `FlopCounterMode(custom_mapping=...)`, which ignores causal masks and experts."""


class _Norm(torch.autograd.Function):
    """Shapes of a fused RMSNorm, which saves its input and one number per row. It computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _norm(input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`F.rms_norm`, which torch splits on the meta device, with copies in float32."""
    result: Tensor = _Norm.apply(input, weight)
    return result


@contextmanager
def fuse_on_meta() -> Iterator[None]:
    """Context in which attention and norms are one op each on the meta device, as on a GPU."""
    with replaced(F, scaled_dot_product_attention=_attention, rms_norm=_norm):
        yield


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts from 0 at its entry, without older tensors and without temporary memory inside a kernel. It sees the
    result of every operator, counts each storage once, and subtracts it when the storage is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Results may be arguments or views of arguments, also of arguments older than this meter.
        for storage in _list_storages((args, kwargs)):
            self._know(storage, 0)
        result = func(*args, **kwargs)
        for storage in _list_storages(result):
            self._know(storage, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def reset_peak(self) -> None:
        self.peak = self.live

    def count_bytes(self) -> tuple[int, int]:
        return self.live, self.peak

    def _know(self, storage: torch.UntypedStorage, size: int) -> None:
        # A storage has one Python object for its whole life, so the object's id and its end are the storage's.
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self.live += size
            weakref.finalize(storage, self._forget, id(storage), size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _list_storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
