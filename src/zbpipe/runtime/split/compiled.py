"""The backward split in compiled regions: slots carry x and dY of every product out of the graph.

A compiled backward is a pure function, so a layer in it cannot store (x, dY). But the function may return them. Each
product takes two more inputs, the slots: tensors without memory in the shapes of x and of y. The product's backward
returns x and dY as the slots' "gradients" (`zbpipe.runtime.split.slots`). One autograd node before the region makes all
slots, so x and dY arrive in that node's backward.

The shapes of the slots have to be known before the region runs. So the first call with inputs of new shapes runs
without the compiler: in torch's metadata inference before the first step, or in `zbpipe.runtime.warm_up`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zbpipe.runtime._torch import autograd, compiler, fsdp, graph_products, traced
from zbpipe.runtime._torch.traced import Spec, spec
from zbpipe.runtime.split.layers import PLAIN, Deferral, deferrals
from zbpipe.runtime.split.products import PendingGradient, title
from zbpipe.runtime.split.slots import SlotHandle, Slots, Use, WeightWithSlots, dtype_in_slot, whole_layer

logger = logging.getLogger(__name__)

_MOST_SHAPES = 16
"""Limit of input shapes per region. For more, the region has no slots, and its weight gradients stay in I."""


def defer_in_compiled_regions(module: nn.Module) -> None:
    """Give slots to the prepared layers of `module` that run in `torch.compile(m)` or after `m.compile()`."""
    for name, each in module.named_modules():
        if compiler.is_compiled(each) and not isinstance(compiler.find_compiled_call(each), _Region):
            compiler.divert_compiled_call(each, _Region(each, name))


def are_compiled(module: nn.Module) -> bool:
    """Whether every called region of `module` has run with the compiler, by itself or as a part of another."""
    compiled = [each for each in module.modules() if compiler.is_compiled(each)]
    inner = {id(child) for each in compiled for child in each.modules() if child is not each}
    regions = [(compiler.find_compiled_call(each), id(each) in inner) for each in compiled]
    return all(
        region.has_run_compiled or (is_inner and not region.sites)  # it has sites if it was called by itself
        for region, is_inner in regions
        if isinstance(region, _Region)
    )


def forget_eager_calls(module: nn.Module) -> None:
    """Forget calls without the compiler before a step: their backward is over, or never comes, as in an evaluation."""
    for region in _list_regions(module):
        region.ran_eagerly.clear()


def _list_regions(module: nn.Module) -> list[_Region]:
    calls = [compiler.find_compiled_call(each) for each in module.modules() if compiler.is_compiled(each)]
    return [call for call in calls if isinstance(call, _Region)]


def list_products_in_regions(module: nn.Module) -> list[graph_products.GraphProduct]:
    """Products of all regions of `module` that have run without the compiler."""
    return [product for region in _list_regions(module) for product in region.products]


def list_leaves_in_regions(module: nn.Module) -> list[Tensor]:
    """Parameters that all regions of `module` have used without the compiler, for products or anything else."""
    return [leaf for region in _list_regions(module) for leaf in region.leaves]


class _Site(NamedTuple):
    """A product in a region that has slots."""

    deferral: Deferral
    use: Use
    slots: tuple[Tensor, ...]
    """The tensors of `Slots`, flat: templates without memory. Only shape, dtype and device matter."""

    @property
    def weight(self) -> Tensor:
        """The present parameter: FSDP replaces it."""
        return cast(Tensor, autograd.own_parameters(self.deferral.layer)[self.use.weight_name])

    @property
    def is_undeclared(self) -> bool:
        """Whether another object replaces the weight of a layer that does not declare its products."""
        return self.deferral.is_caught and not self.deferral.is_declared and self.use.function is not whole_layer

    def open(self, weight: Tensor, slots: Sequence[Tensor]) -> None:
        """Let the product use these slots in the next call of its layer."""
        deferral, use = self.deferral, self.use
        handle = SlotHandle(use, Slots(slots[0], slots[1], tuple(slots[2:])), deferral.permits[use.weight_name])
        if use.function is whole_layer:
            deferral.handle = handle
            tensors = {use.weight_name: weight.detach()}
            if deferral.twin is None:
                deferral.twin = traced.make_twin(deferral.layer, tensors)
            else:  # the same object: the compiler would compile for another
                traced.renew_twin(deferral.twin, deferral.layer, tensors)
        elif deferral.is_caught:
            unchanged = tuple(range(weight.dim()))
            vars(deferral.layer)[use.weight_name] = WeightWithSlots(weight, unchanged, handle)
        else:
            deferral.handle = handle

    def close(self) -> None:
        """Take the slots back: the layer may run elsewhere before the next call."""
        self.deferral.handle = None
        vars(self.deferral.layer).pop(self.use.weight_name, None)


class _Region:
    """The calls of one compiled module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = title(name, type(module).__name__)
        self._deferrals = tuple(deferrals(module).values())
        self.sites: dict[tuple[Any, ...], tuple[_Site, ...]] = {}
        """Sites by shape, dtype and device of the tensors among the inputs."""
        self._next: tuple[_Site, ...] = ()
        self.ran_eagerly: list[autograd.Memory] = []
        """Input memory of calls that activation checkpointing will repeat in the backward."""
        self.has_run_compiled = False
        self.products: list[graph_products.GraphProduct] = []
        """Products with weights in the last call without the compiler. A compiled call's graph hides them."""
        self.leaves: list[Tensor] = []
        """Parameters in that call."""
        self._unshards = fsdp.is_fsdp(module) and not compiler.is_optimized(module)
        """Whether FSDP gathers the weights within this call. With `torch.compile(module)` it does so before."""
        if self._unshards:
            # After FSDP's own hook, so that the region uses the same weights; and outside the region's graph.
            module.register_forward_pre_hook(compiler.exclude_from_graphs(lambda module, args: self._provide_slots()))

    def __call__(self, compiled: Callable[..., Any], eager: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the region on these inputs."""
        if torch.compiler.is_compiling() or _eager.get():  # as a part of a larger one
            return eager(*args, **kwargs)
        if not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        inputs, memory = tuple(map(spec, tensors)), autograd.refer_to_memory(tensors)
        if autograd.is_in_backward() and self._repeats_eager_call(memory):
            with _with_inner_regions_eager():
                return eager(*args, **kwargs)
        if inputs not in self.sites and len(self.sites) < _MOST_SHAPES:
            self.ran_eagerly.append(memory)
            with self._learn(inputs), _with_inner_regions_eager():
                output = eager(*args, **kwargs)
            made, given = autograd.tree_leaves(output), tensors
            self.products = graph_products.find_products(made, given)
            self.leaves = graph_products.find_leaves(made, given)
            return output
        self.has_run_compiled = True
        last = compiler.find_last_compilation()
        try:
            output = self._call_with_slots(inputs, compiled, args, kwargs)
        except compiler.CompilerError as error:
            if not self._give_up_stand_ins(str(error).partition("\n")[0]):
                raise
            return self._call_with_slots(inputs, compiled, args, kwargs)
        if complaints := compiler.find_complaints_since(last):
            self._report(complaints[0])
        return output

    def _call_with_slots(
        self, inputs: tuple[Any, ...], compiled: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        self._next = self.sites.get(inputs, ())
        if not self._unshards:
            self._provide_slots()
        try:
            return compiled(*args, **kwargs)
        finally:
            for site in self._next:
                site.close()
            self._next = ()

    def _report(self, complaint: str) -> None:
        """Log that zbpipe breaks the region's graph, or has it compiled again."""
        if not self._give_up_stand_ins(complaint):
            logger.warning(
                "the compiler breaks the graph of %s, or compiles it again, because of zbpipe: %s. Weight gradients of"
                " layers in it with weight_products = {} stay in I, and the compiler sees these layers as they are",
                *(self._name, complaint),
            )

    def _give_up_stand_ins(self, complaint: str) -> bool:
        """Compile layers that do not declare their products as they are; returns whether there are any."""
        given_up = {site.deferral for sites in self.sites.values() for site in sites if site.is_undeclared}
        for deferral in given_up:
            deferral.may_use_stand_ins = False
        self.sites = {key: tuple(s for s in sites if not s.is_undeclared) for key, sites in self.sites.items()}
        if given_up:
            logger.warning(
                "the compiler cannot compile %s with objects in the place of the weights of %s: %s. These weight"
                " gradients stay in I, unless the layers declare their products by weight_products",
                *(self._name, ", ".join(sorted({type(each.layer).__name__ for each in given_up})), complaint),
            )
        return bool(given_up)

    def _repeats_eager_call(self, memory: autograd.Memory) -> bool:
        """Whether this call in a backward repeats one that ran without the compiler."""
        if memory in self.ran_eagerly:
            self.ran_eagerly.remove(memory)
            return True
        if self.has_run_compiled or not self.ran_eagerly:
            return False
        # A checkpoint that begins before the region recomputes the inputs in other memory. While torch infers shapes,
        # before the first step, any call in a backward is such a repetition.
        self.ran_eagerly.pop()
        return True

    @contextmanager
    def _learn(self, inputs: tuple[Any, ...]) -> Iterator[None]:
        for deferral in self._deferrals:
            deferral.seen, deferral.calls = [], []
        try:
            yield
            backend = compiler.find_backend(self._module)
            self.sites[inputs] = tuple(
                [site for deferral in self._deferrals for site in _find_sites(deferral, backend)]
            )
        finally:
            for deferral in self._deferrals:
                deferral.seen = None

    def _provide_slots(self) -> None:
        weights_now = ((site, site.weight) for site in self._next)
        found = [(site, each) for site, each in weights_now if type(each) in PLAIN and each.requires_grad]
        if found:
            sites, weights = zip(*found, strict=True)
            slots = iter(_Slots.apply(sites, *weights))
            for site, weight in found:
                site.open(weight, [next(slots) for _ in site.slots])


_eager: ContextVar[bool] = ContextVar("_eager", default=False)
"""Whether an outer region runs without the compiler. Inner regions then also do, so that it sees their products."""


@contextmanager
def _with_inner_regions_eager() -> Iterator[None]:
    token = _eager.set(True)
    try:
        yield
    finally:
        _eager.reset(token)


def _find_sites(deferral: Deferral, backend: Any) -> Iterator[_Site]:
    """Products of a layer that can leave the region."""
    if deferral.is_caught and (use := deferral.find_use_of_layer(backend)) is not None:
        yield _Site(deferral, use, tuple(map(_without_memory, (use.x, use.y))))
        return
    # A weight that is multiplied twice would need two pairs of slots, and the calls cannot be distinguished.
    names = Counter(each.weight_name for each in deferral.seen or ())
    uses = [each for each in deferral.seen or () if names[each.weight_name] == 1]
    if deferral.is_caught and uses and not deferral.allows_stand_ins(uses):
        return
    for use in uses:
        if deferral.is_caught:
            compiler.let_compiler_dispatch(use.function)
        more = [each._replace(dtype=dtype_in_slot(each.dtype)) for each in use.more]
        yield _Site(deferral, use, tuple(map(_without_memory, (use.x, use.y, *more))))


class _Slots(torch.autograd.Function):
    """Makes the slots of a region. Its backward receives every x and dY, and defers the weight gradients.

    If nothing records, it returns the weight gradients to autograd, as the region itself would.
    """

    @staticmethod
    def forward(ctx: Any, sites: tuple[_Site, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sites = sites
        ctx.weights = weights
        return tuple([each.detach() for site in sites for each in site.slots])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *carried: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.sites)
        end = len(carried)
        casts: dict[tuple[object, ...], Tensor] = {}
        # From the last to the first, in autograd's order. W takes them from the end of the list.
        for n in reversed(range(len(ctx.sites))):
            (deferral, use, slots), weight = ctx.sites[n], ctx.weights[n]
            x, dy, *more = carried[end - len(slots) : end]
            end -= len(slots)
            if x is None or dy is None:  # the layer's result was not used
                continue
            if use.function is F.linear and x.dtype.itemsize > dy.dtype.itemsize:
                x = _cast(x, dy.dtype, casts)
            further = use.further, use.tensors(cast(Sequence[Tensor], more))
            pending = PendingGradient(
                deferral.layer, use.product, weight, x.detach(), dy.detach(), *further, inner=use.inner
            )
            if deferral.is_due_now(pending, ctx.next_functions[n][0]):
                gradients[n] = pending.gradient().to(weight.dtype)
        return None, *gradients


autograd.copy_type(_Slots, lambda sites, *_: tuple([each.detach() for site in sites for each in site.slots]))


def _cast(x: Tensor, dtype: torch.dtype, casts: dict[tuple[object, ...], Tensor]) -> Tensor:
    """Cast x outside the region, so that under autocast layers with the same x share the result."""
    place = x.data_ptr(), x.shape, x.stride(), dtype
    if place not in casts:
        casts[place] = x.to(dtype)
    return casts[place]


def _without_memory(like: Spec) -> Tensor:
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
