"""Weight gradients deferred to W: the split of a product, and the tensors that I keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zbpipe.runtime._torch import autograd, tensor_data
from zbpipe.runtime._torch.autograd import map_leaves
from zbpipe.runtime.device import find_device
from zbpipe.runtime.split import sources


class ExtraArguments(NamedTuple):
    """The arguments of a product after x and the weight. Tensors are replaced, because autograd saves those."""

    values: tuple[Any, ...] = ()
    """`TENSOR` in place of each tensor, also within lists, tuples and dictionaries."""
    options: Mapping[str, Any] = {}
    """The same for keyword arguments."""

    def fill_in(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with `tensors` in their places."""
        left = iter(tensors)
        filled = map_leaves((self.values, self.options), lambda leaf: next(left) if leaf is TENSOR else leaf)
        return cast(tuple[tuple[Any, ...], dict[str, Any]], filled)


NONE = ExtraArguments()
TENSOR = "tensor"


class WeightProduct:
    """The gradients of y = f(x, weight, ...), for an f that is linear in the weight.

    Args:
        weight_gradient: from (dy, x, ...) to the gradient of the weight, in the weight's shape. It also gets the
            extra arguments of f, except None at the end or by name.
        as_matrices: from the same to two matrices whose product is that gradient. W can add such a product to `.grad`
            by one kernel.
        of_input: from (dy, x, weight, ...) to the gradient of x, if zbpipe knows all gradients of f.
        of_bias: from (dy, dtype, ...) to the gradient of the bias.
        lay_out: from (dy, ...) to dY in the layout of both halves' kernels.
    """

    def __init__(
        self,
        weight_gradient: Callable[..., Tensor] | None = None,
        *,
        as_matrices: Callable[..., tuple[Tensor, Tensor]] | None = None,
        of_input: Callable[..., Tensor] | None = None,
        of_bias: Callable[..., Tensor] | None = None,
        lay_out: Callable[..., Tensor] | None = None,
    ) -> None:
        self.as_matrices = as_matrices
        self.weight_gradient = weight_gradient or self._multiply
        self.of_input, self.of_bias, self.lay_out = of_input, of_bias or _sum_rows, lay_out

    def of_weight(self, dy: Tensor, x: Tensor, extra: ExtraArguments = NONE, tensors: Sequence[Tensor] = ()) -> Tensor:
        args, options = extra.fill_in(tensors)
        return self.weight_gradient(dy, x, *args, **options)

    def _multiply(self, dy: Tensor, x: Tensor, *args: Any, **options: Any) -> Tensor:
        assert self.as_matrices is not None
        one, other = self.as_matrices(dy, x, *args, **options)
        return one.mm(other)


def rows(tensor: Tensor) -> Tensor:
    """The tensor with flattened leading dimensions: (..., n) to (rows, n)."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor.unsqueeze(0)


def _linear_as_matrices(dy: Tensor, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    # Another library's function may get a bias without a gradient. It changes nothing.
    return rows(dy).t(), rows(as_constant(x, dy))


def _sum_rows(dy: Tensor, dtype: torch.dtype | None, *extra: Any) -> Tensor:
    """The gradient of a bias that is added to each row."""
    return rows(dy).sum(0, dtype=dtype)


def as_constant(factor: Tensor, dy: Tensor) -> Tensor:
    """The factor by which dY is multiplied: conjugate, in the dtype of dY."""
    factor = factor if factor.dtype == dy.dtype else factor.to(dy.dtype)
    return factor.conj() if factor.is_complex() else factor


def lay_out_like(x: Tensor, dx: Tensor) -> Tensor:
    """dX of a transposed x, transposed as autograd does: torch requires contiguous gradients between stages."""
    is_transposed = x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
    return dx.mT.contiguous().mT if is_transposed else dx


def _linear_input_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return lay_out_like(x, dy.matmul(as_constant(weight, dy)))


LINEAR = WeightProduct(as_matrices=_linear_as_matrices, of_input=_linear_input_gradient)
"""`torch.nn.functional.linear` of x: (..., in). A bias gets its gradient in I.

