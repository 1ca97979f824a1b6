"""W's products, and FSDP2's reductions that overlap those of a stage's last W."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zbpipe.runtime._torch import autograd, fsdp2
from zbpipe.runtime._torch.fsdp2 import Unit
from zbpipe.runtime.split import sources
from zbpipe.runtime.split.deferring_layers import deferrals
from zbpipe.runtime.split.products import PendingGradient


def accumulate(pending: list[PendingGradient]) -> Iterator[None]:
    """Compute the deferred gradients, and add one to `.grad` at each step of the iterator."""
    # From the last pair to the first, freeing each, because the latest pairs of I are still in the cache. Weights made
    # from the same parameters, such as those of experts, share a graph that runs once.
    left = Counter(_makers_of(each.weight) for each in pending if isinstance(each.weight, sources.Made))
    made: defaultdict[Sequence[int], list[tuple[GradientEdge, Tensor]]] = defaultdict(list)
    while pending:
        gradient = pending.pop()
        weight = gradient.weight
        if not isinstance(weight, sources.Made):
            gradient.accumulate()
            yield
            continue
        makers = _makers_of(weight)
        made[makers].append((weight.edge, gradient.gradient()))
        left[makers] -= 1
        if not left[makers]:
            edges, gradients = zip(*made.pop(makers), strict=True)
            torch.autograd.backward(edges, gradients, retain_graph=True)
        yield


def _makers_of(weight: sources.Made) -> tuple[int, ...]:
    return tuple(map(id, weight.leaves))


def accumulate_and_reduce(module: nn.Module, pending: list[PendingGradient]) -> Iterator[None]:
    """Compute a stage's last deferred gradients. FSDP2 reduces each unit as soon as its gradients are complete."""
    units = _order(module, fsdp2.list_units(module))
    fsdp2.begin(module)
    of_others, *of_units = _sort(pending, units)
    yield from accumulate(of_others)
    for unit, own in zip(units, of_units, strict=True):
        yield from accumulate(own)
        fsdp2.reduce(unit)


def _order(module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """The units in the order of their reductions: without products first, then from the largest on."""
    # A reduction overlaps the next unit's products, so the last one, which nothing hides, has to be small. All
    # data-parallel ranks need the same order, so it must not depend on this microbatch's products, which may leave out
    # experts.
    multiplied = {
        id(parameter)
        for deferral in deferrals(module).values()
        for parameter in autograd.own_parameters(deferral.layer).values()
        if parameter is not None and parameter.dim() > 1
    }
    return sorted(units, key=lambda unit: (not unit.parameters.isdisjoint(multiplied), -unit.elements))


def _sort(pending: list[PendingGradient], units: Sequence[Unit]) -> list[list[PendingGradient]]:
    """The products of parameters outside all units, and those of each unit. Empties `pending`."""
    place_of = {own: place for place, unit in enumerate(units, start=1) for own in unit.parameters}
    found: list[list[PendingGradient]] = [[] for _ in range(len(units) + 1)]
    for gradient in (part for each in pending for part in each.parts):
        found[place_of.get(id(sources.find_leaf(gradient.weight)), 0)].append(gradient)
    pending.clear()
    return found
