"""Weight gradients from the backwards of autograd Functions: compiled graphs, torchao's, and those that users declare.

I runs the Function's own backward, without the products that only a weight gradient needs. W runs these, with the same
kernels on the same operands. The backward of any other Function may have side effects, so it runs as a whole in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from zbpipe.runtime._torch import autograd, compiler
from zbpipe.runtime.split import compiled_backward, lazy_products, sources
from zbpipe.runtime.split.compiled_backward import PlainGradient, Postponed
from zbpipe.runtime.split.deferral import Deferral
from zbpipe.runtime.split.products import NONE, ExtraArguments, PendingGradient, Target, WeightProduct, add_product


def watch(deferral: Deferral, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`run(*args, **kwargs)`. Known Functions between its arguments and its result defer weight gradients."""
    deferral.has_run = True
    if not deferral.may_call_functions:
        return run(*args, **kwargs)
    output = compiler.call(compiled_backward.compile_in_parts, run, args, kwargs)
    if deferral.gradients.are_whole:
        return output
    node = output.grad_fn if type(output) is Tensor else None
    known = deferral.known.get(type(node))
    if known is not None and known.fits(node, (*args, *kwargs.values())):
        lazy_products.replace_backward(node, known)
        return output
    for node in lazy_products.list_functions(autograd.tree_leaves(output), autograd.tree_leaves((args, kwargs))):
        function, weights = autograd.function_of(node), lazy_products.list_weights(node, deferral.owns_leaf)
        is_usable = lazy_products.is_compiled(node) or function in deferral.declared_functions
        if weights and (is_usable or sources.is_known(function)):
            deferral.calls_functions = True
            known = deferral.known[type(node)] = _Backward(deferral, node, weights)
            lazy_products.replace_backward(node, known)
            for each in weights:
                sources.let_pass_nothing(each.edge.node)
    return output


class _Backward:
    def __init__(self, deferral: Deferral, node: Node, weights: Sequence[lazy_products.Weight]) -> None:
        self.deferral = deferral
        self.weights = weights
        self._memory = lazy_products.list_memory(each.leaf for each in weights)
        own = {each.number for each in weights}
        self._sources = [each if number in own else None for number, (each, _) in enumerate(node.next_functions)]
        self._targets = [(each, _find_target(each)) for each in weights]

    def fits(self, node: Node, inputs: Sequence[Any]) -> bool:
        """Whether `node` is of the same Function, with the same weights, and everything else comes from `inputs`."""
        made = [each.grad_fn for each in inputs if isinstance(each, Tensor)]
        return all(
            source is known
            if known is not None
            else source is None or source in made or hasattr(source, "variable")  # a leaf
            for (source, _), known in zip(node.next_functions, self._sources, strict=True)
        )

    def __call__(self, node: Node, gradients: Sequence[Any]) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or self.deferral.gradients.recording is None:
            return lazy_products.run_own_backward(node, gradients)
        returned = list(self._run(node, gradients))
        late = [each for each in self._targets if type(returned[each[0].place]) is Postponed]
        if late:
            self._defer_region(late, returned)
        for weight, target in self._targets:
            gradient = returned[weight.place]
            if gradient is None or type(gradient) is Tensor or not lazy_products.holds_lazy(gradient):
                continue
            pending = self._find_pending(gradient, target)
            if pending is not None and not self.deferral.is_due_now(pending, weight.edge.node):
                returned[weight.place] = None
        # Quickly for those that are there.
        return tuple(
            [each if each is None or type(each) is Tensor else lazy_products.compute(each) for each in returned]
        )

    def _defer_region(self, late: Sequence[tuple[lazy_products.Weight, Target]], returned: list[Any]) -> None:
        postponed = [returned[weight.place] for weight, _ in late]
        region = _PendingRegion(self.deferral.layer, [target for _, target in late], postponed)
        for weight, _ in late:
            returned[weight.place] = None
        if self.deferral.defer_all(region, [(weight.edge.node, weight.leaf) for weight, _ in late]):
            return
        for (weight, _), part in zip(late, region.parts, strict=True):
            if self.deferral.is_due_now(part, weight.edge.node):
                returned[weight.place] = part.gradient()

    def _run(self, node: Node, gradients: Sequence[Any]) -> tuple[Any, ...]:
        if lazy_products.is_compiled(node):
            compiled_backward.defers = True
            try:
                return lazy_products.run_own_backward(node, gradients)
            finally:
                compiled_backward.defers = False
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

    def _find_pending(self, gradient: Any, target: Tensor | GradientEdge) -> PendingGradient | None:
        """What W needs to compute the gradient; None if it has to be computed now."""
        if gradient.shape != sources.find_shape(target):  # autograd sums what is larger
            return None
        recipe = lazy_products.Recipe(gradient, self._memory)
        # W cannot if it needs a weight that FSDP may free before.
        if not recipe.flops or (recipe.weights and self.deferral.is_sharded) or len(recipe.tensors) < 2:
            return None
        x, dy, *more = recipe.tensors
        layer, product = self.deferral.layer, _Replay(recipe)
        return PendingGradient(layer, product, target, x, dy, NONE, tuple(more), flops=recipe.flops)


class _PendingRegion(PendingGradient):
    """The postponed gradients of a region: one object in place of many, because autograd waits."""

    def __init__(self, layer: nn.Module, targets: Sequence[Target], postponed: Sequence[Postponed]) -> None:
        first, dy, *more = postponed[0].factors
        flops = sum([each.product.flops for each in postponed])
        super().__init__(layer, postponed[0].product, targets[0], first, dy, NONE, tuple(more), flops=flops)
        self._own = [(target, each.product) for target, each in zip(targets, postponed, strict=True)]

    @property
    def parts(self) -> Sequence[PendingGradient]:
        return [self._part(*each) for each in self._own]

    def _part(self, target: Target, product: PlainGradient) -> PendingGradient:
        x, dy, *more = [self.tensors[place] for place in product.factors]
        part = PendingGradient(self.layer, product, target, x, dy, NONE, tuple(more), flops=product.flops)
        part.may_fuse, part.fsdp_sums = self.may_fuse, self.fsdp_sums
        return part

    def name_where(self, marks: Iterable[bool]) -> str:
        changed = [*marks]
        own = [[changed[place] for place in product.factors] for _, product in self._own]
        named = (part.name_where(each) for part, each in zip(self.parts, own, strict=True))
        return " and ".join(dict.fromkeys(filter(None, named)))

    def accumulate(self) -> None:
        tensors = self.tensors
        for target, product in self._own:
            if self.may_fuse and product.as_matrices is not None and isinstance(target, Tensor):
                x, dy = product.factors
                if add_product(target, self.find_sum(target), *product.as_matrices(tensors[dy], tensors[x])):
                    continue
            self._part(target, product).accumulate()


def _find_target(weight: lazy_products.Weight) -> Tensor | GradientEdge:
    is_leaf = getattr(weight.edge.node, "variable", None) is weight.leaf and type(weight.leaf) in sources.PLAIN
    found: Tensor | GradientEdge = weight.leaf if is_leaf else weight.edge
    return found


class _Replay(WeightProduct):
    """The products of a Function's backward for one weight."""

    def __init__(self, recipe: lazy_products.Recipe) -> None:
        super().__init__()
        self._run, recipe.tensors = recipe.run, []

    def of_weight(self, dy: Tensor, x: Tensor, extra: ExtraArguments = NONE, tensors: Sequence[Tensor] = ()) -> Tensor:
        return self._run((x, dy, *tensors))
