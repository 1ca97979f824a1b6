"""Module state besides parameters and buffers: counters in containers and objects, and tensors in those.

A forward may count in a dict, a list, a deque or a custom object. To rerun it from the same state, their contents are
restored in place, so that other references stay valid.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 10_000
"""Containers with more entries get their entries back, but not the contents of these."""
_MOST_OBJECTS = 100_000
"""Limit of visited objects; the rest is not restored."""
_MOST_BYTES = 1 << 24
"""Limit of an array's bytes: larger ones are data sets rather than counters."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size)

PutBack = Callable[[], object]


class Contents:
    """Snapshot of all module contents, found from their attributes at any depth."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = list(modules)
        self.tensors: list[Tensor] = []
        """Tensors in attributes and containers. The caller keeps their values."""
        self._put_back: list[PutBack] = []
        self._packages = {_find_package(type(part)) for part in parts}
        # Keeps visited objects alive, so that no id is reused meanwhile.
        self._seen: dict[int, object] = {id(part): part for part in parts}
        waiting: list[object] = []
        for part in parts:
            waiting += [value for name, value in vars(part).items() if name not in _KEPT_ELSEWHERE]
        for kind in {kind for part in parts for kind in type(part).__mro__ if self._is_users(kind)}:
            waiting += self._keep_class(kind)
        while waiting and len(self._seen) < _MOST_OBJECTS:
            value = waiting.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting += self._keep(value)

    def put_back(self) -> None:
        """Restore all but the values of tensors."""
        for each in self._put_back:
            each()

    def _keep(self, value: Any) -> Iterable[object]:
        """Record the contents of `value`; returns the objects in it."""
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors.append(value)
            return ()
        if put_back := _keep_generator(value) or _keep_array(value):
            self._put_back.append(put_back)
            return ()
        for kind, keep in _CONTAINERS.items():
            if isinstance(value, kind):
                entries, put_back = keep(value)
                self._put_back.append(put_back)
                return entries if len(entries) <= _MOST else ()
        if isinstance(value, (tuple, frozenset)):
            return value if len(value) <= _MOST else ()
        if isinstance(value, (nn.Module, SimpleNamespace)) or self._is_users(type(value)):
            return self._keep_object(value)
        return ()

    def _is_users(self, kind: type) -> bool:
        """Whether a class belongs to user code, or to the package of one of the modules."""
        # An object of another package, such as a logger, may be in use by other threads.
        package = _find_package(kind)
        if package in ("torch", "zbpipe") or package in sys.stdlib_module_names:
            return package == "__main__"
        if package in self._packages or dataclasses.is_dataclass(kind):
            return True
        file = getattr(sys.modules.get(package), "__file__", None)
        return file is not None and "site-packages" not in file and "dist-packages" not in file

    def _keep_object(self, value: Any) -> Iterator[object]:
        names = [each for kind in type(value).__mro__ for each in vars(kind).values()]
        for slot in (each for each in names if isinstance(each, MemberDescriptorType) and each.__name__ != "__dict__"):
            try:
                held = slot.__get__(value)
            except AttributeError:  # it has no value yet
                continue
            with suppress(AttributeError, TypeError):  # those of classes in C may be read-only
                slot.__set__(value, held)
                self._put_back.append(partial(slot.__set__, value, held))
            yield held
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            _, put_back = _keep_mapping(own)
            self._put_back.append(put_back)
            is_module = isinstance(value, nn.Module)  # a module that no other module registers
            yield from (held for name, held in own.items() if not (is_module and name == "_parameters"))

    def _keep_class(self, kind: type) -> Iterator[object]:
        """Plain attributes of a class, such as a counter of all its instances."""
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__"):
                self._put_back.append(partial(_put_attribute, kind, name, value))
                yield value


_KEPT_ELSEWHERE = {"_parameters", "_buffers", "_modules"}
"""Attributes restored elsewhere: FSDP swaps parameters between F and I, and `State` keeps buffers."""


def _find_package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _put_attribute(owner: type, name: str, value: object) -> None:
    if vars(owner).get(name, owner) is not value:
        setattr(owner, name, value)


Kept = tuple[list[object], PutBack]
"""The contents of a container, and a function that restores them."""


def _keep_mapping(value: Any) -> Kept:
    # Not through methods of a subclass: `Counter.update` adds, and a user's may do anything.
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    before = list(kind.items(value))

    def put_back() -> None:
        now = list(kind.items(value))
        if not _are_same([each for pair in now for each in pair], [each for pair in before for each in pair]):
            kind.clear(value)
            for name, each in before:
                kind.__setitem__(value, name, each)

    return [each for _, each in before], put_back


def _keep_entries(kind: Any, fill: Callable[[Any, list[object]], None], value: Any) -> Kept:
    before = list(kind.__iter__(value))

    def put_back() -> None:
        if not _are_same(kind.__iter__(value), before):
            kind.clear(value)
            fill(value, before)

    return before, put_back


_CONTAINERS: dict[type, Callable[[Any], Kept]] = {
    dict: _keep_mapping,
    list: partial(_keep_entries, list, list.extend),
    deque: partial(_keep_entries, deque, deque.extend),
    set: partial(_keep_entries, set, set.update),
}


def _are_same(one: Iterable[object], other: Iterable[object]) -> bool:
    """Whether both yield identical objects."""
    return [*map(id, one)] == [*map(id, other)]


def _keep_array(value: Any) -> PutBack | None:
    numpy = sys.modules.get("numpy")
    if isinstance(value, (bytearray, array)):
        return partial(value.__setitem__, slice(None), value[:])
    if numpy is not None and isinstance(value, numpy.ndarray) and value.flags.writeable and value.nbytes <= _MOST_BYTES:
        return partial(value.__setitem__, ..., value.copy())
    return None


def _keep_generator(value: Any) -> PutBack | None:
    """The function that restores a module's own random number generator; None for other values."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def keep_shared_generators() -> Iterator[PutBack]:
    """Functions that restore the global generators of Python and numpy."""
    yield partial(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        yield partial(numpy.random.set_state, numpy.random.get_state())
