"""Products in the backward of an autograd Function, computed only when their result is read.

I runs the Function's own backward. A product there returns a `LazyTensor`, which has no memory and knows its operands.
An operator that reads it computes it, and a change of an operand that torch counts is an error. A weight gradient that
nothing reads until the end of the backward waits for W, which multiplies the same operands by the same kernel. The
operands of quantised products are smaller than x and dY.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from zbpipe.runtime._torch import autograd
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.autograd import function_of, is_wrapper, map_leaves, schema_of
from zbpipe.runtime._torch.tensor_data import storage_of, version_of
from zbpipe.runtime.split.sources import PLAIN, find_leaf_behind, find_shape, number_edges, passes_on

_MOST_NODES = 1000
"""Limit of a layer's nodes in the search for Functions."""
_META = torch.device("meta")


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    is_product: bool = True


class LazyTensor(Tensor):
    """The result of a product, or of operations on such results. Reading it computes it."""

    call: _Call
    operands: list[tuple[Tensor, int]]
    """The call's tensors, each with its number of in-place changes at that time."""
    within: LazyProducts | None
    """The products of the running backward; None for a compiled one."""
    value: Tensor | None
    __torch_function__ = autograd.sees_no_functions  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, call: _Call, within: LazyProducts | None) -> LazyTensor:
        is_flat = within is None and call.is_product  # of `postpone`
        tensors = [each for each in call.args if isinstance(each, Tensor)] if is_flat else _list_tensors(call[1:3])
        device = max(tensors, key=Tensor.dim).device  # a number may be on the CPU
        options: dict[str, Any] = {"strides": like.stride(), "dtype": like.dtype, "device": device}
        made: LazyTensor = autograd.make_wrapper(cls, like.shape, **options)
        made.operands = [(each, version_of(each)) for each in tensors if not isinstance(each, LazyTensor)]
        made.call, made.within, made.value = call, within, None
        if within is not None:
            within.waiting.append(made)
        return made

    def now(self) -> Tensor:
        if self.value is None:
            self.require_unchanged()
            with nullcontext() if self.within is None else replaced(self.within, is_computing=True):
                self.value = self.call.function(*_read(self.call.args), **_read(self.call.kwargs))
        return self.value

    def require_unchanged(self) -> None:
        _require_unchanged(self.operands, getattr(self.call.function, "__name__", "a product"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        own = [each for each in _list_tensors((args, kwargs)) if isinstance(each, LazyTensor)]
        if schema_of(func).is_mutable:
            _compute_all(own)
        elif func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags:
            call = _Call(func, args, kwargs, is_product=False)
            if (like := _infer(call)) is not None:
                return LazyTensor(like, call, own[0].within)
        return func(*_read(args), **_read(kwargs))


def _lend(name: str) -> Callable[..., Any]:
    def read(lazy: LazyTensor, *args: Any, **options: Any) -> Any:
        _compute_all([lazy])
        return getattr(lazy.now(), name)(*args, **options)

    return read


# Code outside torch reads, and may write.
for _name in ("__array__", "__dlpack__", "data_ptr", "numpy", "tolist", "untyped_storage"):
    setattr(LazyTensor, _name, _lend(_name))


def _require_unchanged(operands: Iterable[tuple[Tensor, int]], product: str) -> None:
    if any(version_of(tensor) != version for tensor, version in operands):
        raise RuntimeError(
            f"an operand of {product} was changed in place after the call, but W needs it: set weight_products = {{}}"
            " on this layer"
        )


def _compute_all(changed: Iterable[LazyTensor]) -> None:
    """Compute all results of the backwards with these calls, before one of them changes."""
    for lazy in changed:
        for each in (lazy,) if lazy.within is None else lazy.within.waiting:
            each.now()


def _list_tensors(value: Any) -> list[Tensor]:
    leaves: list[Any] = []
    map_leaves(value, leaves.append)
    return [each for each in leaves if isinstance(each, Tensor)]


def _read(args: Any) -> Any:
    return map_leaves(args, lambda leaf: leaf.now() if isinstance(leaf, LazyTensor) else leaf)


def postpone(function: Callable[..., Any], args: Sequence[Any], like: Tensor) -> LazyTensor:
    """A `LazyTensor` for `function(*args)`, whose result has the form of `like`."""
    return LazyTensor(like, _Call(function, list(args), {}), None)


def _infer(call: _Call) -> Tensor | None:
    """The form of the result, without memory; None if it is no single tensor, or torch cannot infer it."""
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
    """A key for arguments, with tensors by their shapes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_identify(each) for each in value])
    return tuple([(name, _identify(each)) for name, each in value.items()]) if isinstance(value, dict) else value


def _run_without_memory(call: _Call) -> Tensor | None:
    def without_memory(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)

    args, kwargs = map_leaves((call.args, call.kwargs), without_memory)
    try:
        with autograd.without_functions(), torch.no_grad(), autograd.without_modes():
            result = call.function(*args, **kwargs)
    except Exception:  # of any kind: a kernel for this device only, or one that reads its arguments
        return None
    return result if type(result) is Tensor and result.device == _META else None


class LazyProducts(TorchFunctionMode):
    """Mode in which products return a `LazyTensor` if their result has a weight's number of elements."""

    def __init__(self, elements: Collection[int]) -> None:
        super().__init__()
        self._elements = elements
        self.waiting: list[LazyTensor] = []
        self.is_computing = False
        self._backward = autograd.current_backward()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_wanted = not (self.is_computing or torch.is_grad_enabled() or autograd.any_autocast()) and _is_product(func)
        # Not in a nested backward, or a forward.
        if is_wanted and autograd.current_backward() == self._backward:
            call = _Call(func, args, kwargs)
            like = _infer(call)
            if like is not None and like.numel() in self._elements:
                return LazyTensor(like, call, self)
        return func(*args, **kwargs)


@lru_cache(4096)
def _is_product(function: Any) -> bool:
    """Whether a function, by its name, multiplies matrices and writes into no argument."""
    name, _, overload = getattr(function, "__name__", "").partition(".")
    overloads = [function] if overload else [getattr(function, each) for each in getattr(function, "overloads", list)()]
    if any(each.is_mutable for each in map(schema_of, overloads) if overload or "out" not in each.overload_name):
        return False
    if name == "__imatmul__" or (name.endswith("_") and not name.endswith("__")):
        return False
    return any(word in name for word in PRODUCTS)


PRODUCTS = ("mm", "matmul", "linear", "einsum")
"""Parts of the names of products: mm, scaled_grouped_mm, gemm, matmul, linear, einsum and the like."""


def count_flops(name: str, shapes: Iterable[torch.Size]) -> float:
    """FLOPs of a product by its name, which shows whether its first tensor is added, and by its tensors' shapes."""
    factors = [each for each in shapes if each][int("add" in name) :]
    return 2.0 * factors[0].numel() * factors[1][-1] if len(factors) > 1 else 0.0


class _At(NamedTuple):
    """A tensor's index among those of a recipe."""

    place: int


class _Step(NamedTuple):
    number: int


class _Wrapper(NamedTuple):
    """A tensor of a class that wraps others, such as a quantised one with its scale."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class Recipe:
    """How to compute a `LazyTensor`, without its tensors, except those in the `memory` of weights."""

    def __init__(self, lazy: Tensor, memory: Collection[int] = ()) -> None:
        self._memory = memory
        self.weights: list[tuple[Tensor, int]] = []
        """Weights that it reads, each with its number of in-place changes so far."""
        self.tensors: list[Tensor] = []
        self.flops = 0.0
        """FLOPs of its products; 0 if the backward has read their results."""
        self._known: dict[int, Any] = {}
        self._steps: list[_Call] = []
        self._result = self._note(lazy)
        self._known.clear()  # a result that the backward has read

    def _note(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._note_new(tensor)
        return self._known[id(tensor)]

    def _note_new(self, tensor: Any) -> Any:
        if isinstance(tensor, LazyTensor):
            if tensor.value is not None:
                return self._note_new(tensor.value)
            tensor.require_unchanged()
            call = tensor.call
            args, kwargs = map_leaves((call.args, call.kwargs), self._note)
            if call.is_product:
                own = getattr(call.function, "flops", None)  # of a compiled part
                shapes = (each.shape for each in _list_tensors((call.args, call.kwargs)))
                self.flops += count_flops(getattr(call.function, "__name__", ""), shapes) if own is None else own
            self._steps.append(_Call(call.function, args, kwargs))
            return _Step(len(self._steps) - 1)
        if is_wrapper(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._note(getattr(tensor, name)) for name in names}
            return _Wrapper(type(tensor), inner, context, tensor.shape, tensor.stride())
        if storage_of(tensor) in self._memory:
            self.weights.append((tensor.detach(), version_of(tensor)))
            return self.weights[-1][0]
        self.tensors.append(tensor.detach())
        return _At(len(self.tensors) - 1)

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        _require_unchanged(self.weights, "a backward that depends on a weight")
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
            args, kwargs = map_leaves((call.args, call.kwargs), fill_in)
            results.append(call.function(*args, **kwargs))
        result: Tensor = fill_in(self._result)
        return result


class Context:
    """A Function's `ctx` in its backward, with saved tensors that were read before `LazyProducts` saw any call. For
    them, a checkpoint may run its forward again."""

    def __init__(self, node: Any) -> None:
        vars(self).update(_node=node, saved_tensors=node.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_node"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_node"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_node"], name)


def run_own_backward(node: Node, gradients: Sequence[Any], context: Context | None = None) -> tuple[Any, ...]:
    kind: Any = type(node)
    if _takes_a_list(node):
        return cast(tuple[Any, ...], kind.apply_boxed(node, gradients))
    returned = kind.apply(node if context is None else context, *gradients)
    return returned if isinstance(returned, tuple) else (returned,)


def run_without_products(node: Node, gradients: Sequence[Any], weights: Iterable[Weight]) -> tuple[Any, ...]:
    """The same, with a `LazyTensor` for each gradient of `weights` that comes only from products."""
    mode, context = LazyProducts(frozenset(find_shape(each.edge).numel() for each in weights)), Context(node)
    with mode, autograd.replace_engine(_run_engine):
        returned = run_own_backward(node, gradients, context)
    mode.waiting.clear()  # breaks a cycle that would hold the operands
    return returned


def _run_engine(tensors: Any, gradients: Any, *more: Any, **options: Any) -> Any:
    """A backward within a backward, which must not leave a `LazyTensor` in `.grad`."""
    return autograd.run_engine(tensors, _read(gradients), *more, **options)


def is_compiled(node: Node) -> bool:
    return node.name() == "CompiledFunctionBackward"


def _takes_a_list(node: Any) -> bool:
    """Whether autograd passes the gradients as a list that the backward empties: from torch 2.13 on if compiled."""
    return getattr(function_of(node), "boxed_grads_call", False)


def holds_lazy(gradient: Any) -> bool:
    if isinstance(gradient, LazyTensor) or not is_wrapper(gradient):
        return isinstance(gradient, LazyTensor)
    return any(holds_lazy(getattr(gradient, name)) for name in gradient.__tensor_flatten__()[0])


def compute(gradient: Any) -> Any:
    if isinstance(gradient, LazyTensor) or hasattr(gradient, "now"):
        return gradient.now()
    if not holds_lazy(gradient):
        return gradient
    recipe = Recipe(gradient)
    return recipe.run(recipe.tensors)


def list_functions(outputs: Iterable[Any], inputs: Iterable[Any]) -> Iterator[Node]:
    """Nodes of foreign autograd Functions between a layer's inputs and outputs, unless their backward is replaced."""
    seen = {each.grad_fn for each in inputs if isinstance(each, Tensor)}
    waiting = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(cast(object, node), BackwardCFunction):
            is_ours = "apply" in vars(node) or hasattr(node, "deferral")
            if not (is_ours or passes_on(node)):
                yield node
        waiting += [each for each, _ in node.next_functions]


class Weight(NamedTuple):
    """An input of a Function that is a leaf, or a cast, a transpose or a view of one."""

    place: int
    """Its index among all inputs, and among the gradients that the backward returns."""
    number: int
    leaf: Tensor
    edge: GradientEdge


def list_weights(node: Any, owns: Callable[[Tensor], bool]) -> list[Weight]:
    """The inputs of a Function that belong to leaves that `owns` accepts."""
    found, edges = [], node.next_functions  # a new tuple each time
    for place, number in number_edges(node).items():
        edge = edges[number]
        leaf = find_leaf_behind(edge[0])
        if leaf is not None and owns(leaf):
            found.append(Weight(place, number, leaf, GradientEdge(*edge)))
    return found


def replace_backward(node: Any, run: Any) -> None:
    """Let autograd call `run(node, gradients)` as the backward of this node only."""
    here = ref(node)  # a strong reference would be a cycle

    def apply(*gradients: Any) -> Any:
        return run(here(), gradients)

    if _takes_a_list(node):
        node.apply_boxed = lambda gradients: run(here(), gradients)
    node.deferral, node.weight_places = run.deferral, tuple(each.number for each in run.weights)  # for `work`
    node.apply = apply


def list_memory(tensors: Iterable[Any]) -> set[int]:
    """The storages of plain tensors, and of tensors that wrap them."""
    found: set[int] = set()
    for each in tensors:
        if type(each) not in PLAIN and is_wrapper(each):
            names, _ = each.__tensor_flatten__()
            found |= list_memory(getattr(each, name) for name in names)
        elif isinstance(each, Tensor) and not isinstance(each, LazyTensor) and each.layout is torch.strided:
            found.add(storage_of(each))  # not by its parts: a DTensor's mesh is one
    return found
