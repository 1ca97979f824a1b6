"""Products with weights in autograd's graph, and the cost of their weight gradients.

Only names, edges and shapes of nodes are read, because reading saved tensors would make a checkpoint recompute them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zbpipe.runtime._torch.autograd import Edge, count_results, edges_before, find_nodes, shape_of, sort_nodes
from zbpipe.runtime.split.compiled_backward import find_compiled_products
from zbpipe.runtime.split.sources import MADE, number_edges, passes_on

_FACTORS = {
    "AddmmBackward0": (1, 2),
    "BaddbmmBackward0": (1, 2),
    "BmmBackward0": (0, 1),
    "GroupedMmBackward0": (0, 1),
    "MmBackward0": (0, 1),
}
"""Indices of a product's two factors, by node."""
_WEIGHT_SECOND = ("Convolution", "Linear", "Trilinear")
"""Nodes whose weight follows x, optionally with a bias after it."""
_RECURRENT = ("Rnn", "Lstm", "Gru")
_LOOKUPS = ("Embedding", "EmbeddingBag")
_CHOICES = ("Index", "IndexSelect", "Gather")
_PLACINGS = ("IndexPut", "CopySlices", "Scatter")
"""Nodes that write a weight into a larger tensor. Without a gradient, that tensor is a constant."""
_VIEWS = ("Clone", "Contiguous", "Expand", "ReshapeAlias", "Squeeze", "UnsafeView", "ToCopy")
_MATRIX = 2
"""Smallest number of dimensions of a weight. Row selection in smaller ones is a lookup, and smaller parameters are
biases or gains."""
_REGION = "CompiledFunction"


class GraphProduct(NamedTuple):
    """A product whose weight is a parameter, or made only from parameters."""

    kind: str
    """Name of the node, without `Backward`."""
    deferral: object
    """Deferral of the layer, if the node belongs to zbpipe."""
    leaves: tuple[Tensor, ...]
    is_made: bool
    """Whether the weight is more than a cast, a transpose or a view of a leaf."""
    flops: float

    @property
    def is_plain(self) -> bool:
        return f"{self.kind}Backward0" in _FACTORS or self.kind == "Linear"


class _Weight(NamedTuple):
    leaves: tuple[Tensor, ...]
    is_made: bool = False
    is_larger: bool = False
    """Whether it is larger than the parameters: expanded, or selected row by row."""


def find_products(outputs: Iterable[Any]) -> list[GraphProduct]:
    return find_products_behind(find_nodes(outputs))


def find_products_behind(nodes: Sequence[Node], make_weights: bool = False) -> list[GraphProduct]:
    """All products with weights in the graphs of these nodes, which may also `make_weights`."""
    found: list[GraphProduct] = []
    known: dict[Node, _Weight | None] = {}
    edges_of = _edges_behind if make_weights else edges_before
    for node in sort_nodes(nodes, edges_of):
        edges = [(known.get(each) if each else None, each, place) for each, place in edges_of(node)]
        known[node] = _visit(node, edges, found)
        if known[node] is None and (leaves := cast(Any, node).metadata.get(MADE)):
            known[node] = _Weight(leaves, is_made=True)
        if make_weights and known[node] is None:
            known[node] = _join([weight for weight, _, _ in edges if weight is not None])
    return found


def _edges_behind(node: Any) -> Sequence[Edge]:
    """The edges to a node's arguments. For zbpipe's product with a made weight, the weight replaces its parameters."""
    made = getattr(node, "made", None)
    return node.next_functions if made is None else (node.next_functions[0], (made.edge.node, made.edge.output_nr))


_Edge = tuple[_Weight | None, Node | None, int]
"""The edge's weight, if any, its source node, and the number of that node's result."""


def _visit(node: Node, edges: Sequence[_Edge], found: list[GraphProduct]) -> _Weight | None:
    """Add the products of `node` to `found`. Returns the node's result if it is a weight."""
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        return _Weight((leaf,)) if isinstance(leaf, nn.Parameter) else None
    if (known := find_compiled_products(node)) is not None:
        found += _list_in_region(node, edges, known)
        return None
    kind = node.name().rpartition("Backward")[0]
    if node.name() in _FACTORS:
        places: tuple[int, ...] = _FACTORS[node.name()]
    elif kind in _WEIGHT_SECOND:
        places = (1,)
    elif any(word in kind for word in _RECURRENT) or _is_function(node, kind, edges):
        # A Function may take the same weight twice. zbpipe's Functions take x first.
        places = tuple({each[1:]: place for place, each in enumerate(edges)}.values())
        if _find_deferral(node) is not None:
            places = getattr(node, "weight_places", (1,))
    else:
        return _make(node, kind, edges)
    factors = [edges[place] for place in places if place < len(edges)]
    for place, (weight, source, number) in zip(places, factors, strict=False):
        if weight is None or source is None:
            continue
        shape = _shape_of(source, number)
        if len(shape) >= _MATRIX or any(leaf.dim() >= _MATRIX for leaf in weight.leaves):
            flops = _count_flops(node, kind, place == places[0], shape, edges)
            found.append(GraphProduct(kind, _find_deferral(node), weight.leaves, weight.is_made, flops))
    if kind == "Convolution" and edges[0][0] is not None:  # a filter on a weight
        return _join([edges[0][0]], is_made=True)
    weights = [weight for weight, _, _ in factors if weight is not None]
    is_weight = node.name() in _FACTORS and len(weights) == len(places) and not any(each.is_larger for each in weights)
    return _join(weights, is_made=True) if is_weight else None


