"""Layers that delay their weight gradients themselves, as Transformer Engine's do with `delay_wgrad_compute=True`.

In I such a layer stores its kernels' inputs, and W asks it for one stored gradient after the other. Tested with a
stand-in of the same interface, because Transformer Engine needs CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbpipe.runtime._torch import fsdp2
from zbpipe.runtime._torch.attributes import declares, plain_attribute
from zbpipe.runtime.split.products import LINEAR, PendingGradient


def delays(layer: Any) -> bool:
    store = plain_attribute(layer, "wgrad_store")
    return declares(layer, "backward_dw") and getattr(store, "context", None) is not None


def delay_in_i_alone(module: nn.Module) -> Sequence[nn.Module]:
    """The layers in `module` that delay. They did in every backward, and from now on only do in `delaying`."""
    layers: list[Any] = [each for each in module.modules() if delays(each)]
    for each in layers:
        each.wgrad_store.disable_delay_wgrad_compute()
    return layers


def forget(layers: Iterable[Any]) -> None:
    """Empty the stores, as after a step that failed between an I and its W."""
    for each in layers:
        while each.wgrad_store.context.qsize():
            each.wgrad_store.context.get_nowait()


@contextmanager
def delaying(layers: Sequence[Any], pending: list[PendingGradient]) -> Iterator[None]:
    """Context of an I in which these layers delay. Afterwards `pending` also has their gradients."""
    before = [(each.wgrad_store.context.qsize(), fsdp2.mark_gradients(each)) for each in layers]
    with _enabled(layers):
        yield
    for layer, (stored, marks) in zip(layers, before, strict=True):
        if number := layer.wgrad_store.context.qsize() - stored:
            now = fsdp2.mark_gradients(layer)
            in_i = [each for each in _own(layer) if each.dim() == 1 and now[id(each)] != marks[id(each)]]
            pending.append(_Delayed(layer, number, in_i))


@contextmanager
def _enabled(layers: Iterable[Any]) -> Iterator[None]:
    for layer in layers:
        layer.wgrad_store.enable_delay_wgrad_compute()
    try:
        yield
    finally:
        for layer in layers:
            layer.wgrad_store.disable_delay_wgrad_compute()


def _own(layer: nn.Module) -> list[Tensor]:
    return [each for each in layer.parameters() if each.requires_grad]


class _Delayed(PendingGradient):
    def __init__(self, layer: Any, number: int, in_i: list[Tensor]) -> None:
        weight = max(_own(layer), key=Tensor.numel)
        nothing = torch.empty(0, device=weight.device)
        super().__init__(layer, LINEAR, weight, nothing, nothing, versions=(0, 0))
        self._number, self._in_i = number, {id(each) for each in in_i}

    def accumulate(self) -> None:
        layer: Any = self.layer
        store = layer.wgrad_store.context
        left = store.qsize() - self._number
        while store.qsize() > left:
            before = {each: each.grad for each in _own(layer)}
            # The layer replaces gradients of weights, but not existing gradients of biases.
            for each in before:
                each.grad = each.detach() if id(each) in self._in_i else None
            with _enabled([layer]):
                layer.backward_dw()
            for each, grad in before.items():
                found = None if id(each) in self._in_i else each.grad
                each.grad = grad if found is None else found if grad is None else grad.add_(found)
