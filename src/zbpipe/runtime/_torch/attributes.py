"""Attributes of users' modules: read without running user code, and replaced temporarily.

A property, a parametrization or a `__getattr__` may draw random numbers, count, or raise. So only attributes with plain
values are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper


def plain_attribute(owner: object, name: str, default: Any = None) -> Any:
    """The plain attribute `name` of `owner` or of its class; `default` if there is none, or if reading it runs code.

    >>> class Layer:
    ...     top_k = 2
    ...     @property
    ...     def weight(self):
    ...         raise RuntimeError
    >>> plain_attribute(Layer(), "top_k"), plain_attribute(Layer(), "weight"), plain_attribute(Layer(), "bias", 0)
    (2, None, 0)
    """
    found = inspect.getattr_static(owner, name, default)
    return default if hasattr(type(found), "__get__") else found


def declares(owner: object, name: str) -> bool:
    return inspect.getattr_static(owner, name, _MISSING) is not _MISSING


_MISSING = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Context in which `owner` (an object or a module) has these attributes."""
    for name in attributes:  # an attribute that it lacked would have no reader
        if name not in vars(owner) and not hasattr(type(owner), name):
            raise AttributeError(f"{owner!r} has no attribute {name!r} to replace")
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - before.keys():
            del vars(owner)[name]
        vars(owner).update(before)


def find_checkpointed(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Modules under `checkpoint_wrapper`, at any depth, each with whether a policy (`context_fn`) keeps activations."""
    wrappers = [each for each in module.modules() if isinstance(each, CheckpointWrapper)]
    return [
        (each._checkpoint_wrapped_module, "context_fn" in getattr(each.checkpoint_fn, "keywords", {}))
        for each in wrappers
    ]
