"""Shapes of the messages of a step: functions of the shapes of each microbatch's input, learned from earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Shapes = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each tensor of a microbatch."""
_ENOUGH = 4
"""Number of samples that a line has to fit: two determine it, the others confirm it."""


def describe(values: Iterable[Any]) -> Shapes:
    """Shapes of the tensors among these values; of DTensors those of the whole tensor."""
    return tuple((tuple(each.shape), str(each.dtype)[6:]) for each in values if isinstance(each, Tensor))


def describe_inputs(values: Iterable[Any]) -> Shapes:
    """Shapes of the tensors among a rank's inputs; of DTensors those of the local part."""
    return describe(each.to_local() if isinstance(each, DTensor) else each for each in values)


def freeze(value: Any) -> Any:
    """Lists as tuples, also inside, as JSON has none."""
    return tuple(map(freeze, value)) if isinstance(value, list) else value


def write(shapes: Shapes) -> str:
    return ", ".join(str(shape) for shape, _ in shapes)


def cut(name: str, value: Any, tokens: Sequence[int]) -> Sequence[Any]:
    """A batch's value for each microbatch: parts with these numbers of `tokens`, along the first dimension of that
    length. Values that are no tensor go to all microbatches."""
    if not isinstance(value, Tensor) or not value.dim():
        return [value] * len(tokens)
    if (total := sum(tokens)) not in value.shape:
        raise ValueError(
            f"microbatches={[*tokens]} are {total} tokens, and {name} of shape {tuple(value.shape)} has no dimension of"
            " that length: give as many tokens, or a list with a value for each microbatch (arg_mbs, kwarg_mbs,"
            " target_mbs)"
        )
    return torch.split(value, [*tokens], value.shape.index(total))


def cut_batch(
    args: Sequence[Any], target: Any, kwargs: Mapping[str, Any], tokens: Sequence[int], others: Set[str]
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Inputs, keyword inputs and targets of each microbatch; and the keyword arguments among `others`."""
    inputs = [cut(f"input {number}", each, tokens) for number, each in enumerate(args)]
    named = {name: cut(name, each, tokens) for name, each in kwargs.items() if name not in others}
    by_microbatch = (
        [tuple(each[n] for each in inputs) for n in range(len(tokens))],
        [{name: each[n] for name, each in named.items()} for n in range(len(tokens))],
        None if target is None else [*cut("target", target, tokens)],
    )
    return by_microbatch, {name: each for name, each in kwargs.items() if name in others}


class ShapeFunction:
    """The shapes at one boundary between stages, of the shapes of the input. Both ends of a boundary learn the same
    samples, so both know the same.

    Each dimension is constant, or a linear function of one dimension, or of a tensor's number of elements.

        >>> function = ShapeFunction()
        >>> for tokens in (3, 5, 6, 9):
        ...     function.learn((((tokens,), "int64"),), (((1, tokens, 8), "float32"),))
        >>> function((((7,), "int64"),))
        (((1, 7, 8), 'float32'),)
    """

    def __init__(self) -> None:
        self._seen: dict[Shapes, Shapes] = {}
        self._known: dict[Shapes, Shapes | None] = {}
        """Answers since the last sample."""
        self._noted: dict[int, tuple[Shapes, Shapes]] = {}
        """Samples of the running step by microbatch. Both ends learn them in this order after the step."""

    def note(self, microbatch: int, inputs: Shapes, found: Shapes) -> None:
        self._noted[microbatch] = inputs, found

    def find_noted(self, inputs: Shapes) -> Shapes | None:
        return next((found for each, found in self._noted.values() if each == inputs), None)

    def learn_noted(self) -> None:
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        for _, sample in sorted(noted.items()):
            self.learn(*sample)

    def learn(self, inputs: Shapes, found: Shapes) -> None:
        if self._seen.get(inputs, found) != found:  # stages were replaced, or evaluate in another way
            self._seen.clear()
            self._known.clear()
        if inputs not in self._seen:
            self._seen[inputs] = found
            self._known.clear()

    def __call__(self, inputs: Shapes) -> Shapes | None:
        """The shapes for this input; None if unknown."""
        if inputs not in self._known:
            self._known[inputs] = self._seen.get(inputs) or self._predict(inputs)
        return self._known[inputs]

    def _predict(self, inputs: Shapes) -> Shapes | None:
        samples = [each for each in self._seen.items() if _kind(each[0]) == _kind(inputs)]
        if len(samples) < _ENOUGH or len({_kind(found) for _, found in samples}) > 1:
            return None
        columns, new = [*zip(*(_features(each) for each, _ in samples), strict=True)], _features(inputs)
        if any(len({*column}) == 1 and column[0] != value for column, value in zip(columns, new, strict=True)):
            return None
        tensors = []
        for number, (shape, dtype) in enumerate(samples[0][1]):
            dims = [_extend(columns, [found[number][0][dim] for _, found in samples], new) for dim in range(len(shape))]
            tensors.append((tuple(dims), dtype))
        known = tuple((tuple(dim for dim in dims if dim is not None), dtype) for dims, dtype in tensors)
        return known if _kind(known) == _kind(samples[0][1]) else None


def _kind(shapes: Shapes) -> tuple[tuple[int, str], ...]:
    return tuple((len(shape), dtype) for shape, dtype in shapes)


def _features(inputs: Shapes) -> list[int]:
    return [each for shape, _ in inputs for each in (*shape, prod(shape))]


def _extend(columns: Sequence[Sequence[int]], found: Sequence[int], new: Sequence[int]) -> int | None:
    """A dimension for a `new` input, on the lines through what was `found`; None if there is none, or two disagree."""
    if len({*found}) == 1:
        return found[0]
    answers = set[tuple[int, int]]()
    for column, value in zip(columns, new, strict=True):
        other = next((n for n, each in enumerate(column) if each != column[0]), None)
        if other is None:
            continue
        run, rise = column[other] - column[0], found[other] - found[0]
        pairs = zip(column, found, strict=True)
        if all((y - found[0]) * run == (x - column[0]) * rise for x, y in pairs):
            answers.add(divmod((value - column[0]) * rise, run))
    (whole, rest), *others = answers or {(0, 1)}
    return None if rest or others or found[0] + whole < 0 else found[0] + whole


@dataclass
class StepShapes:
    """The shapes of the messages of one step, whose microbatches differ from torch's setup or from each other."""

    inputs: Sequence[Shapes]
    """Of the pipeline's input, by microbatch."""
    give: Callable[[str, Shapes], None]
    """Tells another rank shapes that it cannot know."""
    take: Callable[[str, int], Shapes]
    """Waits for shapes that a stage's rank tells."""
