"""The arguments of a product after x and the weight. autograd saves the tensors among them, as it saves x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zbpipe.runtime.split.lazy_products import map_leaves


class ExtraArguments(NamedTuple):
    """The arguments of a product after x and the weight, without the tensors among them: autograd saves those."""

    values: tuple[Any, ...] = ()
    """`TENSOR` in the places of tensors, also within lists, tuples and dictionaries."""
    names: tuple[str, ...] = ()
    """Names of the last values, which are keyword arguments."""

    def fill_in(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with `tensors` in their places."""
        left = iter(tensors)
        values = map_leaves(self.values, lambda leaf: next(left) if leaf is TENSOR else leaf)
        by_position = len(values) - len(self.names)
        return values[:by_position], dict(zip(self.names, values[by_position:], strict=True))


NONE = ExtraArguments()
TENSOR = "tensor"


def separate_tensors(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[ExtraArguments, list[Tensor]]:
    """Extra arguments of a product without tensors, and the tensors in order. None at the end or by name, such as a
    missing bias, is left out."""
    tensors: list[Tensor] = []
    options = {name: each for name, each in options.items() if each is not None}
    while args and args[-1] is None:
        args = args[:-1]

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            return TENSOR
        return leaf

    return ExtraArguments(map_leaves((*args, *options.values()), take), tuple(options)), tensors


def swap(value: Any, known: Mapping[int, Tensor]) -> Any:
    """`value` with other tensors in the places of those with these ids, also within lists, tuples and dictionaries."""
    return map_leaves(value, lambda leaf: known.get(id(leaf), leaf))


def with_factors_first(args: Sequence[Any], options: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a product with x and the weight by position, even if they were keyword arguments."""
    if len(args) > 1:
        return args, options
    for place, names in enumerate(_FACTORS):
        given = [name for name in names if name in options]
        if len(args) == place and len(given) == 1:
            args = (*args, options[given[0]])
            options = {name: each for name, each in options.items() if name != given[0]}
    return args, options


_FACTORS = (("input", "self", "mat_a"), ("weight", "mat2", "other", "mat_b"))
"""torch's names of x and the weight in its products."""
