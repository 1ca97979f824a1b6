"""Layers that defer their weight gradient: I keeps x and dY, W multiplies them.

I runs one ordinary backward. Instead of dW = dY^T x, a linear layer records the pair (x, dY) in `WeightGradients`. W
multiplies and accumulates all pairs later. I walks the autograd graph once and frees it, so checkpointed blocks are
recomputed once.

While nothing records, the same layers compute dW at once. So gradients are complete in a full backward, in torch's
metadata inference, in a loss that runs its own backward during F, and in a module without a pipeline.

A compiled region defers as a whole: its backward is an autograd Function (`zbpipe.runtime.split.functions`), and the
compiler sees the layers in it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from zbpipe.runtime._torch import autograd, compiler, fsdp2
from zbpipe.runtime._torch.attributes import declares, replaced
from zbpipe.runtime.split.deferral import Deferral
from zbpipe.runtime.split.functions import watch
from zbpipe.runtime.split.products import FROM_BACKWARD, LINEAR, WeightProduct, is_apply
from zbpipe.runtime.split.sources import PLAIN
from zbpipe.runtime.split.torchs_products import COMPOSITES, PRODUCTS, Reader, read_declared
from zbpipe.runtime.split.weight_gradients import WeightGradients


def defer_weights(module: nn.Module, gradients: WeightGradients) -> None:
    """Let the layers in `module` defer their weight gradients while `gradients` records.

    These are all modules whose forward multiplies with a parameter by a torch function that zbpipe knows
    (`zbpipe.runtime.split.torchs_products`), or by one that the attribute `weight_products` declares. A module with an
    empty `weight_products` defers nothing. Parameters, buffers and their names do not change. In I autograd computes
    all gradients that cannot be deferred: of weights with hooks, of weights that are more than a view or a cast of a
    parameter, of tensor subclasses other than DTensor. A second call replaces `gradients`.
    """
    autograd.register_types()
    is_sharded = any(map(fsdp2.is_fsdp, module.modules()))
    for layer in module.modules():
        if compiler.is_optimized(layer):
            continue
        products = _find_products(layer)
        if layer.__dict__.get(_ATTRIBUTE) is not None:
            deferral_of(layer).gradients = gradients
            deferral_of(layer).products = products
        elif products:
            _replace_forward(layer, Deferral(layer, products, gradients, is_sharded))


def defer_in_compiled_regions(module: nn.Module, gradients: WeightGradients) -> None:
    """As `defer_weights`, for the parts of `module` under `torch.compile(m)` or `m.compile()`, each as a whole."""
    is_sharded = any(map(fsdp2.is_fsdp, module.modules()))
    for region in module.modules():
        if compiler.is_compiled(region):
            if vars(region).get(_ATTRIBUTE) is None:
                vars(region)[_ATTRIBUTE] = Deferral(region, {}, gradients, is_sharded)
            deferral = deferral_of(region)
            deferral.gradients = gradients
            deferral.is_region = True
            compiler.divert_compiled_call(region, partial(_run_region, deferral))


def _run_region(
    deferral: Deferral, compiled: Callable[..., Any], eager: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if torch.compiler.is_compiling() or deferral.gradients.is_inferring:
        return eager(*args, **kwargs)
    if not torch.is_grad_enabled():
        return compiled(*args, **kwargs)
    return watch(deferral, compiled, args, kwargs)


def catch_around(module: nn.Module, parameters: Iterable[str], gradients: WeightGradients) -> bool:
    """Also catch products in the modules around those that own `parameters`. Returns whether there are any. A module
    may multiply with the weight of a child that it does not call."""
    modules = dict(module.named_modules())
    compiled = {id(part) for each in modules.values() if compiler.is_compiled(each) for part in each.modules()}
    around = {}
    for name in parameters:
        path = name.rpartition(".")[0]
        while path and (path := path.rpartition(".")[0]) and isinstance(modules[path], (nn.ModuleList, nn.ModuleDict)):
            pass
        if not declares(modules.get(name.rpartition(".")[0], module), "weight_products"):
            around[path] = modules[path]
    found = [each for each in around.values() if vars(each).get(_ATTRIBUTE) is None and id(each) not in compiled]
    is_sharded = any(map(fsdp2.is_fsdp, modules.values()))
    for layer in found:
        deferral = Deferral(layer, PRODUCTS, gradients, is_sharded)
        deferral.checks.seen_steps = 1  # the first step is over: no model waits for the device in its third one
        _replace_forward(layer, deferral)
    return bool(found)


def _find_products(layer: nn.Module) -> Mapping[Callable[..., Any], Reader]:
    """Readers of a layer's products, without a call of its `__getattr__`."""
    if declares(layer, "weight_products"):
        declared = _read_declared_products(layer)
        return {**PRODUCTS, **declared} if layer.weight_products else {}
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, torch.jit.ScriptModule)):
        return {}
    own = autograd.own_parameters(layer).values()
    owns_matrices = any(each is not None and (is_lazy(each) or each.dim() > 1) for each in own)
    return PRODUCTS if isinstance(layer, nn.Linear) or owns_matrices else {}


