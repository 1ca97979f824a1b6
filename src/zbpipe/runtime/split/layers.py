"""Layers that defer their weight gradient: I keeps x and dY, W multiplies them.

I runs one ordinary backward. Instead of dW = dY^T x, a linear layer puts the pair (x, dY) into the recording
`WeightGradients`. W multiplies and accumulates all pairs later. I walks the autograd graph once and frees it, so
checkpointed blocks are recomputed once.

While nothing records, the same layers compute dW at once, as any layer does. So gradients are complete in a full
backward, in torch's metadata inference before the first step, in a loss that runs its own backward during F, and in a
module without a pipeline.

A compiled region allows no side effects. There x and dY leave as the gradients of two inputs, the slots, which
`zbpipe.runtime.split.compiled` provides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from zbpipe.runtime._torch import autograd, compiler
from zbpipe.runtime.attributes import declares
from zbpipe.runtime.split.contents import Checks
from zbpipe.runtime.split.further import Further, separate_tensors, with_factors_first
from zbpipe.runtime.split.products import (
    LINEAR,
    PendingGradient,
    Sharing,
    WeightGradients,
    WeightProduct,
    WeightProducts,
    require_shape,
    rows,
)
from zbpipe.runtime.split.slots import SlotHandle, Use, linear_in_slots, make_use


def defer_weights(module: nn.Module, gradients: WeightGradients) -> None:
    """Make the layers in `module` defer their weight gradients while `gradients` records.

    These are all `nn.Linear` and every module with an attribute `weight_products` (see
    `zbpipe.runtime.split.products.WeightProduct`). With an empty one a layer defers nothing. Parameters, buffers and
    their names do not change. In I autograd computes all gradients that cannot be deferred: of weights with hooks, of
    weights that are more than a cast or a transpose of a parameter, of tensor subclasses other than DTensor, and of the
    parameters of all other layers. An already prepared layer defers to the new `gradients` from now on.
    """
    autograd.register_types()
    for layer in module.modules():
        if compiler.is_optimized(layer):
            continue
        products = _find_products(layer)
        if layer.__dict__.get(_ATTRIBUTE) is not None:
            deferral_of(layer).gradients = gradients
            deferral_of(layer).products = products
        elif products:
            vars(layer)[_ATTRIBUTE] = Deferral(layer, products, gradients)
            _replace_forward(layer)


def _find_products(layer: nn.Module) -> WeightProducts:
    """A layer's `weight_products`, without a call of the layer's `__getattr__`."""
    if not declares(layer, "weight_products"):
        return {F.linear: LINEAR} if isinstance(layer, nn.Linear) else {}
    products: Any = layer.weight_products
    pairs = products.items() if isinstance(products, Mapping) else [(None, products)]
    if not all(callable(function) and isinstance(product, WeightProduct) for function, product in pairs):
        raise ValueError(
            f"weight_products of {type(layer).__name__} has to be a mapping of functions to"
            f" zbpipe.runtime.split.WeightProduct, such as {{torch.bmm: WeightProduct(...)}}, or {{}} for a layer that"
            f" defers nothing, got {products!r}"
        )
    return {autograd.find_dispatched(function): product for function, product in products.items()}


def deferral_of(layer: nn.Module) -> Deferral:
    """The deferral that `defer_weights` has attached to `layer`."""
    return cast(Deferral, layer.__dict__[_ATTRIBUTE])


def deferrals(module: nn.Module) -> dict[str, Deferral]:
    """Deferrals of all prepared layers, by layer name."""
    # None: the layer was unpickled.
    layers = [(name, layer) for name, layer in module.named_modules() if layer.__dict__.get(_ATTRIBUTE) is not None]
    return {name: deferral_of(layer) for name, layer in layers}


_ATTRIBUTE = "_weight_deferral"


class Deferral:
    """Deferral of one layer's weight gradients."""

    def __init__(self, layer: nn.Module, products: WeightProducts, gradients: WeightGradients) -> None:
        self.layer = layer
        self.products = products
        self.gradients = gradients
        self.original = layer.forward
        self.deferrable: set[Callable[..., Any]] = set()
        """Functions of `products` with deferrable calls so far."""
        self.is_caught = False
        """Whether a torch function mode catches the products in the layer's own forward."""
        self.is_declared = declares(layer, "weight_products")
        """Whether the layer itself declares its products."""
        self.stays_in_i = False
        """Whether the first I saw x or dY change, so that W could not use them."""
        self.checks, self.sharing = Checks(), Sharing()
        self.has_node_hooks = False
        """Whether hooks on autograd's own node of a weight wait for its gradient."""
        self.handle: SlotHandle | None = None
        """Slots for the next call in a compiled region, for a layer without its own forward."""
        self.permits: defaultdict[str, Callable[[], str]] = defaultdict(compiler.make_slot_permit)
        """Permits for a product to leave its region, by weight name, asked during the region's compilation."""
        self.seen: list[Use] | None = None
        """List that collects each product with a plain parameter; None if not requested."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` with one of the layer's weights."""
        if torch.compiler.is_compiling():
            return linear_in_slots(input, weight, bias, self.handle)
        target = self._find_target(input, weight)
        if target is None or weight.dim() != 2 or (bias is not None and bias.dim() > 1):
            return F.linear(input, weight, bias)
        self.deferrable.add(F.linear)
        x = input
        if autograd.any_autocast() and (dtype := _choose_dtype(x)) != x.dtype:
            x = _SharedCast.apply(x, dtype, self)
        y: Tensor = _DeferredLinear.apply(x, weight, bias, self, target)
        if self.seen is not None and (own := self._find_name(weight)):
            self.seen.append(make_use(own, F.linear, LINEAR, (rows(input), rows(y))))
        return y

    def multiply(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A product of `self.products`: `function(x, weight, ...)`."""
        x, weight, *rest = args
        target = self._find_target(x, weight)
        further, more = separate_tensors(rest, kwargs)
        if target is None or any(each.requires_grad for each in more):
            return function(*args, **kwargs)
        self.deferrable.add(function)
        product = self.products[function]
        y = _DeferredProduct.apply(x, weight, (function, product, further), self, target, *more)
        # Not under autocast, where the dtypes differ.
        if self.seen is not None and y.dtype == x.dtype and (own := self._find_name(weight)):
            self.seen.append(make_use(own, function, product, (x, y), further, more))
        return y

    def owns(self, weight: object) -> bool:
        """Whether `weight` is one of the layer's parameters, or a cast, a transpose or a similar derivative of one."""
        leaf = autograd.find_leaf(weight) if isinstance(weight, Tensor) else None
        return any(leaf is parameter for parameter in self.layer.parameters(recurse=False))

    def look_for_hooks(self) -> None:
        """Look for hooks on nodes, once per step. Hooks on the weight itself are checked at each use."""
        parameters = self.layer.parameters(recurse=False)
        self.has_node_hooks = any(p.requires_grad and autograd.has_hooks_on_node(p) for p in parameters)

    def _find_target(self, x: Tensor, weight: Tensor) -> Tensor | GradientEdge | None:
        """Target for the gradient of `weight` in W; None if it cannot be deferred."""
        if not (self.products and weight.requires_grad and torch.is_grad_enabled()):
            return None
        if type(x) in PLAIN and type(weight) in PLAIN:
            if x.layout is not torch.strided or x.is_nested or autograd.is_transformed():
                return None
            return weight if weight.is_leaf else autograd.find_edge(weight)
        are_sharded = isinstance(x, DTensor) and isinstance(weight, DTensor)
        return autograd.find_edge(weight) if are_sharded else None

    def _find_name(self, weight: Tensor) -> tuple[str, tuple[int, ...]] | None:
        """Name of the plain parameter of which `weight` is a cast or a transpose, and the order of its dimensions."""
        leaf, permutation = autograd.find_leaf(weight), autograd.find_permutation(weight)
        names = [name for name, own in self.layer.named_parameters(recurse=False) if own is leaf]
        return (names[0], permutation) if names and permutation is not None and type(leaf) in PLAIN else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferral:
        twin = object.__new__(Deferral)
        memo[id(self)] = twin
        vars(twin).update(deepcopy(vars(self) | {"handle": None, "seen": None}, memo))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None, so that the layer can be loaded without zbpipe."""
        return type(None), ()


# Methods of the layer, not of its Deferral: only then does the compiler see the same code in two layers, and reuse one
# block's graph for the next.


def _replace_forward(layer: nn.Module) -> None:
    plain = MethodType(_linear_forward, layer)
    if _is_linears_own(layer.forward, layer):
        vars(layer)["forward"] = plain  # bypasses a user's `__setattr__`
    elif not _rebind(layer.forward, layer, plain):
        deferral_of(layer).is_caught = True
        vars(layer)["forward"] = MethodType(_catching_forward, layer)


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return deferral_of(layer).linear(input, layer.weight, layer.bias)


# A pickled method is restored by its name: as the forward of the layer's class.
_linear_forward.__name__ = "forward"


def _catching_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the layer's own forward, and catch the products inside."""
    deferral = deferral_of(layer)
    if torch.compiler.is_compiling():
        # Checkpointing allows no torch function mode in a compiled region: see `WeightWithSlots`.
        return deferral.original(*args, **kwargs)
    return _catch_products(deferral, args, kwargs)


_catching_forward.__name__ = "forward"


# If the compiler gives up a region and runs it eagerly, it would still compile each call of the mode.
@compiler.exclude_from_graphs
def _catch_products(deferral: Deferral, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    for name in deferral.permits:  # the stand-ins of a region that was given up
        vars(deferral.layer).pop(name, None)
    with _CatchProducts(deferral):
        return deferral.original(*args, **kwargs)


def _is_linears_own(function: object, layer: nn.Module) -> bool:
    return isinstance(function, MethodType) and function.__func__ is nn.Linear.forward and function.__self__ is layer


def _rebind(function: object, layer: nn.Module, forward: MethodType) -> bool:
    """Replace `nn.Linear.forward` in a closure `function`, as in TorchTitan's tensor parallelism; returns whether it
    did."""
    for cell in getattr(function, "__closure__", None) or ():
        if _is_linears_own(cell.cell_contents, layer):
            cell.cell_contents = forward
            return True
        if isinstance(cell.cell_contents, FunctionType) and _rebind(cell.cell_contents, layer, forward):
            return True
    return False


class _CatchProducts(TorchFunctionMode):
    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self.deferral = deferral

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Not in a region within the layer.
        if func in self.deferral.products and not torch.compiler.is_compiling():
            factors_first, options = with_factors_first(args, kwargs)
            if len(factors_first) > 1 and self.deferral.owns(factors_first[1]):
                if func is F.linear:
                    return self.deferral.linear(*factors_first, **options)
                return self.deferral.multiply(func, factors_first, options)
        return func(*args, **kwargs)


_Call = tuple[Callable[..., Tensor], WeightProduct, Further]
Target = Tensor | GradientEdge
"""Target of a weight gradient."""
PLAIN = (Tensor, nn.Parameter)
"""Types of weights whose gradient is only a product of x and dY."""


def _choose_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which to keep an x that autocast casts: the result's if it is smaller. Otherwise W casts x again."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype is not torch.float64:
        return min(x.dtype, torch.get_autocast_dtype(device), key=lambda dtype: dtype.itemsize)
    return x.dtype


class _SharedCast(torch.autograd.Function):
    """x in autocast's dtype. Layers with the same x share the memory, and each gives its own dX."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, deferral: Deferral) -> Tensor:
        ctx.dtype = x.dtype
        return deferral.gradients.cast(x, dtype, deferral.sharing)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx.to(ctx.dtype), None, None


class _DeferredLinear(torch.autograd.Function):
    """y = x W^T + b, whose backward gives dX and db at once and defers dW if something records.

    x: (..., in); W: (out, in); b: (out,) or None; y: (..., out).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral, target: Target) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        # Checkpointing may return a copy of a saved tensor. Only the target identifies the gradient's place.
        ctx.deferral, ctx.target = deferral, target
        if bias is not None:
            ctx.bias_dtype = bias.dtype
        return autograd.without_base(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x, _, of_bias, *_ = ctx.needs_input_grad
        dx = _lay_out_like(x, LINEAR.input_gradient(dy, weight).to(x.dtype)) if of_x else None
        x, dy = _detach(x, dy)
        pending = PendingGradient(ctx.deferral.layer, LINEAR, ctx.target, x, dy)
        dw = LINEAR.weight_gradient(dy, x) if is_due_now(ctx.deferral, pending, ctx.next_functions[1][0]) else None
        db = rows(dy).sum(0, dtype=ctx.bias_dtype) if of_bias else None
        return dx, dw, db, None, None


class _DeferredProduct(torch.autograd.Function):
    """y = f(x, W, ...), whose backward gives dX at once and defers dW if something records."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, call: _Call, deferral: Deferral, target: Target, *more: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None, *more)
        _, ctx.product, ctx.further = call
        ctx.deferral, ctx.target = deferral, target
        return autograd.without_base(_multiply(x, weight, call, deferral, target, *more))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *more = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ctx.product.of_input(dy, weight, ctx.further, more)
        x, dy, *more = _detach(x, dy, *more)
        pending = PendingGradient(ctx.deferral.layer, ctx.product, ctx.target, x, dy, ctx.further, tuple(more))
        if ctx.needs_input_grad[0]:
            require_shape(dx, x.shape, "input_gradient", pending)
        if is_due_now(ctx.deferral, pending, ctx.next_functions[1][0]):
            dw = pending.gradient()
        return dx, dw, None, None, None, *[None for _ in more]


def _multiply(x: Tensor, weight: Tensor, call: _Call, deferral: Deferral, target: Target, *more: Tensor) -> Tensor:
    function, _, further = call
    return further.call(function, x, weight, more)


autograd.copy_type(_DeferredProduct, _multiply)
autograd.copy_type(_SharedCast, lambda x, dtype, *_: x.to(dtype))
autograd.copy_type(_DeferredLinear, lambda x, weight, bias, *_: F.linear(x, weight, bias))


def _lay_out_like(x: Tensor, dx: Tensor) -> Tensor:
    """dX of a transposed x, transposed as autograd does: torch requires contiguous gradients between stages."""
    is_transposed = x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
    return dx.mT.contiguous().mT if is_transposed else dx


def _detach(*tensors: Tensor) -> list[Tensor]:
    """The tensors, detached: x would keep its graph alive until W, and others may hold dY."""
    return [each if torch.is_grad_enabled() else each.detach() for each in tensors]


def is_due_now(deferral: Deferral, pending: PendingGradient, node: Node) -> bool:
    """Whether the weight gradient has to be computed now. Otherwise defer it, if this backward computes it at all."""
    # It is due now if nothing records, the backward itself will be differentiated, hooks on the weight need the
    # gradient, or x or dY would change before W. The gradient goes to `node`, the next in autograd's graph.
    wanted = autograd.will_run(node)
    if wanted is False:
        return False
    hooked = deferral.has_node_hooks or (isinstance(pending.weight, Tensor) and autograd.has_hooks(pending.weight))
    if wanted is None or hooked or deferral.stays_in_i or torch.is_grad_enabled():
        return True
    return not deferral.gradients.defer(pending, deferral.checks)
