"""torch's products: which arguments may be a weight, and that weight's gradient.

Each reader has the signature of a torch function, and yields every way to read the call as a product of x and a weight.
A call that does not fit is unknown to zbpipe, so its weight gradient stays in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from string import ascii_letters
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zbpipe.runtime._torch import autograd
from zbpipe.runtime._torch.autograd import map_leaves
from zbpipe.runtime.split.products import (
    GROUPED_MM,
    LINEAR,
    NONE,
    TENSOR,
    ExtraArguments,
    WeightProduct,
    as_constant,
    lay_out_like,
    rows,
)


class Factors(NamedTuple):
    x: Tensor
    weight: Tensor
    product: WeightProduct
    extra: ExtraArguments = NONE
    """The extra arguments of `product.weight_gradient`."""
    more: Sequence[Tensor] = ()
    inner: int = 0
    """Multiplications per element of dY; 0 for the number of elements in a row of x."""
    is_cast: bool = True
    is_whole: bool = False
    """Whether `product` has all gradients of the call: no other factors, and no other summand than `bias`."""
    bias: Tensor | None = None
    is_named: bool = False
    """Whether the function's signature calls this argument the weight."""


Reader = Callable[..., Iterator[Factors]]


def _separate_tensors(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[ExtraArguments, list[Tensor]]:
    """A product's extra arguments without tensors, and the tensors in order. Omits None at the end or by name, such as
    a missing bias."""
    tensors: list[Tensor] = []
    options = {name: each for name, each in options.items() if each is not None}
    while args and args[-1] is None:
        args = args[:-1]

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            return TENSOR
        return leaf

    return ExtraArguments(*map_leaves((tuple(args), options), take)), tensors


def _with_factors_first(args: Sequence[Any], options: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """A product's arguments with x and the weight by position, even if they were keyword arguments."""
    if len(args) > 1:
        return args, options
    for place, names in enumerate(_FACTORS):
        given = [name for name in names if name in options]
        if len(args) == place and len(given) == 1:
            args = (*args, options[given[0]])
            options = {name: each for name, each in options.items() if name != given[0]}
    return args, options


_FACTORS = (("input", "self", "mat_a"), ("weight", "mat2", "other", "mat_b"))
"""torch's names of x and the weight in its products."""


def read_declared(product: WeightProduct) -> Reader:
    """A reader of `function(x, weight, ...)`. `product` takes the extra arguments."""

    def read(*args: Any, **options: Any) -> Iterator[Factors]:
        factors_first, options = _with_factors_first(args, options)
        x, weight, *rest = factors_first
        if isinstance(x, Tensor) and isinstance(weight, Tensor):
            extra, more = _separate_tensors(rest, options)
            yield Factors(x, weight, product, extra, more, is_cast=False, is_named=True)

    return read


def _rows_to_the_left(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return rows(as_constant(x, dy)).t(), rows(dy)


def _multiply(one: Tensor, other: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix product, summed to this shape if it was broadcast."""
    is_batch = one.dim() == other.dim() == len(shape) == 3 and one.shape[0] == other.shape[0] == shape[0]
    return torch.bmm(one, other) if is_batch else one.matmul(other).sum_to_size(shape)


def _right_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, *shape: int) -> Tensor:
    return lay_out_like(x, _multiply(dy, as_constant(weight, dy).mT, x.shape))


_RIGHT = WeightProduct(as_matrices=_rows_to_the_left, of_input=_right_input_gradient)
"""x @ weight, for x: (..., in) and one weight: (in, out)."""


def _batched_right(dy: Tensor, x: Tensor, *shape: int) -> Tensor:
    return _multiply(as_constant(x, dy).mT, dy, shape)


def _left(dy: Tensor, x: Tensor, *shape: int) -> Tensor:
    if len(shape) > 2 or dy.dim() == x.dim() == 2:
        return _multiply(dy, as_constant(x, dy).mT, shape)
    summed = [n for n in range(dy.dim()) if n != dy.dim() - 2]
    gradient: Tensor = torch.tensordot(dy, as_constant(x, dy), (summed, summed))
    return gradient


_BATCHED_RIGHT, _LEFT = WeightProduct(_batched_right, of_input=_right_input_gradient), WeightProduct(_left)


def _read_matmul(*args: Any, **options: Any) -> Iterator[Factors]:
    (input, other), options = _with_factors_first(args, options)
    if options:
        return
    if other.dim() == 2:
        yield Factors(input, other, _RIGHT, inner=other.shape[0], is_whole=True)
    elif other.dim() > 2 and input.dim() > 1:
        extra = ExtraArguments(tuple(other.shape))
        yield Factors(input, other, _BATCHED_RIGHT, extra, inner=other.shape[-2], is_whole=True)
    if input.dim() > 1 and other.dim() > 1:
        yield Factors(other, input, _LEFT, ExtraArguments(tuple(input.shape)), inner=input.shape[-1])


def _read_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Iterator[Factors]:
    if alpha == 1:
        for factors in _read_matmul(mat1, mat2):
            is_whole = factors.is_whole and beta == 1 and input.dim() == 1
            yield factors._replace(is_whole=is_whole, bias=input)


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Factors]:
    if weight.dim() == 2:
        is_whole = bias is None or bias.dim() < 2
        yield Factors(input, weight, LINEAR, is_whole=is_whole, bias=bias, is_named=True)


def _einsum(dy: Tensor, x: Tensor, of_weight: str, of_input: str) -> Tensor:
    return torch.einsum(of_weight, dy, as_constant(x, dy))


def _einsum_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, of_weight: str, of_input: str) -> Tensor:
    return torch.einsum(of_input, dy, as_constant(weight, dy))


_DOTS = "..."
_EINSUM = WeightProduct(_einsum, of_input=_einsum_input_gradient)


def _read_einsum(equation: str, *operands: Any) -> Iterator[Factors]:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    for place, extra, inner in _find_factors(equation, tuple([each.shape for each in operands])):
        x, weight = operands[1 - place], operands[place]
        # Without a sum, einsum multiplies elements, which autocast leaves alone.
        yield Factors(x, weight, _EINSUM, extra, inner=inner, is_cast=inner > 1, is_whole=bool(extra.values[1]))


@lru_cache(1024)
def _find_factors(equation: str, shapes: tuple[torch.Size, ...]) -> Sequence[tuple[int, ExtraArguments, int]]:
    """Indices of operands that can be the weight, each with the equations of its gradient and of x's (empty if there
    is none), and the multiplications per element of the result."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    # An implicit output or a diagonal is left alone.
    if not arrow or len(shapes) != len(terms) or len(terms) != 2:
        return ()
    more = {len(shape) - len(term) + len(_DOTS) for term, shape in zip(terms, shapes, strict=True) if _DOTS in term}
    if bool(more) != (_DOTS in output) or len(more) > 1:
        return ()
    unused = [each for each in ascii_letters if each not in equation]
    *terms, output = (each.replace(_DOTS, "".join(unused[: sum(more)])) for each in (*terms, output))
    letters = "".join(terms)
    sizes = dict(zip(letters, (*shapes[0], *shapes[1]), strict=True))
    is_broadcast = any(sizes[letter] != size for letter, size in zip(letters, (*shapes[0], *shapes[1]), strict=True))
    if is_broadcast or any(len(set(term)) < len(term) for term in terms):
        return ()
    found = []
    for place in (1, 0):
        own, other = terms[place], terms[1 - place]
        if set(own) <= set(other + output):
            summed = set(own + other) - set(output)
            of_input = f"{output},{own}->{other}" if set(other) <= set(own + output) else ""
            extra = ExtraArguments((f"{output},{other}->{own}", of_input))
            found.append((place, extra, prod(sizes[letter] for letter in summed)))
    return found


class _Convolution(NamedTuple):
    shape: torch.Size
    format: torch.memory_format
    """Memory format of the kernels."""
    settings: tuple[list[int], list[int], list[int], bool, list[int], int]
    """Stride, padding, dilation, whether transposed, output padding, groups."""


def _convolution(dy: Tensor, x: Tensor, call: _Convolution) -> Tensor:
    # The kernel reads only the shape of the weight.
    return _differentiate(dy, as_constant(x, dy), dy.new_empty(1).expand(call.shape), call, of_input=False)


def _convolution_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, call: _Convolution) -> Tensor:
    # The kernel reads only the shape of x, but would first copy an x that is not contiguous.
    like = x if x.is_contiguous() or call.format is not torch.contiguous_format else dy.new_empty(x.shape)
    return _differentiate(dy, as_constant(like, dy), as_constant(weight, dy), call, of_input=True)


def _differentiate(dy: Tensor, x: Tensor, weight: Tensor, call: _Convolution, of_input: bool) -> Tensor:
    if is_single := x.dim() < len(call.shape):
        x, dy = x.unsqueeze(0), dy.unsqueeze(0)
    gradients = torch.ops.aten.convolution_backward.default(
        dy, x, weight, None, *call.settings, output_mask=[of_input, not of_input, False]
    )
    gradient: Tensor = gradients[0 if of_input else 1]
    return gradient.squeeze(0) if is_single and of_input else gradient


def _convolution_bias_gradient(dy: Tensor, dtype: torch.dtype | None, call: _Convolution) -> Tensor:
    # Kernels compute it only together with the weight's gradient.
    channels = dy.dim() - len(call.shape) + 1
    return dy.sum([each for each in range(dy.dim()) if each != channels], dtype=dtype)


def _lay_out_for_convolution(dy: Tensor, call: _Convolution) -> Tensor:
    return dy.contiguous(memory_format=call.format) if dy.dim() == len(call.shape) else dy.contiguous()


_CONVOLUTION = WeightProduct(
    _convolution,
    of_input=_convolution_input_gradient,
    of_bias=_convolution_bias_gradient,
    lay_out=_lay_out_for_convolution,
)


def _read_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Iterator[Factors]:
    if padding == "same":
        dilations = _per_dimension(dilation, weight.dim() - 2)
        twice = [by * (kernel - 1) for by, kernel in zip(dilations, weight.shape[2:], strict=True)]
        if any(each % 2 for each in twice):  # padded on one side
            return
        padding = [each // 2 for each in twice]
    padding = 0 if padding == "valid" else padding
    inner = weight.shape[1:].numel()
    settings = stride, padding, dilation, 0
    yield from _convolve(input, weight, bias, settings, groups, inner, is_transposed=False)


def _read_transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Iterator[Factors]:
    # Each element of x meets the weight's other dimensions.
    spread = torch.Size(_per_dimension(stride, weight.dim() - 2)).numel()
    inner = max(weight.shape[2:].numel() * weight.shape[0] // groups // spread, 1)
    settings = stride, padding, dilation, output_padding
    yield from _convolve(input, weight, bias, settings, groups, inner, is_transposed=True)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: tuple[Any, Any, Any, Any],
    groups: int,
    inner: int,
    is_transposed: bool,
) -> Iterator[Factors]:
    """The product for a stride, padding, dilation and output padding. Complex ones have no kernel of their own."""
    if not weight.is_complex():
        stride, padding, dilation, end = (_per_dimension(each, weight.dim() - 2) for each in settings)
        numbers = stride, padding, dilation, is_transposed, end, groups
        call = _Convolution(weight.shape, _find_format(x, weight), numbers)
        extra = ExtraArguments((call,))
        yield Factors(x, weight, _CONVOLUTION, extra, inner=inner, is_whole=True, bias=bias, is_named=True)


def _find_format(*factors: Tensor) -> torch.memory_format:
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(factors[0].dim(), torch.contiguous_format)
    is_wanted = any(each.is_contiguous(memory_format=wanted) and not each.is_contiguous() for each in factors)
    return wanted if is_wanted else torch.contiguous_format


def _per_dimension(value: Any, size: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * size if len(values) == 1 else values


def _named(reader: Reader, *names: str) -> dict[Callable[..., Any], Reader]:
    """`reader` for the functions of these names: functions, methods and operators."""
    found: dict[Callable[..., Any], Reader] = {}
    for name in names:
        packet = getattr(torch.ops.aten, name)
        operators = [packet, *(getattr(packet, overload) for overload in packet.overloads())]
        functions = [getattr(place, name, None) for place in (torch, Tensor)]
        found |= {each: reader for each in (*functions, *operators) if each is not None}
    return found


COMPOSITES = frozenset((F.multi_head_attention_forward,))
"""Python functions that call torch's products."""

PRODUCTS: dict[Callable[..., Any], Reader] = {
    **_named(_read_matmul, "matmul", "mm", "bmm"),
    **_named(_read_addmm, "addmm", "baddbmm"),
    **_named(_read_convolution, "conv1d", "conv2d", "conv3d"),
    **_named(_read_transposed_convolution, "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    **_named(_read_linear, "linear"),
    F.linear: _read_linear,
    torch.einsum: _read_einsum,
    autograd.grouped_mm: read_declared(GROUPED_MM),
}
"""Readers of torch's products, by the functions that torch function modes see."""
