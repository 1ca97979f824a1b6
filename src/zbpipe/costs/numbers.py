"""Numbers, lists and sizes as users give them, checked once and in their usual form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from math import inf
from typing import Any, NamedTuple, SupportsFloat, TypeVar

MOST = 1e100
"""Largest cost. No sum or product of such numbers is infinite."""

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


def is_amount(number: float) -> bool:
    return 0 <= number <= MOST


def amount(what: str, name: str, value: Any) -> float:
    refusal = f"{what} cannot have {name} = {value!r}: give a number from 0 to {MOST:g}"
    found = number(value, refusal)
    if not is_amount(found):
        raise ValueError(refusal)
    return found


def read_column(what: str, name: str, values: Any) -> tuple[float, ...]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array of numpy or torch
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} cannot have {name} = {values!r}: give one number for each stage, for example (1, 1)")
    return tuple(amount(what, name, value) for value in values)


def share(what: str, name: str, value: Any, least: float = -MOST) -> float:
    refusal = f"{what} cannot have {name} = {value!r}: give a number {'from 0 ' if not least else ''}up to 1"
    found = number(value, refusal)
    if not least <= found <= 1:
        raise ValueError(refusal)
    return found


def number(value: Any, refusal: str) -> float:
    """`value` as a float, infinite for huge integers. Else a TypeError with `refusal`."""
    if type(value) is float:  # the usual case; the checks below take 30 times as long
        return value
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        raise TypeError(refusal)
    try:
        return float(value)
    except TypeError:  # an array
        raise TypeError(refusal) from None
    except OverflowError:
        return inf


class Size(NamedTuple):
    """Size of a microbatch.

    >>> Size(tokens=5000, squares=4000**2 + 1000**2)
    Size(tokens=5000, squares=17000000)
    """

    tokens: float
    squares: float
    """Sum of its samples' squared lengths, to which the time of attention is proportional."""

    @classmethod
    def parse(cls, what: str, given: Any, length: float | None = None) -> Size:
        """The size for a pair, or for tokens in samples of this length (default: in one sample)."""
        refusal = (
            f"{what} cannot have a microbatch of size {given!r}: give its tokens, above 0, or a pair of its tokens and"
            " the sum of its samples' squared lengths, for example (5000, 4000**2 + 1000**2)"
        )
        tokens, *others = (number(each, refusal) for each in (given if isinstance(given, (tuple, list)) else [given]))
        squares = others or [tokens * (tokens if length is None else length)]
        if len(squares) != 1 or not all(0 < each <= MOST for each in (tokens, *squares)):
            raise ValueError(refusal)
        return cls(tokens, *squares)


def one_or_each(
    what: str, name: str, given: Any, count: int, each: str, read: Callable[[str, str, Any], float] = amount
) -> float | tuple[float, ...]:
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, (tuple, list)):
        return read(what, name, given)
    if len(given) != count:
        raise ValueError(f"{name} has to be one number, or one for each {each}: got {len(given)} for {count}")
    return tuple(read(what, name, value) for value in given)


def set_fields(instance: object, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
