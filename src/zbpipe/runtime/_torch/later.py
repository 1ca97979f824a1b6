"""Products in the backward of somebody else's autograd Function, computed only when their result is read.

I runs the Function's own backward. A product there returns a `Later`: a tensor without memory that knows its operands.
Whatever reads it computes it. A weight gradient that nothing reads until the end of the backward can wait for W, which
multiplies the same operands by the same kernel. The operands of quantised products are smaller than x and dY.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_traceable

from zbpipe.runtime._torch import autograd

_MOST_NODES = 1000
"""Limit of nodes of a layer among which Functions are looked for."""
_META = torch.device("meta")


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    number: int = -1
    """Number of the product in its backward; -1 for other operations."""


class Later(Tensor):
    """The result of a product, or of operations on such results, that is computed when something reads it."""

    call: _Call
    value: Tensor | None
    is_read: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, spec: Tensor, device: torch.device, call: _Call, value: Tensor | None) -> Later:
        size, stride = spec.shape, spec.stride()
        made: Later = Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=spec.dtype, device=device)
        made.call, made.value, made.is_read = call, value, False
        return made

    def now(self) -> Tensor:
        """The tensor's value."""
        if not self.is_read:
            self.is_read = True
            args, kwargs = _read((self.call.args, self.call.kwargs))
            if self.value is None:
                self.value = self.call.function(*args, **kwargs)
        assert self.value is not None
        return self.value

    def data_ptr(self) -> int:  # for kernels that are not torch's
        return self.now().data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:
            return func(*_read(args), **_read(kwargs or {}))
        return _postpone(_Call(func, args, kwargs or {}), _any_value(args))


def _any_value(args: Any) -> bool:
    """Whether a `Later` in `args` has its value already, as on trial."""
    return any(isinstance(each, Later) and each.value is not None for each in autograd.list_leaves(args))


def _read(args: Any) -> Any:
    return autograd.map_leaves(args, lambda leaf: leaf.now() if isinstance(leaf, Later) else leaf)


def _peek(args: Any) -> Any:
    """`args` with values in the place of `Later`, which do not count as read."""
    return autograd.map_leaves(args, lambda leaf: _peek_at(leaf) if isinstance(leaf, Later) else leaf)


def _peek_at(later: Later) -> Tensor:
    return later.now() if later.value is None else later.value


def _postpone(call: _Call, at_once: bool) -> Any:
    """A `Later` for a call; the result itself if its shape is unknown before it is computed."""
    spec = _infer(call)
    if spec is None:
        return call.function(*_read(call.args), **_read(call.kwargs))
    if not at_once:
        return Later(spec, _find_device(call), call, None)
    value = call.function(*_peek(call.args), **_peek(call.kwargs))
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (spec.shape, spec.dtype):
        _read((call.args, call.kwargs))
        return value
    return Later(spec, _find_device(call), call, value)


def postpone(function: Callable[..., Any], args: Sequence[Any], like: Tensor, number: int, with_value: bool) -> Later:
    """A `Later` for `function(*args)`, whose result is like the tensor `like`; on trial with its value."""
    value = function(*args) if with_value else None
    return Later(like, like.device, _Call(function, list(args), {}, number), value)


def _find_device(call: _Call) -> torch.device:
    tensors = (each for each in autograd.list_leaves((call.args, call.kwargs)) if isinstance(each, Tensor))
    return next(tensors).device


def _infer(call: _Call) -> Tensor | None:
    """A tensor without memory, like the result; None if there is no single one, or torch cannot tell."""
    if call.kwargs.get("device") is not None or call.kwargs.get("out") is not None:
        return None
    key = call.function, _identify(call.args), _identify(call.kwargs)
    try:
        return _inferred[key]
    except KeyError:
        if len(_inferred) > _MOST_INFERRED:
            _inferred.clear()
        return _inferred.setdefault(key, _run_without_memory(call))
    except TypeError:  # arguments without a hash
        return _run_without_memory(call)


_inferred: dict[Any, Tensor | None] = {}
_MOST_INFERRED = 4096