def _read_declared_products(layer: nn.Module) -> Mapping[Callable[..., Any], Reader]:
    products: Any = layer.weight_products
    pairs = products.items() if isinstance(products, Mapping) else [(None, products)]
    if not all(
        is_apply(function)
        if each is FROM_BACKWARD
        else callable(function) and (isinstance(each, WeightProduct) or callable(each))
        for function, each in pairs
    ):
        raise ValueError(
            f"weight_products of {type(layer).__name__} has to be a mapping of functions to the gradients of their"
            " weights, such as {torch.bmm: lambda dy, x: x.mT @ dy} or {MyFunction.apply: FROM_BACKWARD}, or {} for a"
            f" layer that defers nothing, got {products!r}"
        )
    return {
        # torch function modes see the private one
        autograd.grouped_mm if function is F.grouped_mm else function: read_declared(
            each if isinstance(each, WeightProduct) else WeightProduct(each)
        )
        for function, each in products.items()
        if not (function is F.linear and each is LINEAR) and each is not FROM_BACKWARD
    }


def deferral_of(layer: nn.Module) -> Deferral:
    return cast(Deferral, layer.__dict__[_ATTRIBUTE])


def deferrals(module: nn.Module) -> dict[str, Deferral]:
    """Deferrals of all prepared layers, by layer name."""
    # None: the layer was unpickled.
    layers = [(name, layer) for name, layer in module.named_modules() if layer.__dict__.get(_ATTRIBUTE) is not None]
    return {name: deferral_of(layer) for name, layer in layers}


_ATTRIBUTE = "_weight_deferral"


# Methods of the layer, not of its Deferral, so that the compiler sees the same code in two layers, and reuses one
# block's graph for the next.


def _replace_forward(layer: nn.Module, deferral: Deferral) -> None:
    plain, own = MethodType(_linear_forward, layer), vars(layer)  # bypasses a user's `__setattr__`
    own[_ATTRIBUTE] = deferral
    if _is_linears(layer.forward, layer):
        own["forward"] = plain
    elif not _rebind(layer.forward, layer, plain):
        deferral.is_caught = True
        own["forward"] = MethodType(_catching_forward, layer)


def _is_linears(function: object, layer: nn.Module) -> bool:
    return isinstance(function, MethodType) and function.__func__ is nn.Linear.forward and function.__self__ is layer


def _rebind(function: object, layer: nn.Module, forward: MethodType, seen: frozenset[object] = frozenset()) -> bool:
    """Replace `nn.Linear.forward` in a closure `function`, as in TorchTitan's TP. Catching would take some 20 us more
    per layer. Returns whether it did."""
    seen |= {function}  # a function may call itself
    for cell in getattr(function, "__closure__", None) or ():
        if _is_linears(cell.cell_contents, layer):
            cell.cell_contents = forward
            return True
        inner = cell.cell_contents
        if isinstance(inner, FunctionType) and inner not in seen and _rebind(inner, layer, forward, seen):
            return True
    return False


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    deferral: Deferral
    if torch.compiler.is_compiling() or (deferral := layer.__dict__[_ATTRIBUTE]).gradients.are_whole:
        return F.linear(input, layer.weight, layer.bias)
    args = input, (weight := layer.weight), layer.bias  # parametrizations run at each read
    if (y := deferral.multiply(F.linear, args, {})) is not None:
        return y  # type: ignore[no-any-return]
    # A weight of another class, such as a quantised one, may have autograd Functions as products.
    if type(weight) not in PLAIN and deferral.owns(weight):
        return watch(deferral, F.linear, args, {})  # type: ignore[no-any-return]
    return F.linear(*args)


# A pickled method is restored by its name, as the forward of the layer's class.
_linear_forward.__name__ = "forward"


def _catching_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    deferral = deferral_of(layer)
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or deferral.gradients.are_whole
        or not (deferral.products or deferral.may_call_functions)
    ):
        return deferral.original(*args, **kwargs)
    return _catch_products(deferral, args, kwargs)


_catching_forward.__name__ = "forward"


# If the compiler gives up on a region and runs it eagerly, it would still compile each call of the mode.
@compiler.exclude_from_graphs
def _catch_products(deferral: Deferral, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not deferral.products:
        return watch(deferral, deferral.original, args, kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _CatchProducts(deferral) as mode, _catch_applies(deferral.applies, mode.__torch_function__):
            return deferral.original(*args, **kwargs)

    return watch(deferral, run, args, kwargs)


@contextmanager
def _catch_applies(applies: Iterable[Callable[..., Any]], catch: Callable[..., Any]) -> Iterator[None]:
    """Context in which calls of these `apply`, which no mode sees, run `catch(apply, types, args, kwargs)`."""
    with ExitStack() as stack:
        for each in applies:
            owner: Any = each.__self__  # type: ignore[attr-defined]
            own = vars(owner).get("apply")
            owner.apply = staticmethod(lambda *args, _apply=each, **options: catch(_apply, (), args, options))
            stack.callback(partial(delattr, owner, "apply") if own is None else partial(setattr, owner, "apply", own))
        yield


class _CatchProducts(TorchFunctionMode):
    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self.deferral, self.products = deferral, deferral.products
        self.hooks = autograd.find_saving_hooks()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.products and self._may_defer():
            y = self.deferral.multiply(func, args, kwargs or {})
            return func(*args, **(kwargs or {})) if y is None else y
        if func in COMPOSITES and self._may_defer():
            with self, replaced(F, has_torch_function=lambda tensors: False):
                return func(*args, **(kwargs or {}))
        if func is Tensor.register_hook and not args[0].is_leaf:
            owns = self.deferral.owns(args[0]) or self.deferral.is_made(args[0], through_products=True)
            self.deferral.has_hooks_on_views |= owns
        return func(*args, **kwargs) if kwargs else func(*args)

    def _may_defer(self) -> bool:
        # Not in a region within the layer, nor in a checkpoint within it, which runs again without this mode.
        return not torch.compiler.is_compiling() and autograd.find_saving_hooks() == self.hooks