>>> dy, x = torch.ones(5, 4), torch.ones(5, 3)
>>> LINEAR.of_weight(dy, x).shape
torch.Size([4, 3])
"""


def _grouped_mm_weight_gradient(
    dy: Tensor, x: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    # Neither a bias without a gradient nor the result's dtype changes the gradient. Multiplied in this order and then
    # transposed, because the weights are transposed: (experts, out, in) in memory.
    return autograd.grouped_mm(dy.transpose(-2, -1), x, offs=offs).transpose(-2, -1)


GROUPED_MM = WeightProduct(_grouped_mm_weight_gradient)
"""`torch.nn.functional.grouped_mm`, also called `torch._grouped_mm`, of rows in groups.

x: (rows, in), with one weight per group: (groups, in, out).

>>> x, dy = (torch.ones(16, 16, dtype=torch.bfloat16) for _ in range(2))
>>> GROUPED_MM.weight_gradient(dy, x, offs=torch.tensor([8, 16], dtype=torch.int32)).shape
torch.Size([2, 16, 16])
"""


FROM_BACKWARD = "from backward"
"""Declares that W may run those products of an autograd Function's own backward that nothing else there reads.

The user promises that torch counts every write in this backward.

>>> layer = torch.nn.Module()
>>> layer.weight_products = {torch.autograd.Function.apply: FROM_BACKWARD}
"""


@dataclass(slots=True)
class PendingGradient:
    """Inputs of W for one use of one weight. Cheap to make, because autograd waits."""

    layer: nn.Module
    product: WeightProduct
    weight: Target
    x: Tensor
    dy: Tensor
    """The gradient of the product's result. All tensors are detached."""
    extra: ExtraArguments = NONE
    more: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()
    """Number of in-place changes of each of `tensors` when the layer deferred the gradient."""
    contents: Tensor | None = None
    """Fingerprints of `tensors`, for the first microbatches."""
    fsdp_sums: Mapping[int, Tensor] | None = None
    """FSDP's sums for weights without `.grad`, by the ids of the weights."""
    flops: float = 0.0
    may_fuse: bool = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.dy, *self.more)

    @tensors.setter
    def tensors(self, tensors: Sequence[Tensor]) -> None:
        self.x, self.dy, *more = tensors
        self.more = tuple(more)
        self.versions = tensor_data.versions_of(tensors)

    def name_where(self, marks: Iterable[bool]) -> str:
        """Names of the marked `tensors`, each once. Empty for none."""
        names = ("the input (x)", "the gradient of the output (dY)", *("a tensor argument" for _ in self.more))
        return " and ".join(dict.fromkeys(name for name, mark in zip(names, marks, strict=True) if mark))

    @property
    def parts(self) -> Sequence[PendingGradient]:
        """One for each weight."""
        return [self]

    def gradient(self) -> Tensor:
        gradient = self.product.of_weight(self.dy, self.x, self.extra, self.more)
        if self.product.as_matrices is not None:
            return gradient
        # Autograd would sum a larger gradient, and `.grad` would broadcast a smaller one.
        shape, is_tensor = sources.find_shape(self.weight), isinstance(gradient, Tensor)
        if is_tensor and gradient.shape == shape:
            return gradient
        found = f"one in the shape {tuple(gradient.shape)}" if is_tensor else repr(gradient)
        raise ValueError(
            f"weight_products of {type(self.layer).__name__}: {name_of(self.product.weight_gradient)} has to return a"
            f" tensor in the shape of the weight, {tuple(shape)}, got {found}"
        )

    def accumulate(self) -> None:
        """Add the weight's gradient to `.grad`, in the dtype in which autograd would accumulate it."""
        weight = self.weight
        if isinstance(weight, GradientEdge):
            torch.autograd.backward([weight], [self.gradient()])
        elif isinstance(weight, sources.Made):
            torch.autograd.backward([weight.edge], [self.gradient()], retain_graph=True)  # for other uses of it
        elif isinstance(weight, sources.Part):
            self._accumulate_part(weight)
        elif not self._add_in_one(weight, grad := self.find_sum(weight)):
            gradient = self.gradient()
            if grad is None:
                own = gradient.to(tensor_data.find_grad_dtype(weight, gradient))
                weight.grad = own.clone() if self._may_share_memory(own) else own
            elif grad.is_sparse:  # from an embedding that shares this weight
                weight.grad = gradient + grad
            else:
                grad.add_(gradient)

    def find_sum(self, weight: Tensor) -> Tensor | None:
        return self.fsdp_sums.get(id(weight)) if self.fsdp_sums and weight.grad is None else weight.grad

    def _may_share_memory(self, gradient: Tensor) -> bool:
        """Whether the next use, which adds in place, would also add to dY or x, or to an element twice."""
        if self.product.as_matrices is not None:
            return False
        memory = tensor_data.find_storage(gradient)
        known = map(tensor_data.find_storage, self.tensors)
        return memory is None or tensor_data.is_expanded(gradient) or any(memory is each for each in known)

    def _accumulate_part(self, part: sources.Part) -> None:
        leaf = part.leaf
        grad = self.find_sum(leaf)
        if grad is None:
            leaf.grad = grad = torch.zeros_like(leaf, dtype=tensor_data.find_grad_dtype(leaf, self.dy))
        if not part.fits(grad):
            whole = torch.zeros_like(leaf)
            part.of(whole).add_(self.gradient())
            leaf.grad = whole + grad
        elif not self._add_in_one(leaf, part.of(grad)):
            part.of(grad).add_(self.gradient())

    def _add_in_one(self, weight: Tensor, grad: Tensor | None) -> bool:
        """Add to `grad`, the `.grad` of `weight`, by one fused product; False if there is none."""
        if self.product.as_matrices is None or not self.may_fuse:
            return False
        return add_product(weight, grad, *self.product.as_matrices(self.dy, self.x))


