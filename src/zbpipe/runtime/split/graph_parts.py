"""The graph of a compiled backward, cut into I's part and one for each weight, or group of weights, that can wait.

A graph has no side effects, so the other parts can compute the same gradients from their factors at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import or_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zbpipe.runtime._torch import compiler
from zbpipe.runtime._torch.autograd import schema_of, without_autocast
from zbpipe.runtime.split.lazy_products import PRODUCTS, count_flops

_aten = torch.ops.aten
_VIEWS = {
    _aten.alias.default: "detach",
    _aten.detach.default: "detach",
    _aten.permute.default: "permute",
    _aten.squeeze.dim: "squeeze",
    _aten.squeeze.dims: "squeeze",
    _aten.t.default: "t",
    _aten.transpose.int: "transpose",
    _aten.unsqueeze.default: "unsqueeze",
    _aten.view.default: "reshape",  # a compiled result's memory may have another order
}
"""Views, and the methods of tensors that make them in less host time."""
_TURNS = {_aten.permute.default, _aten.t.default, _aten.transpose.int}
_COLLECTIVES = ("_c10d_functional", "symm_mem")
_CONVOLUTION = _aten.convolution_backward.default


class _Gradient(NamedTuple):
    place: int
    argument: int
    """Number of the weight among the region's arguments."""
    like: Tensor
    """A fake tensor like the gradient."""
    flops: float
    """Its share of the FLOPs of the products."""


class Part(NamedTuple):
    """Gradients that share products, usually one."""

    gradients: tuple[_Gradient, ...]
    graph: GraphModule
    """Computes them from the factors."""
    is_one_product: bool
    """Whether `graph` returns two matrices, whose product is the gradient."""
    factors: tuple[int, ...]
    """Places of the arguments of `graph` among the factors."""
    is_static: bool
    """Whether the gradients have the same shape in each microbatch."""
    is_plain: bool
    """Whether the only gradient is a plain tensor, made from tensors that depend on activations."""

    # No factor requires a gradient, so `torch.no_grad`, which takes as long as a product, would change nothing.

    @property
    def as_matrices(self) -> Callable[..., Any]:
        """Returns views of the factors, which no autocast changes."""
        return self.graph.forward  # without what a call of a module does around it

    def compute(self, *factors: Any) -> list[Tensor]:
        """All gradients."""
        with without_autocast():
            found = self.graph.forward(*factors)
            if self.is_one_product:
                return [found[0].mm(found[1])]
            # Those of one product share its memory, to which the next microbatch adds.
            return list(found) if len(found) == 1 else [each.clone() for each in found]


def list_made_from(graph: Graph, arguments: Collection[int]) -> set[Node]:
    found = {each for each in graph.find_nodes(op="placeholder") if _find_argument(each.meta.get("desc")) in arguments}
    for node in graph.nodes:
        if node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def results_of(graph: Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def cut_graph(module: GraphModule, weights: Collection[int], of_weights: Collection[str]) -> tuple[list[Part], int]:
    """Cut the graph to I's part. Returns the other parts, and the number of results before the factors."""
    graph = module.graph
    output = graph.output_node()
    results = results_of(graph)
    described = output.meta.get("desc") or [None] * len(results)
    arguments = {place: _find_argument(each) for place, each in enumerate(described)}
    places = [
        place
        for place, each in enumerate(results)
        if arguments[place] in weights and isinstance(example_of(each), Tensor) and len(_shape_of(each)) > 1
    ]
    if any((schema := schema_of(node.target)) is not None and schema.is_mutable for node in graph.nodes):
        return [], len(results)
    _separate_convolutions(graph)
    results = results_of(graph)
    found = _Found(graph, places, of_weights)
    taken = {place: each for place in places if (each := found.trace_back(results[place])).products}
    # Without products that I needs for other results, as in a stage whose inputs need no gradient.
    in_i = _list_behind(factor for each in taken.values() for factor in each.factors)
    taken = {place: each for place, each in taken.items() if in_i.isdisjoint(each.products)}
    factors: dict[Node, int] = {}
    parts = []
    for group, each in _join(taken):
        elements = [_shape_of(results[place]).numel() for place in group]
        flops = sum(map(_count, each.products)) / max(sum(elements), 1)
        gradients = [
            _Gradient(place, cast(int, arguments[place]), results[place].meta["val"], flops * size)
            for place, size in zip(group, elements, strict=True)
        ]
        own = tuple([factors.setdefault(node, len(factors)) for node in each.factors])
        sizes = [size for gradient in gradients for size in (*gradient.like.shape, *gradient.like.stride())]
        is_static = all(isinstance(size, int) for size in sizes)
        extracted = _extract(module, [results[place] for place in group], each)
        # No part of a wrapper, and no weight, which FSDP may free before W.
        is_plain = is_static and len(gradients) == 1 < len(own) and gradients[0].flops > 0
        is_plain &= isinstance(getattr(described[group[0]], "grad_of", None), compiler.PlainInput)
        is_plain &= all(isinstance(example_of(node), Tensor) and node.name not in of_weights for node in each.factors)
        parts.append(Part(tuple(gradients), *extracted, own, is_static, is_plain))
        for place in group:
            results[place] = None
    number = len(results)
    if factors:
        output.args = ((*results, *factors),)
        if "desc" in output.meta:
            output.meta["desc"] = [*described, *[None] * len(factors)]
        graph.eliminate_dead_code()
        module.recompile()
    return parts, number


def _find_argument(described: Any) -> int | None:
    """Number of the argument to which a result of the backward belongs."""
    # The result may be a gradient, a part of a tensor that wraps others, or both in either order.
    while (inner := getattr(described, "grad_of", None) or getattr(described, "base", None)) is not None:
        described = inner
    return described.idx if isinstance(described, compiler.PlainInput) else None


def _is_fixed(node: Node) -> bool:
    """Whether the node has to run in I: it draws random numbers, communicates, or has its own graphs."""
    if node.op != "call_function":
        return True
    tags = getattr(node.target, "tags", ())
    is_operator = schema_of(node.target) is not None or getattr(node.target, "__name__", "") == "getitem"
    in_order = any(word in str(node.target) for word in _COLLECTIVES) or torch.Tag.nondeterministic_seeded in tags
    return in_order or not (is_operator or getattr(node.target, "__module__", "") in ("_operator", "math"))


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in (*PRODUCTS, "convolution_backward"))


