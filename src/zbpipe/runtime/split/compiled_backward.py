"""Compiled backwards in parts: I's part, and one for each weight, or group of weights, whose gradients can wait.

torch's compiler gets the graph of a region's backward without the products that only weight gradients need. It returns
the factors of these products instead (see `zbpipe.runtime.split.graph_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from zbpipe.runtime._torch import compiler
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.autograd import function_of
from zbpipe.runtime.split.graph_parts import Part, cut_graph, list_made_from, results_of
from zbpipe.runtime.split.lazy_products import postpone
from zbpipe.runtime.split.products import NONE, ExtraArguments, WeightProduct
from zbpipe.runtime.split.sources import find_leaf


def compile_in_parts(module: Any, args: Sequence[Any], *more: Any, **options: Any) -> Any:
    """torch's compilation of a region, with its backward in two parts."""
    given = module.graph.find_nodes(op="placeholder") if isinstance(module, GraphModule) else ()
    examples = [getattr(node.meta.get("grapharg"), "example", None) for node in given]
    weights = {
        place
        for place, each in enumerate(examples)
        if isinstance(each, Tensor) and each.requires_grad and isinstance(find_leaf(each), nn.Parameter)
    }
    if weights:
        compile_graph = options.get("bw_compiler") or options["fw_compiler"]
        partition = options.get("partition_fn", compiler.default_partition)
        of_weights: set[str] = set()

        def find_weights(joint: GraphModule, *more: Any, **others: Any) -> Any:
            found = partition(joint, *more, **others)
            of_weights.update(each.name for each in list_made_from(joint.graph, weights))
            return found

        options["partition_fn"] = find_weights
        # Plain functions: for serializable ones, torch would take a whole backward from its cache.
        options["fw_compiler"] = partial(options["fw_compiler"])
        options["bw_compiler"] = lambda graph, inputs: _compile_backward(
            compile_graph, graph, inputs, weights, of_weights
        )
    return compiler.compile_whole(module, args, *more, **options)


def _compile_backward(
    compile_graph: Callable[..., Any],
    graph: GraphModule,
    inputs: Sequence[Any],
    weights: Collection[int],
    of_weights: Collection[str],
) -> Any:
    whole = deepcopy(graph)
    parts, number = cut_graph(graph, weights, of_weights)
    if not parts:
        return compile_graph(graph, inputs)
    metadata = compiler.find_metadata()
    given = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    returned = {given.get(node) for node in results_of(graph.graph)}
    # Inductor reuses the memory of donated inputs.
    donated = [each for each in metadata.bw_donated_idxs or () if each not in returned]
    with replaced(metadata, bw_donated_idxs=donated):
        run = compile_graph(graph, inputs)
    resume = compiler.note_context()

    def compile_whole() -> Any:
        with resume(), torch.no_grad():
            return compile_graph(whole, inputs)

    return _Backward(run, number, parts, compile_whole)


class PlainGradient(WeightProduct):
    """The gradient of a part that `is_plain`."""

    def __init__(self, part: Part, factors: Sequence[int]) -> None:
        """`factors`: places of those that W keeps."""
        ((self.place, _, _, self.flops),) = part.gradients
        self.factors = tuple(map(factors.index, part.factors))
        self._compute, as_matrices = part.compute, part.as_matrices
        self.as_matrices = (lambda dy, x: as_matrices(x, dy)) if part.is_one_product else None

    def of_weight(self, dy: Tensor, x: Tensor, extra: ExtraArguments = NONE, tensors: Sequence[Tensor] = ()) -> Tensor:
        (gradient,) = self._compute(x, dy, *tensors)
        return gradient


class Postponed(NamedTuple):
    """Takes the place of a gradient that W computes."""

    product: PlainGradient
    factors: Sequence[Tensor]
    """Those of all such gradients of the region."""

    def now(self) -> Tensor:
        x, dy, *more = [self.factors[place] for place in self.product.factors]
        return self.product.of_weight(dy, x, NONE, more)


@dataclass(slots=True, eq=False)
class _WeightGradient:
    """Computes a gradient of a part that is not plain."""

    part: Part
    number: int
    kept: dict[int, Tensor]
    """The part's other gradients, which the first one computes."""

    @property
    def flops(self) -> float:
        return self.part.gradients[self.number].flops

    def __call__(self, *factors: Any) -> Tensor:
        if self.number not in self.kept:
            self.kept.update(enumerate(self.part.compute(*factors)))
        return self.kept.pop(self.number)


# Not per thread: autograd runs the backward of CUDA ops in its own threads.
defers = False
"""Whether compiled backwards leave gradients to W. Otherwise they run in one part, as torch compiles them."""


class _Backward:
    _boxed_call = True

    def __init__(
        self,
        run: Callable[..., Any],
        number: int,
        parts: Sequence[Part],
        compile_whole: Callable[[], Any],
    ) -> None:
        self._run = run
        self._number = number
        self._for_w = sorted({place for each in parts if each.is_plain for place in each.factors})
        self._plain = [PlainGradient(each, self._for_w) for each in parts if each.is_plain]
        self._others = [each for each in parts if not each.is_plain]
        self._compile_whole = compile_whole
        self._whole: Callable[..., Any] | None = None
        self.products = {each.argument: each.flops for part in parts for each in part.gradients}

    def __call__(self, args: list[Any]) -> Any:
        if not defers:
            if self._whole is None:
                self._whole = self._compile_whole()
            return _run_boxed(self._whole, args)
        results = list(_run_boxed(self._run, args))
        results, factors = results[: self._number], results[self._number :]
        # Tensors that F has saved, and views of them, may have graphs.
        factors = [each.detach() if getattr(each, "requires_grad", False) else each for each in factors]
        for_w = [factors[number] for number in self._for_w]
        for product in self._plain:
            results[product.place] = Postponed(product, for_w)
        for part in self._others:
            own = [factors[number] for number in part.factors]
            if not part.is_static:
                for gradient, found in zip(part.gradients, part.compute(*own), strict=True):
                    results[gradient.place] = found
                continue
            kept: dict[int, Tensor] = {}
            for number, (place, _, like, _) in enumerate(part.gradients):
                results[place] = postpone(_WeightGradient(part, number, kept), own, like)
        return results


def _run_boxed(run: Callable[..., Any], args: list[Any]) -> Any:
    return run(args) if getattr(run, "_boxed_call", False) else run(*args)


def find_compiled_products(node: Any) -> Mapping[int, float] | None:
    """FLOPs of weight gradients that can wait, by the weight's number among the region's arguments."""
    # None unless the node's backward has two parts and has run. torch keeps the last one in the node's class.
    run = getattr(function_of(node), "compiled_bw", None)
    return run.products if isinstance(run, _Backward) else None