def _list_in_region(node: Node, edges: Sequence[_Edge], products: Mapping[int, float]) -> Iterator[GraphProduct]:
    """The products of a compiled backward that can wait. They belong to its deferral."""
    numbers = number_edges(node)
    for place, flops in products.items():
        weight = edges[numbers[place]][0] if place in numbers else None
        if weight is not None:
            yield GraphProduct(_REGION, _find_deferral(node), weight.leaves, weight.is_made, flops)


def _find_deferral(node: Node) -> object:
    return getattr(node, "deferral", None) if isinstance(cast(object, node), BackwardCFunction) else None


def _is_function(node: Node, kind: str, edges: Sequence[_Edge]) -> bool:
    """Whether the node is a custom Function that takes more than weights."""
    if not isinstance(cast(object, node), BackwardCFunction) or passes_on(node):
        return False
    if _find_deferral(node) is not None:  # if x needs no gradient, the result may be as large as the weight
        return True
    sources = [weight for weight, source, _ in edges if source is not None]
    weights = [weight for weight in sources if weight is not None]
    elements = {prod(_shape_of(source, number)) for weight, source, number in edges if weight is not None and source}
    return kind == _REGION or len(weights) < len(sources) or prod(_shape_of(node, 0)) not in elements


def _make(node: Node, kind: str, edges: Sequence[_Edge]) -> _Weight | None:
    """The result of an operation on weights that is no product; None if it involves an activation."""
    weights = [weight for weight, source, _ in edges if source is not None]
    if not weights or None in weights or kind in _LOOKUPS:
        return None
    result = _join(cast(list[_Weight], weights), is_made=kind not in _VIEWS and not passes_on(node))
    shapes = [_shape_of(source, number) for _, source, number in edges if source is not None]
    elements = max(map(prod, shapes))
    grows = max(prod(_shape_of(node, number)) for number in range(count_results(node))) > elements
    grows &= kind not in _PLACINGS
    if grows and len(weights) < len(edges):  # the other operand, without a gradient, is an activation
        return None
    if kind in _CHOICES and len(shapes[0]) == _MATRIX and all(leaf.dim() <= _MATRIX for leaf in result.leaves):
        return None  # a lookup of rows
    return result._replace(is_larger=result.is_larger or grows)


def _join(weights: Sequence[_Weight], is_made: bool = False) -> _Weight:
    leaves = {id(leaf): leaf for weight in weights for leaf in weight.leaves}
    is_made |= any(weight.is_made for weight in weights)
    return _Weight(tuple(leaves.values()), is_made, any(weight.is_larger for weight in weights))


def _shape_of(node: Node, number: int) -> tuple[int, ...]:
    """Shape of one of the node's results; empty for tensors without a plain shape, such as nested ones."""
    try:
        shape = tuple(shape_of(node, number))
    except (IndexError, RuntimeError):
        return ()
    return shape if all(isinstance(size, int) for size in shape) else ()


def _count_flops(node: Node, kind: str, is_first: bool, weight: tuple[int, ...], edges: Sequence[_Edge]) -> float:
    dy = _shape_of(node, 0)
    if isinstance(cast(object, node), BackwardCFunction) and hasattr(node, "inner"):  # zbpipe's own
        return 2.0 * prod(dy) * cast(float, node.inner)
    if kind == "Convolution":
        return 2.0 * prod(dy) * prod(weight[1:])
    if kind == "Linear":
        return 2.0 * prod(dy) * weight[-1]
    if node.name() in _FACTORS:
        groups = dy[0] if kind == "GroupedMm" and len(weight) < len(dy) else 1
        return 2.0 * prod(dy) * weight[-1 if is_first else -2] / max(groups, 1)
    activations = [
        _shape_of(source, number) for weight, source, number in edges if weight is None and source is not None
    ]
    if len(weight) > _MATRIX and dy:  # one matrix per group of rows
        return 2.0 * prod(dy) * (activations[0][-1] if activations and activations[0] else weight[-2])
    # A Function may return a loss: its x has more rows than its dY.
    return 2.0 * max((prod(shape[:-1]) for shape in (dy, *activations) if shape), default=1) * prod(weight)