Target = Tensor | GradientEdge | sources.Part | sources.Made
"""Target of a weight gradient: a leaf, a part of a leaf, or the edge at which autograd takes the gradient of a tensor
made from leaves."""


def title(name: str, kind: str) -> str:
    """A module's name in its stage, with its class. The stage itself has no name."""
    return f"{name or 'the stage itself'} ({kind})"


def is_apply(function: object) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and function == owner.apply


def name_of(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", repr(function))
    return f"{function.__self__.__name__}.{name}" if is_apply(function) else name  # type: ignore[attr-defined]


def add_product(weight: Tensor, grad: Tensor | None, one: Tensor, other: Tensor) -> bool:
    """Add the product of two matrices to `grad`, the `.grad` of `weight` so far. False if no kernel does this."""
    # A product in half precision is added to a float32 gradient without intermediate rounding.
    dtype = one.dtype
    if grad is not None and grad.is_sparse:
        return False
    if grad is not None and grad.dtype == dtype:
        grad.addmm_(one, other)
        return True
    wanted = tensor_data.find_grad_dtype(weight, one) if grad is None else grad.dtype
    if dtype not in _HALF or wanted != torch.float32 or not sums_in_float32(one.device, dtype):
        return False
    if grad is None:
        weight.grad = torch.mm(one, other, out_dtype=torch.float32)
        return True
    if grad.requires_grad:  # autograd does not record writes into `out`
        return False
    # As in addmm_, `out` is also the tensor added to. There is no addmm_ with a dtype argument.
    torch.addmm(grad, one, other, out_dtype=torch.float32, out=grad)
    return True


_HALF = frozenset((torch.bfloat16, torch.float16))
_sums_in_float32: dict[tuple[str, torch.dtype], bool] = {}


def sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one kernel on this device type multiplies `dtype` tensors and adds the product to a float32 tensor."""
    # The CPU has no such kernel, and older CUDA kernels require one dtype for all three tensors. So try it on small
    # tensors, once per device type and dtype. During the capture of a CUDA graph the result cannot be read, so the
    # answer is no; but the first I, which comes before, has already asked.
    key = device.type, dtype
    if key not in _sums_in_float32:
        if find_device(device).is_capturing():
            return False
        one, total = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
        try:
            product = torch.mm(one, one, out_dtype=torch.float32)
            torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
            is_right = ((product == 16) & (total == 17)).all()
            _sums_in_float32[key] = device.type == "meta" or bool(is_right)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):  # no such kernel; no such overload
            _sums_in_float32[key] = False
    return _sums_in_float32[key]