class _Taken(NamedTuple):
    """W's computations for one weight, or for several."""

    nodes: dict[Node, None]
    products: set[Node]
    factors: dict[Node, None]


class _Found:
    """Nodes of a backward that only weight gradients need."""

    def __init__(self, graph: Graph, places: Sequence[int], of_weights: Collection[str]) -> None:
        kept = [each for place, each in enumerate(results_of(graph)) if isinstance(each, Node) and place not in places]
        fixed = [each for each in graph.nodes if each.op == "call_function" and _is_fixed(each)]
        self._in_i = _list_behind([*kept, *fixed])
        self._of_weights = {each for each in graph.nodes if each.name in of_weights}
        self._of_dy: set[Node] = set()
        self._after: set[Node] = set()
        """Products of dY and x, and the nodes after them that lead to no other product."""
        for node in graph.nodes:
            if node.name.startswith("tangents") or not self._of_dy.isdisjoint(node.all_input_nodes):
                self._of_dy.add(node)
            if node.op != "call_function" or node in self._in_i:
                continue
            is_after = not self._after.isdisjoint(node.all_input_nodes)
            if self._is_of_activations(node) if _is_product(node) else is_after:
                self._after.add(node)

    def _is_of_activations(self, product: Node) -> bool:
        """Whether each factor depends on activations, as in a product of dY and x."""
        if product.target is _CONVOLUTION:
            return list(cast(Sequence[bool], product.args[-1])) == [False, True, False]
        return self._of_weights.isdisjoint(product.all_input_nodes)

    def trace_back(self, result: Node) -> _Taken:
        """The nodes from the last products of dY and x on."""
        taken = _Taken({}, set(), {})
        waiting = [result] if result in self._after else []
        while waiting:
            node = waiting.pop()
            if node in taken.nodes:
                continue
            taken.nodes[node] = None
            is_last = _is_product(node)
            if is_last:
                taken.products.add(node)
            inputs = node.all_input_nodes
            if node.target is _CONVOLUTION:  # reads only the weight's shape
                inputs = [cast(Node, each) for each in node.args[:2]]
            for each in inputs:
                if each in self._after and not is_last:
                    waiting.append(each)
                else:
                    self._add_factor(each, taken)
        return taken._replace(factors=dict.fromkeys(sorted(taken.factors, key=self._of_dy.__contains__)))

    def _add_factor(self, node: Node, taken: _Taken) -> None:
        while node.target in _VIEWS:
            taken.nodes[node] = None
            node, *sizes = node.all_input_nodes
            taken.factors.update(dict.fromkeys(sizes))
        taken.factors[node] = None


