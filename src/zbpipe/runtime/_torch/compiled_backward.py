"""Compiled backwards in two parts: I's, and one for each weight whose gradient can wait.

torch's compiler gets the graph of a region's backward without the products that only weight gradients need. It returns
the factors of these products instead, whatever operations made them. A graph has no side effects, so the rest of it
computes the same gradients from the factors at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._dynamo.backends import common
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._functorch.partitioners import default_partition
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch.fx import Graph, GraphModule, Node

from zbpipe.runtime._torch import autograd
from zbpipe.runtime._torch.later import postpone
from zbpipe.runtime.attributes import replaced

_aten = torch.ops.aten
_VIEWS = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.permute.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}
_TURNS = {_aten.permute.default, _aten.t.default, _aten.transpose.int}
_PRODUCTS = ("mm", "matmul", "linear", "einsum", "convolution_backward")
"""Parts of the names of products."""
_COLLECTIVES = ("_c10d_functional", "symm_mem")
_CONVOLUTION = _aten.convolution_backward.default


def cut_backwards() -> AbstractContextManager[None]:
    """Context in which torch compiles backwards in two parts."""
    return replaced(common, aot_module_simplified=_compile)


_compile_whole = common.aot_module_simplified


def _compile(module: Any, args: Sequence[Any], *more: Any, **options: Any) -> Any:
    given = module.graph.find_nodes(op="placeholder") if isinstance(module, GraphModule) else ()
    examples = [getattr(node.meta.get("grapharg"), "example", None) for node in given]
    weights = {place for place, each in enumerate(examples) if isinstance(each, Tensor) and _is_weight(each)}
    if weights:
        compiler = options.get("bw_compiler") or options["fw_compiler"]
        partition = options.get("partition_fn", default_partition)
        of_weights: set[str] = set()

        def find_weights(joint: GraphModule, *more: Any, **others: Any) -> Any:
            found = partition(joint, *more, **others)
            of_weights.update(each.name for each in _list_made_from(joint.graph, weights))
            return found

        options["partition_fn"] = find_weights
        # Plain functions: torch would take a whole backward from its cache for serializable ones.
        options["fw_compiler"] = partial(_call, options["fw_compiler"])
        options["bw_compiler"] = lambda graph, inputs: _compile_backward(compiler, graph, inputs, weights, of_weights)
    return _compile_whole(module, args, *more, **options)


def _list_made_from(graph: Graph, arguments: Collection[int]) -> set[Node]:
    """All nodes that depend on these arguments of the region alone."""
    found = {each for each in graph.find_nodes(op="placeholder") if _find_argument(each.meta.get("desc")) in arguments}
    for node in graph.nodes:
        if node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _is_weight(tensor: Tensor) -> bool:
    return tensor.requires_grad and isinstance(autograd.find_leaf(tensor), nn.Parameter)


def _compile_backward(
    compiler: Callable[..., Any],
    graph: GraphModule,
    inputs: Sequence[Any],
    weights: Collection[int],
    of_weights: Collection[str],
) -> Any:
    whole = deepcopy(graph)
    parts, number = _cut(graph, weights, of_weights)
    if not parts:
        return compiler(graph, inputs)
    metadata: Any = TracingContext.get().fw_metadata
    given = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    returned = {given.get(node) for node in _results(graph.graph)}
    # Inductor reuses the memory of donated inputs.
    donated = [each for each in metadata.bw_donated_idxs or () if each not in returned]
    with replaced(metadata, bw_donated_idxs=donated):
        run = compiler(graph, inputs)
    context = TracingContext.try_get(), CompileContext.try_get()

    def compile_whole() -> Any:
        with tracing(context[0]), compile_context(context[1]), torch.no_grad():
            return compiler(whole, inputs)

    return _Backward(run, number, parts, compile_whole)


class _Part(NamedTuple):
    """The gradient of one weight."""

    place: int
    """Among the results of the backward."""
    argument: int
    """Number of the weight among the arguments of the region."""
    run: WeightGradient | None
    """None for a gradient in I."""
    factors: tuple[int, ...]
    """Places of the arguments of `run` among the factors."""
    like: Any
    """A fake tensor like the gradient."""
    in_i: float
    """FLOPs of products of the gradient in I."""


class WeightGradient:
    """Computes a weight gradient from its factors."""

    def __init__(self, graph: GraphModule, flops: float, is_one_product: bool) -> None:
        self._graph = graph
        self.flops = flops
        self.as_matrices: Callable[..., tuple[Tensor, Tensor]] | None = self._run if is_one_product else None
        """The two matrices whose product is the gradient."""

    def __call__(self, *factors: Any) -> Tensor:
        """The gradient."""
        if self.as_matrices is not None:
            one, other = self.as_matrices(*factors)
            with torch._C._DisableAutocast():
                return one.mm(other)
        return cast(Tensor, self._run(*factors))

    def _run(self, *factors: Any) -> Any:
        with torch._C._DisableAutocast(), torch.no_grad():
            return self._graph(*factors)


class _Mode:
    # Not one for each thread: autograd runs the backward of CUDA ops in its own threads.
    defers = is_trial = is_whole = False


_mode = _Mode()


@contextmanager
def deferring(is_trial: bool) -> Iterator[None]:
    """Context in which compiled backwards return a `Later` for each gradient that can wait; on trial with its value."""
    before = _mode.defers, _mode.is_trial
    _mode.defers, _mode.is_trial = True, is_trial
    try:
        yield
    finally:
        _mode.defers, _mode.is_trial = before


@contextmanager
def as_torch_compiles() -> Iterator[None]:
    """Context in which backwards run as torch compiles them, in one part."""
    before, _mode.is_whole = _mode.is_whole, True
    try:
        yield
    finally:
        _mode.is_whole = before


class _Backward:
    """A compiled backward."""

    _boxed_call = True

    def __init__(
        self, run: Callable[..., Any], number: int, parts: Sequence[_Part], compile_whole: Callable[[], Any]
    ) -> None:
        self._run = run
        self._number = number
        self._parts = [each for each in parts if each.run is not None]
        self._compile_whole = compile_whole
        self._whole: Callable[..., Any] | None = None
        self.products = {each.argument: (each.run.flops if each.run else 0.0, each.in_i) for each in parts}

    def __call__(self, args: list[Any]) -> Any:
        if _mode.is_whole:
            if self._whole is None:
                self._whole = self._compile_whole()
            return _run_boxed(self._whole, args)
        results = list(_run_boxed(self._run, args))
        results, factors = results[: self._number], results[self._number :]
        for part in self._parts:
            assert part.run is not None
            own = [each.detach() if isinstance(each, Tensor) else each for each in (factors[n] for n in part.factors)]
            if _mode.defers and _is_static(part.like):
                results[part.place] = postpone(part.run, own, part.like, part.place, _mode.is_trial)
            else:
                results[part.place] = part.run(*own)
        return results


def _run_boxed(run: Callable[..., Any], args: list[Any]) -> Any:
    return run(args) if getattr(run, "_boxed_call", False) else run(*args)


def _is_static(like: Tensor) -> bool:
    return all(isinstance(size, int) for size in (*like.shape, *like.stride()))


def find_compiled_products(node: Any) -> Mapping[int, tuple[float, float]] | None:
    """FLOPs of weight gradients that can wait and that cannot, by the weight's number among the region's arguments."""
    # None unless the node is that of a backward in two parts that has run. torch keeps the last in the node's class.
    run = getattr(getattr(node, "_forward_cls", None), "compiled_bw", None)
    return run.products if isinstance(run, _Backward) else None


def _results(graph: Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _cut(module: GraphModule, weights: Collection[int], of_weights: Collection[str]) -> tuple[list[_Part], int]:
    """Cut the graph to what I computes; returns the parts, and the number of results before the factors."""
    graph = module.graph
    output = graph.output_node()
    results = _results(graph)
    described = output.meta.get("desc") or [None] * len(results)
    arguments = {place: _find_argument(each) for place, each in enumerate(described)}
    places = [
        place
        for place, each in enumerate(results)
        if isinstance(each, Node) and arguments[place] in weights and len(_shape_of(each)) > 1
    ]
    if any(map(_changes_something, graph.nodes)):
        return [], len(results)
    _separate_convolutions(graph)
    results = _results(graph)
    found = _Found(graph, places, of_weights)
    taken = {place: each for place in places if (each := found.trace_back(results[place])).products}
    # Not products that I needs for others, as in a stage whose inputs need no gradient.
    in_i = _list_behind(factor for each in taken.values() for factor in each.factors)
    taken = {place: each for place, each in taken.items() if in_i.isdisjoint(each.products)}
    shared = _find_shared(each.products for each in taken.values())
    factors: dict[Node, int] = {}
    parts = []
    for place, each in taken.items():
        like = results[place].meta.get("val")
        argument = cast(int, arguments[place])
        if shared.isdisjoint(each.products) and isinstance(like, Tensor):
            run = _extract(module, results[place], each)
            own = tuple([factors.setdefault(node, len(factors)) for node in each.factors])
            parts.append(_Part(place, argument, run, own, like, 0.0))
            results[place] = None
        else:
            parts.append(_Part(place, argument, None, (), like, sum(map(_count, each.products))))
    number = len(results)
    if factors:
        output.args = ((*results, *factors),)
        if "desc" in output.meta:
            output.meta["desc"] = [*described, *[None] * len(factors)]
        graph.eliminate_dead_code()
        module.recompile()
    return parts, number


def _find_argument(described: Any) -> int | None:
    """Number of the argument to which a result of the backward belongs."""
    each = described.grad_of if isinstance(described, GradAOTOutput) else described
    while hasattr(each, "base"):  # of a tensor that wraps others
        each = each.base
    return each.idx if isinstance(each, PlainAOTInput) else None


def _changes_something(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_fixed(node: Node) -> bool:
    """Whether the node has to run in I: it draws random numbers, communicates, or has graphs of its own."""
    if node.op != "call_function":
        return True
    tags = getattr(node.target, "tags", ())
    is_operator = isinstance(node.target, torch._ops.OpOverload) or getattr(node.target, "__name__", "") == "getitem"
    in_order = any(word in str(node.target) for word in _COLLECTIVES) or torch.Tag.nondeterministic_seeded in tags
    return in_order or not (is_operator or getattr(node.target, "__module__", "") in ("_operator", "math"))


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in _PRODUCTS)


class _Taken(NamedTuple):
    """What W computes for one weight."""

    nodes: dict[Node, None]
    products: set[Node]
    factors: dict[Node, None]


class _Found:
    """Nodes of a backward that only weight gradients need."""

    def __init__(self, graph: Graph, places: Sequence[int], of_weights: Collection[str]) -> None:
        kept = [each for place, each in enumerate(_results(graph)) if isinstance(each, Node) and place not in places]
        fixed = [each for each in graph.nodes if each.op == "call_function" and _is_fixed(each)]
        self._in_i = _list_behind([*kept, *fixed])
        self._of_weights = {each for each in graph.nodes if each.name in of_weights}
        self._of_dy: set[Node] = set()
        self._after: set[Node] = set()
        """Products of dY and x, and whatever comes after them without another product."""
        for node in graph.nodes:
            if node.name.startswith("tangents") or not self._of_dy.isdisjoint(node.all_input_nodes):
                self._of_dy.add(node)
            if node.op != "call_function" or node in self._in_i:
                continue
            is_after = not self._after.isdisjoint(node.all_input_nodes)
            if self._is_of_activations(node) if _is_product(node) else is_after:
                self._after.add(node)

    def _is_of_activations(self, product: Node) -> bool:
        """Whether none of the factors is made from weights alone, as a product of dY and x."""
        if product.target is _CONVOLUTION:
            return list(cast(Sequence[bool], product.args[-1])) == [False, True, False]
        return self._of_weights.isdisjoint(product.all_input_nodes)

    def trace_back(self, result: Node) -> _Taken:
        """The nodes from the last products of dY and x on."""
        taken = _Taken({}, set(), {})
        waiting = [result] if result in self._after else []
        while waiting:
            node = waiting.pop()
            if node in taken.nodes:
                continue
            taken.nodes[node] = None
            is_last = _is_product(node)
            if is_last:
                taken.products.add(node)
            inputs = node.all_input_nodes
            if node.target is _CONVOLUTION:  # reads only the weight's shape
                inputs = [cast(Node, each) for each in node.args[:2]]
            for each in inputs:
                if each in self._after and not is_last:
                    waiting.append(each)
                else:
                    self._add_factor(each, taken)
        return taken._replace(factors=dict.fromkeys(sorted(taken.factors, key=self._of_dy.__contains__)))

    def _add_factor(self, node: Node, taken: _Taken) -> None:
        while node.target in _VIEWS:
            taken.nodes[node] = None
            node, *sizes = node.all_input_nodes
            taken.factors.update(dict.fromkeys(sizes))
        taken.factors[node] = None


def _list_behind(nodes: Iterable[Node]) -> set[Node]:
    seen, waiting = set[Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _find_shared(parts: Iterable[Collection[Node]]) -> set[Node]:
    seen, shared = set[Node](), set[Node]()
    for nodes in parts:
        shared |= seen.intersection(nodes)
        seen.update(nodes)
    return shared


def _separate_convolutions(graph: Graph) -> None:
    """Compute weight gradients of convolutions apart from dX, and gradients of biases as sums."""
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        of = {user.args[1]: user for user in node.users}
        mask = list(cast(Sequence[bool], node.args[-1]))
        if 1 not in of or not (mask[0] or mask[2]):
            continue
        dy = cast(Node, node.args[0])
        with graph.inserting_after(node):
            own = graph.call_function(_CONVOLUTION, (*node.args[:-1], [False, True, False]))
            own.meta = dict(node.meta)
        of[1].update_arg(0, own)
        if mask[2] and 2 in of:
            others = [each for each in range(dy.meta["val"].dim()) if each != 1]
            with graph.inserting_before(of[2]):
                bias = graph.call_function(_aten.sum.dim_IntList, (dy, others))
                bias.meta = dict(of[2].meta)
            of[2].replace_all_uses_with(bias)
            graph.erase_node(of[2])
        node.args = (*node.args[:-1], [mask[0], False, False])


def _extract(module: GraphModule, result: Node, taken: _Taken) -> WeightGradient:
    """The part of the graph that computes a weight gradient from its factors."""
    graph = Graph()
    copies = {node: graph.placeholder(f"factor_{number}") for number, node in enumerate(taken.factors)}
    matrices = _find_matrices(result, taken)
    product = next(iter(taken.products))
    end = _list_behind([result] if matrices is None else product.all_input_nodes)
    for node in module.graph.nodes:
        if node in taken.nodes and node in end:
            copies[node] = _copy(graph, node, copies)
    if matrices is None:
        graph.output(copies[result])
    else:
        one, other = (copies[each] for each in cast(Sequence[Node], product.args))
        if matrices == "turned":
            one, other = (graph.call_function(_aten.t.default, (each,)) for each in (other, one))
        graph.output((one, other))
    return WeightGradient(GraphModule(module, graph), sum(map(_count, taken.products)), matrices is not None)


def _copy(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    if node.target is _CONVOLUTION:
        dy, x, weight, *rest = node.args
        shape = list(cast(Node, weight).meta["val"].shape)
        like = graph.call_function(_aten.new_empty.default, (copies[cast(Node, dy)], [1]))
        like = graph.call_function(_aten.expand.default, (like, shape))
        return graph.call_function(_CONVOLUTION, (copies[cast(Node, dy)], copies[cast(Node, x)], like, *rest))
    new = graph.node_copy(node, copies.__getitem__)
    if new.target is _aten.view.default:  # the memory of a compiled result may have another order
        new.target = _aten.reshape.default
    return new


def _find_matrices(result: Node, taken: _Taken) -> str | None:
    """Whether the gradient is one product of two matrices: "plain", or "turned"; None if it is not."""
    is_turned, node = False, result
    while node.target in _TURNS and len(node.meta["val"].shape) == 2:
        if node.target is _aten.t.default or tuple(cast(Any, node.args[1:])) != ([0, 1],):
            is_turned = not is_turned
        node = node.all_input_nodes[0]
    if node.target is not _aten.mm.default or taken.products != {node} or len(node.args) != 2:
        return None
    return "turned" if is_turned else "plain"


def _count(product: Node) -> float:
    """FLOPs of a product."""
    first = int("add" in str(product.target))
    if product.target is _CONVOLUTION:
        dy, x, weight = (_shape_of(each) for each in product.args[:3])
        return 2.0 * (x if product.args[7] else dy).numel() * weight[1:].numel()
    shapes = [_shape_of(each) for each in product.args if isinstance(each, Node)]
    shapes = [each for each in shapes if each][first : first + 2]
    if len(shapes) < 2:
        return 0.0
    return 2.0 * shapes[0].numel() * shapes[1][-1]


def _shape_of(value: Any) -> torch.Size:
    shape = getattr(value.meta.get("val"), "shape", ())
    return torch.Size([each if isinstance(each, int) else 1 for each in shape])
