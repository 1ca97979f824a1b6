"""The deferral of a layer's weight gradients: how F, I and W treat its products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from zbpipe.runtime._torch import autograd, fsdp2, tensor_data
from zbpipe.runtime._torch.attributes import declares
from zbpipe.runtime._torch.autograd import map_leaves
from zbpipe.runtime.split import sources
from zbpipe.runtime.split.products import (
    FROM_BACKWARD,
    ExtraArguments,
    PendingGradient,
    Target,
    WeightProduct,
    is_apply,
)
from zbpipe.runtime.split.torchs_products import PRODUCTS, Factors, Reader
from zbpipe.runtime.split.weight_gradients import Checks, WeightGradients


class Deferral:
    def __init__(
        self,
        layer: nn.Module,
        products: Mapping[Callable[..., Any], Reader],
        gradients: WeightGradients,
        is_sharded: bool,
    ) -> None:
        self.layer = layer
        self.is_sharded = is_sharded
        """Whether FSDP may free the layer's parameters between I and W."""
        self.products = products
        self.gradients = gradients
        self.original = layer.forward
        self.applies = tuple(filter(is_apply, products))
        """`apply` of autograd Functions among `products`, which no torch function mode sees."""
        self.deferrable: set[Callable[..., Any]] = set()
        """Functions among `products` with deferrable calls so far."""
        self.is_caught = False
        """Whether a torch function mode catches the products in the layer's own forward."""
        self.is_declared = declares(layer, "weight_products")
        self.stays_in_i = False
        """Whether x or dY changed during the first I, so that W could not use them."""
        self.checks = Checks()
        declared: Any = layer.weight_products if self.is_declared else {}
        self.declared_functions = frozenset(each.__self__ for each in declared if declared[each] is FROM_BACKWARD)
        self.may_call_functions = True
        """Whether the layer may call autograd Functions whose products can wait. Known after its first step."""
        self.calls_functions = False
        self.has_hooks_on_views = False
        """Whether hooks on a tensor made from a weight expect its gradient in an ordinary backward."""
        self.may_make_weights = True
        """Whether the layer may multiply with a weight made from parameters. Known after its first step."""
        self.makes_weights = False
        self._own: set[int] = set()
        self.is_region = False
        """Whether the layer is a compiled region, which defers the weight gradients of all layers in it."""
        self.has_run = False
        self.plans: dict[tuple[Any, ...], _Plan] = {}
        """This step's products, by function and weight id, or by the place where a view of a weight begins."""
        self._places: dict[Callable[..., Any], int] = {}
        self.known: dict[type, Any] = {}
        """This step's last backward of each Function, by the class of its node."""

    def multiply(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)` with a weight gradient that can wait; None if this is no such product."""
        place = self._places.get(function)
        if place is not None and place < len(args) and not kwargs:
            plan = self.plans.get((function, id(weight := args[place])))
            if plan is None and type(weight) is Tensor and (view := tensor_data.identify_view(weight)) is not None:
                plan = self.plans.get((function, *view))
            if plan is not None and plan.fits(weight, args):
                return plan.rule.multiply(function, args, kwargs, args[plan.x], weight, plan.bias)
        for factors in _read(self.products.get(function), args, kwargs):
            target = self._find_target(factors, function)
            if target is not None:
                return self._multiply(function, args, kwargs, factors, target)
        return None

    def _multiply(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        factors: Factors,
        target: Target,
    ) -> Any:
        bias = factors.bias if factors.bias is not None and factors.bias.requires_grad else None
        is_whole = factors.is_whole and not isinstance(target, sources.Made)
        inner = factors.inner or (factors.x.shape[-1] if factors.x.dim() else 1)
        bias_dtype = None if bias is None else bias.dtype
        rule = _Rule(self, target, factors.product, factors.extra, inner, factors.is_cast, is_whole, bias_dtype)
        y = rule.multiply(function, args, kwargs, factors.x, factors.weight, bias, factors.more)
        if y is None:
            return None
        self.deferrable.add(function)
        if not (factors.more or kwargs) and function in PRODUCTS:
            self._plan(function, args, factors, bias, rule)
        return y

    def _plan(
        self, function: Callable[..., Any], args: Sequence[Any], factors: Factors, bias: Tensor | None, rule: _Rule
    ) -> None:
        """Keep this product to recognise it again in this step with another x."""
        x, weight = factors.x, factors.weight
        places = {id(each): place for place, each in enumerate(args) if isinstance(each, Tensor)}
        part = rule.target if isinstance(rule.target, sources.Part) and not weight.is_complex() else None
        if not {id(x), id(weight)} <= places.keys() or not (weight.is_leaf or part is not None):
            return
        own = places[id(x)], places[id(weight)]
        rest = [
            (place, each, getattr(each, "requires_grad", False)) for place, each in enumerate(args) if place not in own
        ]
        if any(isinstance(each, Tensor) and not isinstance(each, nn.Parameter) for _, each, _ in rest):
            return  # the plan would keep an activation
        key = tensor_data.identify_view(weight) if part is not None else (id(weight),)
        assert key is not None
        shape = x.shape if function is torch.einsum else None  # the equation may broadcast
        self._places[function] = own[1]
        known = weight if part is None else part.leaf
        self.plans[function, *key] = _Plan(rule, own[0], type(x), x.dim(), shape, known, part, bias, rest)

    def declares(self, function: Callable[..., Any]) -> bool:
        return self.is_declared and self.products.get(function) is not PRODUCTS.get(function)

    def owns(self, weight: Tensor) -> bool:
        """Whether `weight` is one of the layer's parameters, or a view, a cast or a local part of one. A layer without
        `weight_products` also owns its children's parameters, with which it may multiply."""
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return False
        return id(weight) in self._own or self.owns_leaf(sources.find_leaf(weight))

    def owns_leaf(self, leaf: Tensor | None) -> bool:
        if id(leaf) not in self._own and isinstance(leaf, nn.Parameter):  # FSDP replaces parameters
            self._own = set(self._list_own())
        return id(leaf) in self._own

    def _list_own(self) -> Iterable[int]:
        if not self.is_region:
            return map(id, self.layer.parameters(recurse=not self.is_declared))
        # FSDP may have freed the parameters at the end of the region.
        kept = [each for each in self.layer.modules() if declares(each, "weight_products") and not each.weight_products]
        names = fsdp2.find_parameter_names(self.layer)
        kept_in_i = {name for each in kept for own in each.parameters(recurse=False) if (name := names.get(id(own)))}
        return (number for number, name in names.items() if name not in kept_in_i)

    def begin_step(self, is_settled: bool = True) -> None:
        """Check for hooks on nodes. Each use checks for hooks on the weight itself. A layer without products in its
        first step is ignored from now on, unless another trial follows."""
        self.plans.clear()  # FSDP replaces parameters
        self.known.clear()
        if self.has_run and is_settled:
            self.may_call_functions = self.calls_functions
            self.may_make_weights = self.makes_weights
            if self.is_caught and not (self.is_declared or self.deferrable):
                self.products = {}
        vars(self).pop("has_node_hooks", None)

    @cached_property
    def has_node_hooks(self) -> bool:
        """Whether hooks on a weight's own autograd node wait for its gradient, since before its first use in a step."""
        recurse = self.is_region or (self.is_caught and not self.is_declared)
        parameters = self.layer.parameters(recurse)
        return any(p.requires_grad and autograd.has_hooks_on_node(p) for p in parameters)

    def is_due_now(self, pending: PendingGradient, *nodes: Node) -> bool:
        """Whether the weight gradient has to be computed now. Otherwise it is deferred, if this backward needs it."""
        # It is due now if nothing records, the backward itself will be differentiated, hooks on the weight need the
        # gradient, or x or dY would change before W. The gradient goes to `nodes`, the next in autograd's graph.
        answers = {autograd.will_run(node) for node in nodes}
        if answers == {False}:
            return False
        wanted = None not in answers
        hooked = self.has_node_hooks or self.has_hooks_on_views
        made = pending.weight if isinstance(pending.weight, sources.Made) else None
        if made is not None and any(map(autograd.will_run, made.nodes)):  # this backward frees tensors that W needs
            return True
        is_frozen = True
        for leaf in (sources.find_leaf(pending.weight),) if made is None else made.leaves:
            is_frozen &= leaf is not None and not leaf.requires_grad
            hooked |= leaf is not None and autograd.has_hooks(leaf)
        if is_frozen:  # since F, so autograd adds nothing
            return False
        if not wanted or hooked or self.stays_in_i or torch.is_grad_enabled():
            return True
        return not self.gradients.defer(pending, self.checks)

    def defer_all(self, pending: PendingGradient, targets: Iterable[tuple[Node, Tensor]]) -> bool:
        """Defer the gradients of several leaves, each with the node that gets it, as one. False unless all can wait."""
        if self.gradients.on_trial or self.has_node_hooks or self.has_hooks_on_views or self.stays_in_i:
            return False
        can_wait = all(
            autograd.will_run(node) and leaf.requires_grad and not autograd.has_hooks(leaf) for node, leaf in targets
        )
        return can_wait and self.gradients.defer(pending, self.checks)

    def _find_target(self, factors: Factors, function: Callable[..., Any]) -> Target | None:
        """The target of the weight's gradient in W; None if it cannot be deferred."""
        x, weight = factors.x, factors.weight
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return None
        is_plain = type(x) in sources.PLAIN and type(weight) in sources.PLAIN
        if is_plain and (not x.layout is weight.layout is torch.strided or x.is_nested or autograd.is_transformed()):
            return None
        if any(each.requires_grad for each in factors.more):
            return None
        target: Target | None = None
        if not self.is_caught or self.owns(weight):
            if self.owns(x):  # a weight made from two parameters
                return None
            if is_plain:
                target = weight if weight.is_leaf else sources.find_part(weight) or sources.find_edge(weight)
            elif (
                isinstance(x, DTensor)
                and isinstance(weight, DTensor)
                and (function is F.linear or self.declares(function))
            ):
                target = sources.find_edge(weight)  # other products of DTensors may give partial gradients
        if target is None and is_plain:
            # A product's result may also be an activation, which has a batch.
            target = self._find_making(x, weight, through_products=factors.is_named or weight.dim() == 2)
        return target

    def is_made(self, weight: Tensor, through_products: bool = False) -> bool:
        return sources.find_making(weight, self.owns_leaf, True, through_products) is not None

    def _find_making(self, x: Tensor, weight: Tensor, through_products: bool) -> sources.Made | None:
        """How `weight` is made from the layer's parameters; None if its gradient cannot be deferred."""
        # In a nested backward, hooks would run twice or miss gradients.
        if weight.is_leaf or not self.may_make_weights or self.has_hooks_on_views or self.owns(weight):
            return None
        made = sources.find_making(weight, self.owns_leaf, not self.is_sharded, through_products)
        # If x is also made only from parameters, the product is a larger weight.
        if made is None or (x.requires_grad and self.is_made(x)):
            return None
        self.makes_weights = True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferral:
        twin = object.__new__(Deferral)
        memo[id(self)], memo[id(self.products)] = twin, self.products
        left_out: dict[str, Any] = {"_own": set(), "plans": {}, "_places": {}, "known": {}}
        vars(twin).update(deepcopy(vars(self) | left_out, memo))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None, so that the layer loads without zbpipe."""
        return type(None), ()


def _read(reader: Reader | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Factors]:
    """All ways to read a call as a product of two different tensors."""
    if reader is None:
        return
    try:
        for factors in reader(*args, **kwargs):
            if factors.x is not factors.weight:
                yield factors
    except (TypeError, ValueError, AttributeError):  # a call that the reader does not know
        return


class _Rule(NamedTuple):
    deferral: Deferral
    target: Target
    product: WeightProduct
    extra: ExtraArguments
    inner: float
    is_cast: bool
    is_whole: bool
    """Whether `product` gives all gradients. Otherwise autograd computes all but the weight's."""
    bias_dtype: torch.dtype | None

    def flops_of(self, dy: Tensor) -> float:
        """FLOPs of the weight gradient."""
        return 2.0 * dy.numel() * self.inner

    def multiply(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        more: Sequence[Tensor] = (),
    ) -> Any:
        """The product, whose weight gradient can wait. None if its result is no tensor."""
        if self.is_cast and autograd.any_autocast() and (dtype := _choose_dtype(x)) != x.dtype:
            given, x = x, x.to(dtype)
            args, kwargs = map_leaves((args, kwargs), lambda leaf: x if leaf is given else leaf)
        if self.is_whole:
            return _DeferredWhole.apply(
                x, weight, bias, self, partial(function, **kwargs) if kwargs else function, args
            )
        constant = weight.detach()
        args, kwargs = map_leaves((args, kwargs), lambda leaf: constant if leaf is weight else leaf)
        y = function(*args, **kwargs)
        if not isinstance(y, Tensor):
            return None
        leaves = self.target.leaves if isinstance(self.target, sources.Made) else (weight,)
        return _DeferredProduct.apply(x, leaves[0], y, self, *leaves[1:], *more)


class _Plan(NamedTuple):
    """A product that the layer has computed before, with another x."""

    rule: _Rule
    x: int
    """Index of x among the arguments."""
    kind: type[Tensor]
    dimensions: int
    shape: torch.Size | None
    known: Tensor
    """The weight, or the leaf that it views. The plan keeps it alive, so that its id stays unique."""
    part: sources.Part | None
    bias: Tensor | None
    rest: Sequence[tuple[int, Any, bool]]
    """The other arguments: index, value, and whether it needs a gradient."""

    def fits(self, weight: Tensor, args: Sequence[Any]) -> bool:
        """Whether a call with these arguments is the same product with another x."""
        if len(args) != len(self.rest) + 2:
            return False
        for place, known, is_trained in self.rest:
            if args[place] is not known or getattr(known, "requires_grad", False) is not is_trained:
                return False
        x, deferral = args[self.x], self.rule.deferral
        return (
            type(x) is self.kind
            and x.dim() == self.dimensions
            and (self.shape is None or x.shape == self.shape)
            and x.layout is torch.strided
            and not x.is_nested
            and (weight is self.known if self.part is None else self.part.is_shown_by(weight))
            and weight.requires_grad
            and torch.is_grad_enabled()
            and not autograd.is_transformed()
            and not (deferral.is_sharded and deferral.owns(x))  # FSDP would free it
        )


def _choose_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which to keep an x that autocast casts: the result's if that is smaller. Otherwise W casts x again."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype is not torch.float64:
        return min(x.dtype, torch.get_autocast_dtype(device), key=lambda dtype: dtype.itemsize)
    return x.dtype


class _DeferredWhole(torch.autograd.Function):
    """y = f(x, W, b). Its backward computes dX and db at once and defers dW if something records."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: _Rule,
        function: Callable[..., Tensor],
        args: Sequence[Any],
    ) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        # Checkpointing may return a copy of a saved tensor, so only the target identifies the gradient's place.
        ctx.rule = rule
        return tensor_data.without_base(function(*args))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, _, of_bias, *_ = ctx.needs_input_grad
        rule: _Rule = ctx.rule
        product, extra = rule.product, rule.extra.values
        if product.lay_out is not None:
            dy = product.lay_out(dy, *extra)
        assert product.of_input is not None
        dx = product.of_input(dy, x, weight, *extra) if of_x else None
        if dx is not None and dx.dtype != x.dtype:
            dx = dx.to(x.dtype)
        x, kept_dy = _detach(x, dy)
        pending = PendingGradient(
            rule.deferral.layer, product, rule.target, x, kept_dy, rule.extra, flops=rule.flops_of(dy)
        )
        dw = pending.gradient() if rule.deferral.is_due_now(pending, ctx.next_functions[1][0]) else None
        db = product.of_bias(dy, rule.bias_dtype, *extra) if of_bias else None
        return dx, dw, db, None, None, None


class _DeferredProduct(torch.autograd.Function):
    """Returns y = f(x, W, ...), in which W is a constant for autograd. Its backward defers dW if something records."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor, rule: _Rule, *more: Tensor) -> Tensor:
        # For a weight made from parameters, `weight` is the largest of them, and `more` begins with the others.
        ctx.others = len(rule.target.leaves) - 1 if isinstance(rule.target, sources.Made) else 0
        ctx.save_for_backward(x, *more[ctx.others :])
        ctx.rule = rule
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rule: _Rule = ctx.rule
        kept_dy, x, *more = _detach(dy, *ctx.saved_tensors)
        pending = PendingGradient(
            rule.deferral.layer, rule.product, rule.target, x, kept_dy, rule.extra, tuple(more), flops=rule.flops_of(dy)
        )
        _, of_weight, _, *after = [node for node, _ in ctx.next_functions]
        gradients: Sequence[Tensor | None] = [None] * (1 + ctx.others)
        if rule.deferral.is_due_now(pending, of_weight, *after[: ctx.others]):
            dw = pending.gradient()
            gradients = rule.target.of_leaves(dw) if isinstance(rule.target, sources.Made) else [dw]
        return None, gradients[0], dy, None, *gradients[1:], *(None for _ in more)


autograd.copy_type(_DeferredProduct, lambda x, weight, y, *_: y)
autograd.copy_type(_DeferredWhole, lambda x, weight, bias, rule, function, args: function(*args))
for _function in (_DeferredWhole, _DeferredProduct):
    # For `work` and `lazy_products`, cheaper than attributes that each call would set.
    autograd.add_properties(
        _function,
        deferral=lambda node: node.rule.deferral,
        inner=lambda node: node.rule.inner,
        made=lambda node: node.rule.target if isinstance(node.rule.target, sources.Made) else None,
    )


def _detach(*tensors: Tensor) -> list[Tensor]:
    """The tensors, detached: x would keep its graph alive until W, and others may hold dY."""
    return list(tensors) if torch.is_grad_enabled() else [each.detach() for each in tensors]
