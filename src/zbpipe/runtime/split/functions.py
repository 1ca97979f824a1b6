"""Weight gradients from the backwards of autograd Functions: compiled graphs, and others' such as torchao's.

I runs the Function's own backward, without the products that only a weight gradient needs. W runs these: the same
kernels on the same operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from zbpipe.runtime._torch import autograd, compiled_backward, later
from zbpipe.runtime.split.further import NONE, Further
from zbpipe.runtime.split.products import PendingGradient, WeightProduct

if TYPE_CHECKING:
    from zbpipe.runtime.split.layers import Deferral


class Functions:
    """The autograd Functions that a layer or a compiled region calls with its weights."""

    def __init__(self) -> None:
        self.may_be_called = True
        """Whether the layer may call any. Known after its first step."""
        self.found: set[type] = set()
        self.numbers: dict[type, frozenset[int]] = {}
        """Numbers of the products that can wait, in the backward of each kind of node that has had one."""

    def watch(self, deferral: Deferral, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)`; all Functions between its arguments and its result defer their weight gradients."""
        if not self.may_be_called:
            return run(*args, **kwargs)
        with compiled_backward.cut_backwards():
            output = run(*args, **kwargs)
        for node in later.list_functions(autograd.tree_leaves(output), autograd.tree_leaves((args, kwargs))):
            weights = later.list_weights(node, deferral.owns_leaf)
            if weights and self.numbers.get(type(node)) != frozenset():
                self.found.add(type(node))
                later.replace_backward(node, _Backward(self, deferral, weights))
                for each in weights:
                    autograd.let_pass_nothing(each.edge.node)
        return output

    def settle(self) -> None:
        """Look for no more Functions after a step without any whose products can wait."""
        self.may_be_called = any(self.numbers.get(each) != frozenset() for each in self.found)

    @property
    def names(self) -> frozenset[str]:
        """Names of the Functions found."""
        return frozenset(each.__name__.removesuffix("Backward") for each in self.found)


class _Backward:
    """Runs the backward of one node."""

    def __init__(self, functions: Functions, deferral: Deferral, weights: Sequence[later.Weight]) -> None:
        self._functions = functions
        self.deferral = deferral
        self.weights = weights
        self._memory = later.list_memory(each.leaf for each in weights)

    def __call__(self, node: Node, gradients: Sequence[Any]) -> tuple[Any, ...]:
        numbers = self._functions.numbers.get(type(node))
        if numbers == frozenset() or torch.is_grad_enabled() or not self.deferral.gradients.is_recording:
            return later.run_own_backward(node, gradients)
        if later.is_compiled(node):
            with compiled_backward.deferring(is_trial=numbers is None):
                returned = later.run_own_backward(node, gradients)
            if numbers is None:
                numbers = self._learn(node, returned)
        else:
            returned, numbers = self._run_without_products(node, gradients, numbers)
        kept = list(returned)
        for weight in self.weights:
            gradient = returned[weight.place]
            if later.holds_later(gradient) and self._defer(gradient, weight, numbers):
                kept[weight.place] = None
        return tuple(map(later.compute, kept))

    def _run_without_products(
        self, node: Node, gradients: Sequence[Any], numbers: frozenset[int] | None
    ) -> tuple[tuple[Any, ...], frozenset[int]]:
        """The gradients that the backward returns, and the numbers of the products that can wait."""
        context = later.Context(node)
        mode = later.LaterProducts(numbers)
        inner: list[PendingGradient] = []
        try:
            with self.deferral.gradients.collect(inner), mode:
                returned = later.run_own_backward(node, gradients, context)
            if numbers is None:
                numbers = self._learn(node, returned)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: it may read a tensor in a way that no `Later` allows
            self._functions.numbers[type(node)] = frozenset()
            if inner or mode.has_seen_parameters:  # a second run would add those gradients again
                raise RuntimeError(
                    f"the backward of {node.name()} in a {type(self.deferral.layer).__name__} runs another backward and"
                    f" fails: {error}. If it does not without zbpipe, set weight_products = {{}} on this layer"
                ) from error
            return later.run_own_backward(node, gradients, context), frozenset()
        for each in inner:
            self.deferral.gradients.keep(each)
        return returned, numbers

    def _learn(self, node: Node, returned: Sequence[Any]) -> frozenset[int]:
        gradients = [returned[each.place] for each in self.weights]
        numbers = [self._try_out(each) for each in gradients if later.holds_later(each)]
        found = frozenset[int]().union(*numbers)
        self._functions.numbers[type(node)] = found
        return found

    def _try_out(self, gradient: Tensor) -> frozenset[int]:
        """Numbers of the products behind a weight gradient, if W can compute it: empty if it cannot."""
        # It cannot if the backward has written into an operand since, or reads a weight that FSDP may free before W.
        recipe = later.Recipe(gradient, self._memory)
        if recipe.is_read or (recipe.reads_weights and self.deferral.is_sharded):
            return frozenset()
        if isinstance(gradient, later.Later):
            again = recipe.run(recipe.tensors)
            if gradient.value is None or not autograd.same_content(again, gradient.value):
                return frozenset()
        return frozenset(recipe.numbers)

    def _defer(self, gradient: Tensor, weight: later.Weight, numbers: frozenset[int]) -> bool:
        """Whether W computes the gradient, or nobody."""
        if gradient.shape != autograd.find_shape(weight.edge):  # autograd sums what is larger
            return False
        recipe = later.Recipe(gradient, self._memory)
        if recipe.is_read or not recipe.numbers <= numbers:
            return False
        pending = _make_pending(self.deferral, recipe, weight)
        return pending is not None and not self.deferral.is_due_now(pending, weight.edge.node)


class _Replay(WeightProduct):
    """The products of a Function's backward for one weight."""

    def __init__(self, recipe: later.Recipe) -> None:
        # Made in I, where autograd waits: without a look at signatures.
        self.recipe = recipe
        matrices = recipe.as_matrices
        self.as_matrices = None if matrices is None else lambda dy, x: matrices(x, dy)

    def of_weight(self, dy: Tensor, x: Tensor, further: Further = NONE, tensors: Sequence[Tensor] = ()) -> Tensor:
        return self.recipe.run((x, dy, *tensors))


def _make_pending(deferral: Deferral, recipe: later.Recipe, weight: later.Weight) -> PendingGradient | None:
    target: Tensor | GradientEdge = weight.edge
    if getattr(weight.edge.node, "variable", None) is weight.leaf and type(weight.leaf) in autograd.PLAIN:
        target = weight.leaf
    product = _Replay(recipe)
    x, *rest = recipe.release_tensors()
    if not rest:
        return None
    dy, *more = rest
    inner = recipe.flops / 2 / max(dy.numel(), 1)
    return PendingGradient(deferral.layer, product, target, x, dy, NONE, tuple(more), inner=inner)
