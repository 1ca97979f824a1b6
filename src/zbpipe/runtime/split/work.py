"""A stage's weight gradients: their products in autograd's graph, the share deferred to W, the rest, and the reasons.

Only names, edges and shapes of nodes are read, because reading saved tensors would make a checkpoint recompute them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zbpipe.runtime._torch import autograd, fsdp2
from zbpipe.runtime._torch.attributes import plain_attribute, replaced
from zbpipe.runtime._torch.autograd import Edge, count_results, edges_before, find_nodes, shape_of, sort_nodes
from zbpipe.runtime.split import sources
from zbpipe.runtime.split.compiled_backward import find_compiled_products
from zbpipe.runtime.split.deferral import Deferral
from zbpipe.runtime.split.deferring_layers import deferral_of
from zbpipe.runtime.split.delaying import delays
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.sources import MADE, number_edges, passes_on

_MOST_NAMES = 8
_LEAST = 0.0005
_CHANGED = "something changes x or dY in place during I"


@dataclass(frozen=True)
class StaysInI:
    """The weight gradients of a parameter that I computes, for one reason."""

    parameter: str
    """The parameter's name in the stage. For a weight made from several, the first."""
    layer: str
    share: float
    """Share of the FLOPs of all the stage's weight gradients."""
    reason: str


def percent(share: float) -> str:
    """A share as text.

    >>> percent(0.9871), percent(0.0004), percent(1.0)
    ('98.7 %', '<0.1 %', '100 %')
    """
    return "<0.1 %" if 0 < share < _LEAST else f"{min(100 * share, 99.9 if share < 1 else 100):.3g} %"


def describe(products: Iterable[tuple[str, float, str]]) -> str:
    """The largest products, with names and shares by reason.

    >>> describe([("a", 0.5, "hooks"), ("b", 0.25, "a convolution"), ("c", 0.125, "hooks")])
    'a 50 %, c 12.5 % (hooks); b 25 % (a convolution)'
    """
    ordered = sorted(products, key=lambda product: -product[1])
    shown = [each for each in ordered if each[1] >= _LEAST][:_MOST_NAMES] or ordered[:1]
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for name, share, reason in shown:
        reasons[reason].append(f"{name} {percent(share)}")
    more = f"; and {len(ordered) - len(shown)} more" if len(ordered) > len(shown) else ""
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items()) + more


@contextmanager
def look_at_graphs(on_trial: bool) -> Iterator[list[GraphProduct]]:
    """Context of the first I that lists the products with weights in the graphs of all backwards."""
    # A checkpoint with `use_reentrant=True` makes its graph, and runs its own backward, within a backward.
    found: list[GraphProduct] = []
    if not on_trial:
        yield found
        return
    run = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        run(tensors, *args, **kwargs)
        # Afterwards, because the backwards of regions are compiled when they run.
        found.extend(find_products(tensors if isinstance(tensors, Sequence) else [tensors]))

    with replaced(torch.autograd, backward=backward):
        yield found