def _identify(value: Any) -> Any:
    """A key for arguments: tensors by their shapes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_identify(each) for each in value])
    return tuple([(name, _identify(each)) for name, each in value.items()]) if isinstance(value, dict) else value


def _run_without_memory(call: _Call) -> Tensor | None:
    args, kwargs = autograd.map_leaves((call.args, call.kwargs), _without_memory)
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
            result = call.function(*args, **kwargs)
    except Exception:  # of any kind: a kernel for this device alone, or one that reads its arguments
        return None
    return result if type(result) is Tensor and result.device == _META else None


def _without_memory(like: Any) -> Any:
    if not isinstance(like, Tensor):
        return like
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=_META)


class LaterProducts(TorchFunctionMode):
    """Products that return a `Later`: those with these numbers, or all of them with their values, as a trial."""

    def __init__(self, numbers: Collection[int] | None) -> None:
        super().__init__()
        self._numbers = numbers
        self._count = -1
        self._backward = torch._C._current_graph_task_id()
        self.has_seen_parameters = False
        """Whether the backward runs a forward of its own with parameters, whose backward adds to their gradients."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            self.has_seen_parameters |= any(isinstance(each, nn.Parameter) for each in args)
        if not (_is_product(func) and self._is_in_same_backward()):
            return func(*args, **kwargs)
        self._count += 1
        if autograd.any_autocast() or (self._numbers is not None and self._count not in self._numbers):
            return func(*args, **kwargs)
        return _postpone(_Call(func, args, kwargs, self._count), self._numbers is None)

    def _is_in_same_backward(self) -> bool:
        """Whether the backward itself calls, not a forward or another backward that it runs."""
        return not torch.is_grad_enabled() and torch._C._current_graph_task_id() == self._backward


def _is_product(function: Callable[..., Any]) -> bool:
    """Whether the name is that of a product: mm, scaled_grouped_mm, gemm, matmul, linear, einsum and the like."""
    name = getattr(function, "__name__", "")
    known = _PRODUCTS.get(name)
    if known is None:
        known = _PRODUCTS[name] = any(word in name for word in ("mm", "matmul", "linear", "einsum"))
    return known


_PRODUCTS: dict[str, bool] = {}


class _At(NamedTuple):
    """The place of a tensor among those of a recipe."""

    place: int


class _Wrapper(NamedTuple):
    """A tensor of a class that wraps others, such as a quantised one with its scale."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _is_wrapper(tensor: Any) -> bool:
    return bool(_is_traceable(tensor))


class Recipe:
    """How to compute a `Later`, apart from the tensors; it keeps those in the `memory` of weights itself."""

    def __init__(self, later: Tensor, memory: Collection[int] = ()) -> None:
        self._memory = memory
        self.reads_weights = False
        self.tensors: list[Tensor] = []
        """All tensors that it reads, detached."""
        self.flops = 0.0
        self.is_read = False
        """Whether the backward has read it, or a result that it is made from."""
        self.numbers: set[int] = set()
        """Numbers of its products in their backward."""
        self._known: dict[int, Any] = {}
        self._steps: list[_Call] = []
        self._result = self._note(later)

    def _note(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._note_new(tensor)
        return self._known[id(tensor)]

    def _note_new(self, tensor: Any) -> Any:
        if isinstance(tensor, Later):
            call = tensor.call
            self.is_read |= tensor.is_read
            args, kwargs = autograd.map_leaves((call.args, call.kwargs), self._note)
            if call.number >= 0:
                self.numbers.add(call.number)
                self.flops += _count_flops(call)
            self._steps.append(_Call(call.function, args, kwargs))
            return _Step(len(self._steps) - 1)
        if _is_wrapper(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._note(getattr(tensor, name)) for name in names}
            return _Wrapper(type(tensor), inner, context, tensor.shape, tensor.stride())
        if tensor.untyped_storage()._cdata in self._memory:
            self.reads_weights = True
            return tensor.detach()
        self.tensors.append(tensor.detach())
        return _At(len(self.tensors) - 1)

    @property
    def as_matrices(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """Computes from the tensors two matrices whose product is the result; None unless the result is that alone."""
        if len(self._steps) != 1 or not isinstance(self._result, _Step):
            return None
        (call,) = self._steps
        is_in_order = call.args == [_At(place) for place in range(len(self.tensors))]
        return getattr(call.function, "as_matrices", None) if is_in_order else None

    def release_tensors(self) -> list[Tensor]:
        """The tensors, which the recipe forgets."""
        tensors, self.tensors = self.tensors, []
        self._known.clear()
        return tensors

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        """The result for these tensors."""
        results: list[Tensor] = []

        def fill_in(leaf: Any) -> Any:
            if isinstance(leaf, _At):
                return tensors[leaf.place]
            if isinstance(leaf, _Step):
                return results[leaf.number]
            if isinstance(leaf, _Wrapper):
                inner = {name: fill_in(each) for name, each in leaf.inner.items()}
                return leaf.kind.__tensor_unflatten__(inner, leaf.context, leaf.size, leaf.stride)
            return leaf

        for call in self._steps:
            args, kwargs = autograd.map_leaves((call.args, call.kwargs), fill_in)
            results.append(call.function(*args, **kwargs))
        result: Tensor = fill_in(self._result)
        return result


class _Step(NamedTuple):
    """The result of an earlier step of the same recipe."""

    number: int


def _count_flops(call: _Call) -> float:
    if (known := getattr(call.function, "flops", None)) is not None:
        return float(known)
    factors = [each for each in autograd.list_leaves((call.args, call.kwargs)) if isinstance(each, Tensor)][:2]
    if len(factors) < 2 or not factors[1].dim():
        return 0.0
    return 2.0 * factors[0].numel() * factors[1].shape[-1]


class Context:
    """Stands in for the node that a Function's backward gets as `ctx`."""

    def __init__(self, node: Node) -> None:
        object.__setattr__(self, "_node", node)
        object.__setattr__(self, "_saved", None)

    @property
    def saved_tensors(self) -> Any:
        """The saved tensors, for which a checkpoint may run its forward again: without `LaterProducts`."""
        if self._saved is None:
            with _pop_mode_temporarily():
                object.__setattr__(self, "_saved", self._node.saved_tensors)
        return self._saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._node, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._node, name)


