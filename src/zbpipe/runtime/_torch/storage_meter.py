"""Bytes of tensors that a piece of code leaves alive, and their peak, on the CPU and the meta device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts from 0 at its entry. Older tensors are not counted.

    It sees the result of every operator, counts each storage once, and subtracts it when the storage is freed.
    Temporary memory inside a kernel is not counted.
    """

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
