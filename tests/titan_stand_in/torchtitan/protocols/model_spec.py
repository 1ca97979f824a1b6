from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class ModelSpec:
    model: Any
    pipelining_fn: Callable[..., Any] | None
    parallelize_fn: Callable[..., Any]

    def traverse(self, kind: type) -> Iterator[tuple[Any, ...]]:
        return iter(())