class WeightWork:
    """FLOPs of a stage's weight gradients per microbatch, deferred to W or not."""

    def __init__(self, module: nn.Module, products: Sequence[GraphProduct], pending: Sequence[PendingGradient]) -> None:
        """Counts from a microbatch's graph, and from the gradients that its I deferred."""
        self._module = module
        self._names = fsdp2.find_parameter_names(module)
        self._waiting: defaultdict[str, float] = defaultdict(float)
        self._in_i: defaultdict[tuple[str, str], float] = defaultdict(float)
        calls = Counter[int]()
        for gradient in pending:
            leaves = getattr(gradient.weight, "leaves", None) or (sources.find_leaf(gradient.weight),)
            calls[id(leaves[0])] += 1
            stays = deferral_of(gradient.layer).stays_in_i
            for leaf in leaves:
                self._count(id(leaf), gradient.flops / len(leaves), _CHANGED if stays else "")
        making = [each.weight.edge.node for each in pending if isinstance(each.weight, sources.Made)]
        for product in find_products_behind(list(dict.fromkeys(making)), make_weights=True):
            for leaf in product.leaves:
                self._count(id(leaf), product.flops / len(product.leaves))
        own: defaultdict[int, list[GraphProduct]] = defaultdict(list)
        for product in products:
            if isinstance(product.deferral, Deferral):
                own[id(product.leaves[0])].append(product)
            else:
                for leaf in product.leaves:
                    self._count(id(leaf), product.flops / len(product.leaves), self._explain(product))
        for parameter, found in own.items():
            if (rest := len(found) - calls[parameter]) > 0:
                self._count(parameter, rest * found[0].flops, self._explain(found[0]))

    def _count(self, leaf: int, flops: float, reason: str = "") -> None:
        name = self._names.get(leaf, "of another module")
        if reason:
            self._in_i[name, reason] += flops
        else:
            self._waiting[name] += flops

    @property
    def flops(self) -> float:
        return float(sum(self._waiting.values()) + sum(self._in_i.values()))

    @property
    def share(self) -> float:
        """Share of the FLOPs that is deferred to W; 1 without any FLOPs."""
        return 1 - sum(self._in_i.values()) / self.flops if self.flops else 1.0

    @property
    def in_i(self) -> Sequence[StaysInI]:
        products = [
            StaysInI(name, type(self._find_owner(name)).__name__, flops / (self.flops or 1), reason)
            for (name, reason), flops in self._in_i.items()
        ]
        return sorted(products, key=lambda product: -product.share)

    @property
    def mostly_in_w(self) -> frozenset[str]:
        return frozenset(self._waiting) - self.mostly_in_i

    @property
    def mostly_in_i(self) -> frozenset[str]:
        """Parameters with more FLOPs in I than in W."""
        total: defaultdict[str, float] = defaultdict(float)
        for (name, _), flops in self._in_i.items():
            total[name] += flops
        return frozenset(name for name, flops in total.items() if flops > self._waiting.get(name, 0.0))

    def _find_owner(self, name: str) -> nn.Module:
        known: dict[str, nn.Module] = dict(self._module.named_modules())
        return known.get(name.rpartition(".")[0], self._module)

    def _explain_own(self, deferral: Deferral, product: GraphProduct) -> str:
        """Reason why a layer does not defer a weight gradient that it could."""
        if deferral.stays_in_i:
            return _CHANGED
        if deferral.has_node_hooks or autograd.has_hooks(product.leaves[0]):
            return "the weight has hooks"
        if product.kind in _KINDS:
            return _KINDS[product.kind]
        if product.kind.startswith("_Deferred"):
            return "a backward of its own computes it"
        return f"an autograd Function of its own, {product.kind}"

    def _explain(self, product: GraphProduct) -> str:
        """Reason why a product stays in I. Empty if its layer delays it."""
        layer = self._find_owner(self._names.get(id(product.leaves[0]), ""))
        if delays(layer):
            return ""
        if isinstance(product.deferral, Deferral):
            return self._explain_own(product.deferral, product)
        kind = product.kind
        named = next((words for word, words in _KINDS.items() if word in kind), "")
        if not (product.is_plain or named):
            return f"the autograd Function {kind}, which is not declared"
        if product.is_plain and product.is_made:
            return "its weight is made from parameters"
        declared = plain_attribute(layer, "weight_products", {} if isinstance(layer, nn.Linear) else None)
        if declared:
            return "weight_products fit no call: declare function(x, weight, ...) without other gradients, as of a bias"
        own = "a product of its own: declare it by weight_products"
        elsewhere = "multiplied outside of its layer, or the layer sets weight_products = {}"
        return named or (own if declared is None else elsewhere)


_KINDS = {
    "CompiledFunction": "in a compiled region, whose backward computes it",
    "Conv": "a convolution",
    "Rnn": "a recurrent layer",
    "Lstm": "a recurrent layer",
    "Gru": "a recurrent layer",
    "Trilinear": "a bilinear layer",
}
"""Reasons, by a word in the name of autograd's node."""

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
