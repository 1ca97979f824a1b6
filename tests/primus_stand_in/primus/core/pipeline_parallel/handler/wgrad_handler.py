"""Weight gradients in Primus (commit fd1eeab): layers put a function for each into the cache, and W calls them."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar


class WGradRunningCache:
    cache: ClassVar[dict[tuple[int, int], list[Callable[[], None]]]] = defaultdict(list)
    current: tuple[int, int] | None = None

    @classmethod
    def append(cls, function: Callable[[], None]) -> None:
        function() if cls.current is None else cls.cache[cls.current].append(function)

    @classmethod
    def is_empty(cls) -> bool:
        return not cls.cache


def run(node: Any, index: int, row: list[Any]) -> None:
    assert (node.mini_batch, node.chunk) in WGradRunningCache.cache
    for function in WGradRunningCache.cache.pop((node.mini_batch, node.chunk)):
        function()
