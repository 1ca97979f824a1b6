"""A stage's weight gradients: the share deferred to W, the rest, and the reasons."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zbpipe.runtime._torch import autograd, fsdp2
from zbpipe.runtime._torch.attributes import plain_attribute, replaced
from zbpipe.runtime.split import graph_products, sources
from zbpipe.runtime.split.deferral import Deferral
from zbpipe.runtime.split.deferring_layers import deferral_of
from zbpipe.runtime.split.delaying import delays
from zbpipe.runtime.split.products import PendingGradient

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
def look_at_graphs(on_trial: bool) -> Iterator[list[graph_products.GraphProduct]]:
    """Context of the first I that lists the products with weights in the graphs of all backwards."""
    # A checkpoint with `use_reentrant=True` makes its graph, and runs its own backward, within a backward.
    found: list[graph_products.GraphProduct] = []
    if not on_trial:
        yield found
        return
    run = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        run(tensors, *args, **kwargs)
        # Afterwards, because the backwards of regions are compiled when they run.
        found.extend(graph_products.find_products(tensors if isinstance(tensors, Sequence) else [tensors]))

    with replaced(torch.autograd, backward=backward):
        yield found


class WeightWork:
    """FLOPs of a stage's weight gradients per microbatch, deferred to W or not."""

    def __init__(
        self, module: nn.Module, products: Sequence[graph_products.GraphProduct], pending: Sequence[PendingGradient]
    ) -> None:
        """Counts from a microbatch's graph, and from the gradients that its I deferred."""
        self._module = module
        self._names = fsdp2.find_parameter_names(module)
        self._waiting: defaultdict[str, float] = defaultdict(float)
        self._in_i: defaultdict[tuple[str, str], float] = defaultdict(float)
        calls = Counter[int]()
        for gradient in pending:
            parameter = id(sources.find_leaf(gradient.weight))
            calls[parameter] += 1
            stays = deferral_of(gradient.layer).stays_in_i
            self._count(parameter, gradient.flops, _CHANGED if stays else "")
        making = [each.weight.edge.node for each in pending if isinstance(each.weight, sources.Made)]
        for product in graph_products.find_products_behind(list(dict.fromkeys(making)), make_weights=True):
            for leaf in product.leaves:
                self._count(id(leaf), product.flops / len(product.leaves))
        own: defaultdict[int, list[graph_products.GraphProduct]] = defaultdict(list)
        for product in products:
            if isinstance(product.deferral, Deferral):
                own[id(product.leaves[0])].append(product)
            else:
                for leaf in product.leaves:
                    self._count(id(leaf), product.flops / len(product.leaves), self._explain(product))
        for parameter, found in own.items():
            rest = len(found) - calls[parameter]
            if rest > 0:
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

    def _explain_own(self, deferral: Deferral, product: graph_products.GraphProduct) -> str:
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

    def _explain(self, product: graph_products.GraphProduct) -> str:
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
