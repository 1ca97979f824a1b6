"""Weight gradients from the backwards of autograd Functions: compiled graphs, torchao's, and those that users declare.

I runs the Function's own backward, without the products that only a weight gradient needs. W runs these, with the same
kernels on the same operands. The backward of any other Function may have side effects, so it runs as a whole in I.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from zbpipe.runtime._torch import autograd, compiler
from zbpipe.runtime.split import compiled_backward, lazy_products, sources
from zbpipe.runtime.split.products import NONE, ExtraArguments, PendingGradient, WeightProduct
from zbpipe.runtime.split.weight_gradients import WeightGradients


class Deferral(Protocol):
    """`zbpipe.runtime.split.deferral.Deferral` of the layer that calls the Functions."""

    layer: nn.Module
    gradients: WeightGradients
    is_sharded: bool

    def owns_leaf(self, leaf: Tensor | None) -> bool:
        """Whether this is a parameter of the layer's."""

    def is_due_now(self, pending: PendingGradient, *nodes: Node) -> bool:
        """Whether the gradient has to be computed now. Otherwise W computes it, or nobody."""


class Functions:
    """The autograd Functions that a layer or a compiled region calls with its weights."""

    def __init__(self, declared: frozenset[type]) -> None:
        self.declared = declared
        """Functions whose products zbpipe may defer, as the layer declares."""
        self.may_be_called = True
        """Whether the layer may call Functions whose products can wait. Known after its first step."""
        self.names: set[str] = set()
        """Names of the Functions called with the layer's weights."""
        self.called: set[type] = set()
        """Functions whose products can wait."""

    def watch(self, deferral: Deferral, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)`. Known Functions between its arguments and its result defer weight gradients."""
        if not self.may_be_called:
            return run(*args, **kwargs)
        with compiler.replace_compilation(compiled_backward.compile_in_parts):
            output = run(*args, **kwargs)
        if deferral.gradients.are_whole:
            return output
        for node in lazy_products.list_functions(autograd.tree_leaves(output), autograd.tree_leaves((args, kwargs))):
            weights = lazy_products.list_weights(node, deferral.owns_leaf)
            if not weights:
                continue
            function = autograd.function_of(node)
            self.names.add(function.__name__)
            if lazy_products.is_compiled(node) or function in self.declared or sources.is_known(function):
                self.called.add(function)
                lazy_products.replace_backward(node, _Backward(deferral, weights))
                for each in weights:
                    sources.let_pass_nothing(each.edge.node)
        return output

    def settle(self) -> None:
        """Stop the search for Functions after a step without any whose products can wait."""
        self.may_be_called = bool(self.called)


class _Backward:
    def __init__(self, deferral: Deferral, weights: Sequence[lazy_products.Weight]) -> None:
        self.deferral = deferral
        self.weights = weights
        self._memory = lazy_products.list_memory(each.leaf for each in weights)

    def __call__(self, node: Node, gradients: Sequence[Any]) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or self.deferral.gradients.recording is None:
            return lazy_products.run_own_backward(node, gradients)
        returned = list(self._run(node, gradients))
        for weight in self.weights:
            gradient = returned[weight.place]
            if lazy_products.holds_lazy(gradient) and self._defer(gradient, weight):
                returned[weight.place] = None
        return tuple(map(lazy_products.compute, returned))

    def _run(self, node: Node, gradients: Sequence[Any]) -> tuple[Any, ...]:
        if lazy_products.is_compiled(node):
            compiled_backward.mode.defers = True
            try:
                return lazy_products.run_own_backward(node, gradients)
            finally:
                compiled_backward.mode.defers = False
        try:
            return lazy_products.run_without_products(node, gradients, self.weights)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: it may read a tensor in a way that `LazyTensor` does not support
            # No second run without `LazyTensor`, because it may have written into tensors.
            kind, words = type(self.deferral.layer).__name__, str(error).rstrip(".")
            raise RuntimeError(
                f"the backward of {node.name()} in a {kind} fails: {words}. If it works without zbpipe, set"
                " weight_products = {} on this layer"
            ) from error

    def _defer(self, gradient: Tensor, weight: lazy_products.Weight) -> bool:
        """Whether W computes the gradient, or nobody."""
        target: Tensor | GradientEdge = weight.edge
        if getattr(weight.edge.node, "variable", None) is weight.leaf and type(weight.leaf) in sources.PLAIN:
            target = weight.leaf
        if gradient.shape != sources.find_shape(target):  # autograd sums what is larger
            return False
        recipe: lazy_products.Recipe | lazy_products.Postponed
        if isinstance(gradient, lazy_products.LazyTensor) and gradient.is_of_others_than(self._memory):
            recipe = lazy_products.Postponed(gradient)  # as a recipe, in less host time
        else:
            recipe = lazy_products.Recipe(gradient, self._memory)
        # W cannot if it needs a weight that FSDP may free before.
        if not recipe.flops or (recipe.weights and self.deferral.is_sharded) or len(recipe.tensors) < 2:
            return False
        product = _Replay(recipe)
        (x, dy, *more), recipe.tensors = recipe.tensors, []
        inner = recipe.flops / 2 / max(dy.numel(), 1)
        versions = tuple(recipe.versions)
        pending = PendingGradient(self.deferral.layer, product, target, x, dy, NONE, tuple(more), versions, inner=inner)
        return not self.deferral.is_due_now(pending, weight.edge.node)


class _Replay(WeightProduct):
    """The products of a Function's backward for one weight."""

    def __init__(self, recipe: lazy_products.Recipe | lazy_products.Postponed) -> None:
        # Made in I, where autograd waits: without a look at signatures.
        self.recipe = recipe
        matrices = recipe.as_matrices
        self.as_matrices = None if matrices is None else lambda dy, x: matrices(x, dy)

    def of_weight(self, dy: Tensor, x: Tensor, extra: ExtraArguments = NONE, tensors: Sequence[Tensor] = ()) -> Tensor:
        return self.recipe.run((x, dy, *tensors))
