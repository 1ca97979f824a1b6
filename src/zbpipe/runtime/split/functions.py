"""Weight gradients from the backwards of others' autograd Functions, such as torchao's for quantised training.

I runs the Function's own backward, without the products that only a weight gradient needs. W runs these: the same
kernels on the same operands, so that the gradients are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from zbpipe.runtime._torch import autograd, later
from zbpipe.runtime.split.further import NONE, Further
from zbpipe.runtime.split.products import PendingGradient, WeightProduct

if TYPE_CHECKING:
    from zbpipe.runtime.split.layers import Deferral

_Output = TypeVar("_Output")


class Functions:
    """The autograd Functions that a layer calls with its weights."""

    def __init__(self) -> None:
        self.may_be_called = True
        """Whether the layer may call any. Known after its first step."""
        self.found: set[type] = set()
        self._numbers: dict[type, frozenset[int]] = {}
        """Numbers of the products that can wait, in the backward of each kind of node."""

    def watch(self, deferral: Deferral, output: _Output, inputs: Any) -> _Output:
        """`output`, after all Functions between `inputs` and it were made to defer their weight gradients."""
        if not self.may_be_called:
            return output
        for node in later.list_functions(autograd.tree_leaves(output), autograd.tree_leaves(inputs)):
            leaves = later.list_leaves(node)
            places = tuple(n for n, leaf in enumerate(leaves) if leaf is not None and deferral.owns_leaf(leaf))
            if places and self._numbers.get(type(node)) != frozenset():
                self.found.add(type(node))
                later.replace_backward(node, _Backward(self, deferral, places))
                for place in places:
                    autograd.let_pass_nothing(node.next_functions[place][0])
        return output

    def settle(self) -> None:
        """Look for no more Functions after a step without any."""
        self.may_be_called = bool(self.found)

    @property
    def names(self) -> frozenset[str]:
        """Names of the Functions found."""
        return frozenset(each.__name__.removesuffix("Backward") for each in self.found)

    def find_numbers(self, kind: type) -> frozenset[int] | None:
        """Numbers of the products that can wait; None before the first backward."""
        return self._numbers.get(kind)

    def learn(self, kind: type, numbers: frozenset[int]) -> None:
        """Let the products with these numbers wait from now on."""
        self._numbers[kind] = numbers


class _Backward:
    """Runs the backward of one node."""

    def __init__(self, functions: Functions, deferral: Deferral, places: tuple[int, ...]) -> None:
        self._functions = functions
        self.deferral = deferral
        self.places = places
        """Places of the weights among the inputs."""

    def __call__(self, node: Node, gradients: Sequence[Any]) -> tuple[Any, ...]:
        numbers = self._functions.find_numbers(type(node))
        if numbers == frozenset() or torch.is_grad_enabled() or not self.deferral.gradients.is_recording:
            return later.run_own_backward(node, gradients)
        context = later.Context(node)
        try:
            with later.LaterProducts(numbers):
                returned = later.run_own_backward(node, gradients, context)
            if numbers is None:
                numbers = self._learn(node, returned)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of any kind: it may read a tensor in a way that no `Later` allows
            self._functions.learn(type(node), frozenset())
            return later.run_own_backward(node, gradients, context)
        return tuple(self._defer(node, place, each, numbers) for place, each in enumerate(returned))

    def _learn(self, node: Node, returned: Sequence[Any]) -> frozenset[int]:
        numbers = [_try_out(each, self._weights(node)) for each in self._list_candidates(returned)]
        found = frozenset[int]().union(*numbers)
        self._functions.learn(type(node), found)
        return found

    def _list_candidates(self, returned: Sequence[Any]) -> Iterator[later.Later]:
        return (returned[n] for n in self.places if isinstance(returned[n], later.Later))

    def _weights(self, node: Node) -> list[Tensor]:
        leaves = later.list_leaves(node)
        return [leaf for leaf in (leaves[n] for n in self.places) if leaf is not None]

    def _defer(self, node: Node, place: int, gradient: Any, numbers: frozenset[int]) -> Any:
        """What autograd gets for one input: None for a weight gradient that waits."""
        if not isinstance(gradient, later.Later):
            return gradient
        after, number = node.next_functions[place]
        if after is not None and place in self.places and not gradient.is_read:
            recipe = later.Recipe(gradient)
            if recipe.numbers <= numbers:
                pending = _make_pending(self.deferral, recipe, GradientEdge(after, number))
                if pending is not None and not self.deferral.is_due_now(pending, after):
                    return None
        return gradient.now()


def _try_out(gradient: later.Later, weights: Sequence[Tensor]) -> frozenset[int]:
    """Numbers of the products behind a weight gradient, if W can compute it: empty if it cannot."""
    # It cannot if the backward has written into an operand since, or if an operand is the memory of a weight, which
    # FSDP may free before W.
    recipe = later.Recipe(gradient)
    if gradient.is_read or gradient.value is None or later.list_memory(weights) & later.list_memory(recipe.tensors):
        return frozenset()
    again = recipe.run(recipe.tensors)
    return frozenset(recipe.numbers) if autograd.same_content(again, gradient.value) else frozenset()


class _Replay(WeightProduct):
    """The products of a Function's backward for one weight."""

    def __init__(self, recipe: later.Recipe) -> None:
        # Made in I, where autograd waits: without a look at signatures.
        self.recipe = recipe
        self.as_matrices = None

    def of_weight(self, dy: Tensor, x: Tensor, further: Further = NONE, tensors: Sequence[Tensor] = ()) -> Tensor:
        return self.recipe.run((x, dy, *tensors))


def _make_pending(deferral: Deferral, recipe: later.Recipe, target: GradientEdge) -> PendingGradient | None:
    x, *rest = recipe.release_tensors()
    if not rest:
        return None
    dy, *more = rest
    inner = recipe.flops / 2 / max(dy.numel(), 1)
    return PendingGradient(deferral.layer, _Replay(recipe), target, x, dy, NONE, tuple(more), inner=inner)
