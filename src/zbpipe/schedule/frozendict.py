"""A hashable, immutable mapping for frozen dataclasses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V_co = TypeVar("V_co", covariant=True)


class FrozenDict(Mapping[K, V_co]):
    """A copy of a mapping, equal to any mapping with the same items. It pickles, unlike `MappingProxyType`."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V_co]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: K) -> V_co:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._items!r})"