def run_own_backward(node: Node, gradients: Sequence[Any], context: Context | None = None) -> tuple[Any, ...]:
    """The gradients that a Function's backward returns."""
    kind: Any = type(node)
    if _takes_a_list(node):
        return cast(tuple[Any, ...], kind.apply_boxed(node, gradients))
    returned = kind.apply(node if context is None else context, *gradients)
    return returned if isinstance(returned, tuple) else (returned,)


def is_compiled(node: Node) -> bool:
    """Whether the node is the backward of a compiled graph."""
    return node.name() == "CompiledFunctionBackward"


def _takes_a_list(node: Any) -> bool:
    """Whether autograd gives the gradients as a list, which the backward empties: from torch 2.13 on if compiled."""
    return getattr(node._forward_cls, "boxed_grads_call", False)


def holds_later(gradient: Any) -> bool:
    """Whether this is a `Later`, or a tensor that wraps one."""
    if isinstance(gradient, Later) or not _is_wrapper(gradient):
        return isinstance(gradient, Later)
    return any(holds_later(getattr(gradient, name)) for name in gradient.__tensor_flatten__()[0])


def compute(gradient: Any) -> Any:
    """The gradient, without any `Later`."""
    if isinstance(gradient, Later):
        return gradient.now()
    if not holds_later(gradient):
        return gradient
    recipe = Recipe(gradient)
    return recipe.run(recipe.tensors)


def list_functions(outputs: Iterable[Any], inputs: Iterable[Any]) -> Iterator[Node]:
    """Nodes of others' autograd Functions between a layer's inputs and outputs, unless their backward is replaced."""
    seen = {each.grad_fn for each in inputs if isinstance(each, Tensor)}
    waiting = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(cast(object, node), BackwardCFunction) and not _is_other(node):
            yield node
        waiting += [each for each, _ in node.next_functions]


def _is_other(node: Any) -> bool:
    """Whether the node belongs to zbpipe, or only passes gradients on."""
    name = node.name()
    return "apply" in vars(node) or hasattr(node, "deferral") or name in autograd.PASS_ON


class Weight(NamedTuple):
    """An input of a Function that was a leaf, or a cast, a transpose or a view of one."""

    place: int
    """Its place among all inputs, and among the gradients that the backward returns."""
    number: int
    """Its place among the tensors."""
    leaf: Tensor
    edge: GradientEdge


def list_weights(node: Any, owns: Callable[[Tensor], bool]) -> list[Weight]:
    """The inputs of a Function that belong to leaves that `owns` accepts."""
    found = []
    for place, number in autograd.number_edges(node).items():
        edge = node.next_functions[number]
        leaf = autograd.find_leaf_behind(edge[0])
        if leaf is not None and owns(leaf):
            found.append(Weight(place, number, leaf, GradientEdge(*edge)))
    return found


def replace_backward(node: Any, run: Any) -> None:
    """Have autograd call `run(node, gradients)` for this node alone."""
    here = ref(node)  # a node that held itself would wait for the garbage collector

    def apply(*gradients: Any) -> Any:
        return run(here(), gradients)

    if _takes_a_list(node):
        node.apply_boxed = lambda gradients: run(here(), gradients)
    node.deferral, node.weight_places = run.deferral, tuple(each.number for each in run.weights)  # for `graph_products`
    node.apply = apply


def list_memory(tensors: Iterable[Any]) -> set[int]:
    """The storages of plain tensors and of tensors that wrap them."""
    found: set[int] = set()
    for each in tensors:
        if _is_wrapper(each):
            names, _ = each.__tensor_flatten__()
            found |= list_memory(getattr(each, name) for name in names)
        elif isinstance(each, Tensor):  # a DTensor has its mesh there, too
            found.add(each.untyped_storage()._cdata)
    return found
