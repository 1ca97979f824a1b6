"""Slots: inputs without memory through whose "gradients" x and dY leave a compiled region.

The compiler traces this code; see `zbpipe.runtime.split.compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpipe.runtime._torch import autograd, compiler
from zbpipe.runtime._torch.traced import Spec, spec
from zbpipe.runtime.split.further import NONE, Further, separate_tensors, with_factors_first
from zbpipe.runtime.split.products import WeightProduct, linear_input_gradient, rows


@dataclass(frozen=True)
class Use:
    """One product with a weight, as seen in a call without the compiler."""

    weight_name: str
    function: Callable[..., Any]
    product: WeightProduct
    """Its weight gradient has the shape of the parameter."""
    permutation: tuple[int, ...]
    """Order of the parameter's dimensions in the multiplied weight."""
    x: Spec
    y: Spec
    further: Further = NONE
    """Further arguments of the weight gradient."""
    more: tuple[Spec, ...] = ()
    """Specs of the tensors among them."""
    rest: Further = NONE
    """Further arguments of the function. They contain the same tensors."""
    inner: float = 0
    """Multiplications per element of dY; 0 for as many as a row of x has elements."""

    def tensors(self, carried: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors among the further arguments, after they have left the region."""
        return tuple([each.to(like.dtype) for each, like in zip(carried, self.more, strict=True)])


def make_use(
    weight: tuple[str, tuple[int, ...]],
    function: Callable[..., Any],
    product: WeightProduct,
    factors: tuple[Tensor, Tensor],
    further: Further = NONE,
    more: Sequence[Tensor] = (),
    rest: Further = NONE,
) -> Use:
    """The use in `function(x, weight, ...)`. `factors` are x and the result, `more` the tensors among the rest."""
    name, permutation = weight
    x, y = map(spec, factors)
    specs = tuple(map(spec, more))
    return Use(name, function, _permute(product, permutation), permutation, x, y, further, specs, rest)


def _permute(product: WeightProduct, permutation: tuple[int, ...]) -> WeightProduct:
    if permutation == tuple(range(len(permutation))):
        return product
    back = tuple(sorted(range(len(permutation)), key=permutation.__getitem__))

    @wraps(product.weight_gradient)  # with its signature
    def weight_gradient(*args: Any, **options: Any) -> Tensor:
        return product.weight_gradient(*args, **options).permute(back)

    return WeightProduct(weight_gradient)


class Slots(NamedTuple):
    """Inputs of a compiled region without memory, whose gradients carry one product's tensors for W out."""

    x: Tensor
    y: Tensor
    more: tuple[Tensor, ...] = ()


def dtype_in_slot(dtype: torch.dtype) -> torch.dtype:
    """Dtype of a tensor's slot. Integers have no gradients, but float64 holds every index and count exactly."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.float64


class SlotHandle:
    """Exit of one product from its region, in one call."""

    def __init__(self, use: Use, slots: Slots | None, may_use: Callable[[], str]) -> None:
        # Only values compared during the compilation of the region: the compiler guards on everything that it sees.
        self.function = use.function
        self.product = use.product
        self.permutation = use.permutation
        self.rest = use.rest
        self.slots = slots
        self.may_use = may_use

    def takes(self, x: Tensor, more: Sequence[Tensor] = ()) -> bool:
        """Whether these tensors fit the slots."""
        slots = self.slots
        return (
            slots is not None
            and x.dtype == slots.x.dtype
            and compiler.is_surely_same_shape(x, slots.x)
            and len(more) == len(slots.more)
            and all(compiler.is_surely_same_shape(one, other) for one, other in zip(more, slots.more, strict=True))
        )

    def take(self) -> Slots | None:
        """The slots, if this use may have them. They carry one product."""
        permit = self.may_use()
        if permit == "no":
            return None
        slots = self.slots
        if permit == "take":
            self.slots = None
        return slots


def linear_in_slots(input: Tensor, weight: Tensor, bias: Tensor | None, handle: SlotHandle | None) -> Tensor:
    """`F.linear` during compilation."""
    slots = handle.take() if handle is not None and handle.takes(rows(input)) else None
    if slots is None:
        return F.linear(input, weight, bias)
    return _LinearInSlots.apply(input, weight, bias, slots.x, slots.y)  # type: ignore[no-any-return]


def whole_layer(x: Tensor) -> Tensor:
    """Stands for the forward of a layer, in a `Use` of the whole layer as a product."""
    raise NotImplementedError


def layer_in_slots(layer: nn.Module, original: Callable[[Tensor], Tensor], x: Tensor, handle: SlotHandle) -> Tensor:
    """`original(x)` during compilation. `layer` is the same with its weight as a constant."""
    slots = handle.take() if handle.takes(x) else None
    if slots is None:
        return original(x)
    return _ProductInSlots.apply(x, layer.forward(x), slots.x, slots.y)  # type: ignore[no-any-return]


class _LinearInSlots(torch.autograd.Function):
    """y = x W^T + b. The "gradients" of the slots, (rows, in) and (rows, out), are x and dY, without a side effect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_slot: Tensor, y_slot: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return autograd.without_base(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = linear_input_gradient(dy, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        dy = rows(dy)
        db = dy.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, None, db, rows(x.detach()), dy


class _ProductInSlots(torch.autograd.Function):
    """Passes on y = f(x, W, ...), for which autograd knows W only as a constant. Further ones leave the region."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, x_slot: Tensor, y_slot: Tensor, *more_slots: Tensor) -> Tensor:
        ctx.save_for_backward(x, *more_slots[::2])
        return autograd.without_base(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *more = ctx.saved_tensors
        carried: list[Tensor | None] = []
        for each in more:
            carried += [None, each.to(dtype_in_slot(each.dtype))]
        return None, dy, x.detach(), dy, *carried


autograd.copy_type(_LinearInSlots, lambda x, weight, bias, *_: F.linear(x, weight, bias))
autograd.copy_type(_ProductInSlots, lambda x, y, *_: y)


def without_slots(use: Use) -> Callable[[Tensor], WeightWithSlots]:
    """Makes objects that stand in for the weight, without a way out of a region."""
    handle = SlotHandle(use, None, lambda: "no")
    return lambda weight: WeightWithSlots(weight, tuple(range(weight.dim())), handle)


class WeightWithSlots:
    """Stands in for a layer's weight while its region runs, so that x and dY of the product leave through the slots.

    A layer with its own forward may multiply anywhere. The compiler allows no torch function mode there, but checks
    every argument of torch's functions for `__torch_function__`. A cast or a transpose of this object is another such
    object. For everything else it is the plain weight.
    """

    def __init__(self, plain: Tensor, permutation: tuple[int, ...], handle: SlotHandle) -> None:
        self.plain = plain
        self.permutation = permutation
        self.handle = handle

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        factors_first, options = with_factors_first(args, kwargs)
        x, weight = factors_first[:2] if len(factors_first) > 1 else (None, None)
        if isinstance(weight, WeightWithSlots) and func is weight.handle.function and isinstance(x, Tensor):
            return weight._multiply(x, tuple(factors_first[2:]), options)
        if func is torch.transpose:
            return args[0].transpose(*args[1:], **kwargs)
        if func is torch.permute:
            return args[0].permute(*args[1:], **kwargs)
        if func is torch.t:
            return args[0].t()
        return func(*_unwrap(args), **dict(zip(kwargs, _unwrap(tuple(kwargs.values())), strict=True)))

    def _multiply(self, x: Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> Any:
        handle = self.handle
        if self.permutation != handle.permutation:
            return handle.function(x, self.plain, *rest, **options)
        if handle.function is F.linear:
            bias = rest[0] if rest else options.get("bias")
            return linear_in_slots(x, self.plain, bias, handle)
        further, more = separate_tensors(rest, options)
        if further == handle.rest and handle.takes(x, more):
            slots = handle.take()
            if slots is not None:
                with_slots = [each for pair in zip(more, slots.more, strict=True) for each in pair]
                y = handle.function(x, self.plain.detach(), *rest, **options)
                return _ProductInSlots.apply(x, y, slots.x, slots.y, *with_slots)
        return handle.function(x, self.plain, *rest, **options)

    def permute(self, *dims: Any) -> WeightWithSlots:
        order = dims[0] if len(dims) == 1 else dims
        return self._reorder(self.plain.permute(order), order)

    def transpose(self, dim0: int, dim1: int) -> WeightWithSlots:
        order = list(range(self.plain.dim()))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self._reorder(self.plain.transpose(dim0, dim1), order)

    def t(self) -> WeightWithSlots:
        return self._reorder(self.plain.t(), (1, 0))

    @property
    def mT(self) -> WeightWithSlots:  # noqa: N802
        return self.transpose(-2, -1)

    @property
    def T(self) -> WeightWithSlots:  # noqa: N802
        return self.permute(list(range(self.plain.dim()))[::-1])

    def _reorder(self, plain: Tensor, order: Sequence[int]) -> WeightWithSlots:
        return WeightWithSlots(plain, tuple([self.permutation[dim] for dim in order]), self.handle)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _as_plain(name: str) -> Callable[..., Any]:
    def operate(self: WeightWithSlots, *args: Any) -> Any:
        return getattr(self.plain, name)(*_unwrap(args))

    return operate


def _as_cast(name: str) -> Callable[..., Any]:
    def cast(self: WeightWithSlots, *args: Any, **kwargs: Any) -> WeightWithSlots:
        return WeightWithSlots(getattr(self.plain, name)(*args, **kwargs), self.permutation, self.handle)

    return cast


for _name in ("to", "type_as", "bfloat16", "half", "float"):
    setattr(WeightWithSlots, _name, _as_cast(_name))
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in ("getitem", "len", "iter", "neg", "pos", "abs", "invert", "bool", "float", "int", *_COMPARISONS):
    setattr(WeightWithSlots, f"__{_name}__", _as_plain(f"__{_name}__"))
for _name in _ARITHMETIC:
    setattr(WeightWithSlots, f"__{_name}__", _as_plain(f"__{_name}__"))
    setattr(WeightWithSlots, f"__r{_name}__", _as_plain(f"__r{_name}__"))


def _unwrap(values: Sequence[Any]) -> list[Any]:
    return [
        each.plain
        if isinstance(each, WeightWithSlots)
        else type(each)(_unwrap(each))
        if isinstance(each, (list, tuple))
        else each
        for each in values
    ]