def _list_behind(nodes: Iterable[Node]) -> set[Node]:
    seen, waiting = set[Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _join(taken: Mapping[int, _Taken]) -> list[tuple[list[int], _Taken]]:
    """Indices of gradients that share products, each with W's computations for them."""
    groups: list[tuple[list[int], _Taken]] = []
    for place, own in taken.items():
        places, joined = [place], own
        for group in [each for each in groups if not own.products.isdisjoint(each[1].products)]:
            groups.remove(group)
            places = [*group[0], *places]
            joined = _Taken(*map(or_, group[1], joined))
        groups.append((places, joined))
    return groups


def _separate_convolutions(graph: Graph) -> None:
    """Separate weight gradients of convolutions from dX, and compute gradients of biases as sums."""
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        of = {user.args[1]: user for user in node.users}
        mask = list(cast(Sequence[bool], node.args[-1]))
        if 1 not in of or not (mask[0] or mask[2]):
            continue
        dy = cast(Node, node.args[0])
        with graph.inserting_after(node):
            own = graph.call_function(_CONVOLUTION, (*node.args[:-1], [False, True, False]))
            own.meta = dict(node.meta)
        of[1].update_arg(0, own)
        if mask[2] and 2 in of:
            others = [each for each in range(dy.meta["val"].dim()) if each != 1]
            with graph.inserting_before(of[2]):
                bias = graph.call_function(_aten.sum.dim_IntList, (dy, others))
                bias.meta = dict(of[2].meta)
            of[2].replace_all_uses_with(bias)
            graph.erase_node(of[2])
        node.args = (*node.args[:-1], [mask[0], False, False])


def _extract(module: GraphModule, results: Sequence[Node], taken: _Taken) -> tuple[GraphModule, bool]:
    """The part of the graph that computes these results from their factors; whether it returns two matrices."""
    graph = Graph()
    copies = {node: graph.placeholder(f"factor_{number}") for number, node in enumerate(taken.factors)}
    matrices = _find_matrices(results, taken)
    product = next(iter(taken.products))
    end = _list_behind(results if matrices is None else product.all_input_nodes)
    for node in module.graph.nodes:
        if node in taken.nodes and node in end:
            copies[node] = _copy(graph, node, copies)
    if matrices is None:
        graph.output([copies[each] for each in results])
    else:
        one, other = (copies[each] for each in cast(Sequence[Node], product.args))
        if matrices == "turned":
            one, other = (graph.call_method("t", (each,)) for each in (other, one))
        graph.output((one, other))
    return GraphModule(module, graph), matrices is not None


def _copy(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    if node.target is _CONVOLUTION:
        dy, x, weight, *rest = node.args
        shape = list(cast(Node, weight).meta["val"].shape)
        like = graph.call_function(_aten.new_empty.default, (copies[cast(Node, dy)], [1]))
        like = graph.call_function(_aten.expand.default, (like, shape))
        return graph.call_function(_CONVOLUTION, (copies[cast(Node, dy)], copies[cast(Node, x)], like, *rest))
    if node.target in _VIEWS:
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        if node.args[1:] == ([1, 0],):  # a transpose takes half the time
            return graph.call_method("t", args[:1])
        return graph.call_method(_VIEWS[node.target], args, kwargs)
    return graph.node_copy(node, copies.__getitem__)


def _find_matrices(results: Sequence[Node], taken: _Taken) -> str | None:
    """ "plain" or "turned" if there is one gradient, a product of two matrices; otherwise None."""
    is_turned, node = False, results[0]
    while node.target in _TURNS and len(node.meta["val"].shape) == 2:
        if node.target is _aten.t.default or tuple(cast(Any, node.args[1:])) != ([0, 1],):
            is_turned = not is_turned
        node = node.all_input_nodes[0]
    if node.target is not _aten.mm.default or taken.products != {node} or len(node.args) != 2 or results[1:]:
        return None
    return "turned" if is_turned else "plain"


def _count(product: Node) -> float:
    if product.target is _CONVOLUTION:
        dy, x, weight = (_shape_of(each) for each in product.args[:3])
        return 2.0 * (x if product.args[7] else dy).numel() * weight[1:].numel()
    return count_flops(str(product.target), (_shape_of(each) for each in product.args if isinstance(each, Node)))


def example_of(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, Node) else None


def _shape_of(value: Any) -> torch.Size:
    shape = getattr(example_of(value), "shape", ())
    return torch.Size([each if isinstance(each, int) else 1 for each in shape])
