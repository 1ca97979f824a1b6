"""Layers in compiled regions, as torch traces them.

The weight gradient of a whole layer y = layer(x) is traced as a function of dY and x. Without the operations that it
does not need, one product remains, with what casts or quantises its operands. Where another object replaces a
weight, a trace with it shows whether the layer computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from zbpipe.runtime._torch import autograd

_PLAIN = (Tensor, nn.Parameter)
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Spec(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def spec(tensor: Tensor) -> Spec:
    return Spec(tensor.shape, tensor.dtype, tensor.device)


class Call(NamedTuple):
    """A call of a layer, with specs in the place of tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def find_call(args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Call | None:
    """The call with plain tensors and values alone; None for any other, and under autocast."""
    leaves = autograd.list_leaves((tuple(args), kwargs))
    if autograd.any_autocast() or not all(type(each) in (*_PLAIN, *_VALUES) for each in leaves):
        return None
    return Call(*autograd.map_leaves((tuple(args), kwargs, output), _without_tensor))


def _without_tensor(leaf: Any) -> Any:
    return spec(leaf) if type(leaf) in _PLAIN else leaf


def _with_tensor(leaf: Any) -> Any:
    return _make(leaf.shape, leaf) if type(leaf) is Spec else leaf


class Traced(NamedTuple):
    """A weight gradient."""

    of_weight: Callable[[Tensor, Tensor], Tensor]
    """(dy, x) to the gradient."""
    inner: float
    """Multiplications per element of dY."""


def make_twin(layer: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A module that shares everything with `layer`, except these parameters, which are plain attributes."""
    twin: nn.Module = object.__new__(type(layer))
    renew_twin(twin, layer, tensors)
    return twin


def renew_twin(twin: nn.Module, layer: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Make `twin` that of the present `layer`: FSDP replaces parameters."""
    own = {name: each for name, each in vars(layer).items() if name not in ("forward", "_weight_deferral")}
    parameters = {name: each for name, each in layer._parameters.items() if name not in tensors}
    vars(twin).update(own | {"_parameters": parameters} | tensors)


def trace_weight_gradient(
    layer: nn.Module, weight: str, x: Any, y: Any, backend: Any, may_read_weights: bool
) -> Traced | None:
    """The gradient of the parameter `weight` for x and y of these specs; None unless it is one product of dY and x.

    `may_read_weights`: whether W can read the layer's parameters.
    """
    parameters = {name: each for name, each in layer._parameters.items() if each is not None}
    if any(type(each) not in _PLAIN for each in parameters.values()):
        return None
    with FakeTensorMode():
        inputs = [_make(each.shape, each) for each in (x, y)]
        fakes = [_make(each.shape, each, each.stride()) for each in parameters.values()]

    def gradient(x: Tensor, dy: Tensor, *tensors: Tensor) -> Tensor:
        own = dict(zip(parameters, tensors, strict=True))
        own[weight] = own[weight].detach().requires_grad_()
        with torch.enable_grad():
            y = make_twin(layer, own).forward(x.detach())
            (found,) = torch.autograd.grad(y, own[weight], dy)
        return found

    try:
        # A checkpoint around the region would count what is saved and computed here, and miss it when it recomputes.
        with saved_tensors_hooks(_as_it_is, _as_it_is), _disable_current_modes():
            graph = make_fx(gradient, tracing_mode="fake")(*inputs, *fakes)
    except Exception:  # of any kind: whatever a forward may do that torch cannot trace
        return None
    _drop_unneeded(graph)
    products = [node for node in graph.graph.nodes if _is_product(node)]
    reads_weights = _needs_weights(graph)
    if len(products) != 1 or not all(map(_is_fine, graph.graph.nodes)) or (reads_weights and not may_read_weights):
        return None
    rows = y.shape.numel() or 1
    if "convolution" in str(products[0].target):
        flops = _count_convolved(products[0], parameters[weight].shape)
    else:
        flops = _count_multiplied(products[0])
    run = _compile(graph, (x, y), backend)
    shapes = [(each.shape, each.dtype) for each in parameters.values()]

    def of_weight(dy: Tensor, x: Tensor) -> Tensor:
        own = [each.detach() for each in layer._parameters.values() if each is not None] if reads_weights else ()
        with torch.no_grad():
            result: Tensor = run(x, dy, *(own or [_without_content(each, dy.device) for each in shapes]))
        return result

    return Traced(of_weight, flops / rows)


def computes_the_same(layer: nn.Module, stand_ins: Mapping[str, Callable[[Tensor], object]], call: Call) -> bool:
    """Whether the forward computes the same with these objects in the place of its parameters."""
    try:
        with saved_tensors_hooks(_as_it_is, _as_it_is), _disable_current_modes(), torch.no_grad():
            return _trace_forward(layer, {}, call) == _trace_forward(layer, stand_ins, call)
    except Exception:  # of any kind: the forward may not know what to do with such an object, or torch with the forward
        return False


def _trace_forward(layer: nn.Module, stand_ins: Mapping[str, Callable[[Tensor], object]], call: Call) -> str:
    parameters = {name: each for name, each in layer._parameters.items() if each is not None}
    with FakeTensorMode():
        fakes = [_make(each.shape, each, each.stride()) for each in parameters.values()]
        args, kwargs = autograd.map_leaves(call[:2], _with_tensor)

    def forward(tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        own: dict[str, Any] = dict(zip(parameters, tensors, strict=True))
        twin = make_twin(layer, own | {name: make(own[name]) for name, make in stand_ins.items()})
        vars(twin)["_buffers"] = dict(layer._buffers)
        return twin.forward(*args, **kwargs)

    return make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(fakes, args, kwargs).code


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _make(shape: torch.Size, like: Any, stride: tuple[int, ...] | None = None) -> Tensor:
    if stride is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)


def _without_content(like: tuple[torch.Size, torch.dtype], device: torch.device) -> Tensor:
    shape, dtype = like
    return torch.empty(1, dtype=dtype, device=device).expand(shape)


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in ("mm", "convolution", "matmul"))


def _is_fine(node: Node) -> bool:
    """Whether the node neither draws random numbers nor holds a tensor."""
    tags = getattr(node.target, "tags", ())
    return node.op != "get_attr" and torch.Tag.nondeterministic_seeded not in tags


def _drop_unneeded(graph: GraphModule) -> None:
    """Drop whatever the result does not depend on, with changes in place of products that nothing else reads."""
    graph.graph.eliminate_dead_code()
    while unread := [node for node in graph.graph.nodes if _changes_unread_product(node)]:
        for node in unread:
            graph.graph.erase_node(node)
        graph.graph.eliminate_dead_code()
    graph.recompile()


def _changes_unread_product(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    changed = node.args[0] if node.args else None
    if node.users or schema is None or not schema.is_mutable or not isinstance(changed, Node):
        return False
    return _is_product(changed) and list(changed.users) == [node]


def _needs_weights(graph: GraphModule) -> bool:
    """Whether the result depends on the content of a parameter."""
    _, _, *weights = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return any(map(_is_read, weights))


def _is_read(weight: Node) -> bool:
    # A convolution's backward takes the weight for its shape alone, unless it computes dX.
    return any(
        _is_read(user)
        if user.target is torch.ops.aten.detach.default
        else user.target is not torch.ops.aten.convolution_backward.default or user.args[2] is not weight
        for user in weight.users
    )


def _shape_of(value: Any) -> torch.Size:
    shape: torch.Size = value.meta["val"].shape
    return shape


def _count_multiplied(product: Node) -> float:
    # Of addmm and the like, the first argument is added.
    first = int("add" in str(product.target))
    one, other = (_shape_of(each) for each in product.args[first : first + 2])
    return float(one.numel() * other[-1])


def _count_convolved(product: Node, weight: torch.Size) -> float:
    dy, x = (_shape_of(each) for each in product.args[:2])
    is_transposed = product.args[7]
    return float((x if is_transposed else dy).numel() * weight[1:].numel())


_compiled: dict[Any, list[tuple[Any, Callable[..., Any]]]] = {}
"""Compiled graphs by their code, with the backends. Inductor's can be compared, but have no hash."""


def _compile(graph: GraphModule, specs: Any, backend: Any) -> Callable[..., Any]:
    """The graph, compiled once for all layers with the same."""
    known = _compiled.setdefault((graph.code, specs), [])
    for other, run in known:
        if other == backend:
            return run
    run = graph if backend is None else torch.compile(graph, backend=backend)
    known.append((backend, run))
    return run
