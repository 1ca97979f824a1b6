"""Autograd and tensors: the graph, hooks, and memory that tensors share."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from zbpipe.runtime._torch.attributes import replaced

PLAIN = (Tensor, nn.Parameter)
"""Types of weights whose gradient is only a product of x and dY."""

tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every part changed that is not a plain list, tuple or dictionary. pytree is slower."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(each, change) for each in value])
    if kind is dict:
        return {key: map_leaves(each, change) for key, each in value.items()}
    return change(value)


def list_leaves(value: Any) -> list[Any]:
    """All parts of `value` that `map_leaves` would change."""
    found: list[Any] = []
    map_leaves(value, found.append)
    return found


def version_of(tensor: Tensor) -> int:
    """Number of in-place changes of the tensor."""
    return tensor._version


def copy_type(function: type[torch.autograd.Function], plain: Callable[..., Any]) -> None:
    """Have strict SPMD type checking (spmd_types) give `function` the types of `plain`."""
    # `plain` takes the same arguments, and computes the same with functions of torch's alone.
    _TYPED[function] = plain
    register_types()


_TYPED: dict[type[torch.autograd.Function], Callable[..., Any]] = {}


def register_types() -> None:
    """Register zbpipe's Functions with spmd_types if the job has imported it. Types are checked only then."""
    register = getattr(sys.modules.get("spmd_types"), "register_decomposition", None)
    while register is not None and _TYPED:
        register(*_TYPED.popitem())


def add_properties(function: type[torch.autograd.Function], **properties: Callable[[Any], Any]) -> None:
    """Give the nodes of an autograd Function these properties."""
    for name, read in properties.items():
        setattr(cast(Any, function)._backward_cls, name, property(read))


def without_base(output: Tensor) -> Tensor:
    """An autograd Function's output that can be changed in place."""
    # Before torch 2.15 `F.linear` returns a view for three-dimensional inputs with a bias. Autograd refuses in-place
    # changes of a Function's view.
    return output.data if output._is_view() else output


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own dictionary of parameters, even if attributes of the same names hide them."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dictionary of buffers."""
    return module._buffers


def profiler_is_on() -> bool:
    """Whether torch's profiler is running in this process."""
    return bool(torch._C._autograd._profiler_enabled())


def list_allocations(seen: torch.profiler.profile, mark: str) -> list[tuple[str, list[int]]]:
    """Names of `record_function` that begin with `mark`, in order, each with the bytes that it allocated."""
    # Freed bytes are negative.
    found = seen.profiler.kineto_results.events() if seen.profiler and seen.profiler.kineto_results else []
    events: list[Any] = sorted(found, key=lambda event: event.start_ns())
    memory = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    times = [time for time, _ in memory]
    result = []
    for event in events:
        if event.name().startswith(mark):
            within = slice(bisect_left(times, event.start_ns()), bisect_right(times, event.end_ns()))
            result.append((event.name(), [size for _, size in memory[within]]))
    return result


def has_hooks(weight: Tensor) -> bool:
    """Whether `weight` has hooks: of `register_hook` or `register_post_accumulate_grad_hook`."""
    return bool(weight._backward_hooks) or bool(weight._post_accumulate_grad_hooks)


def has_hooks_on_node(weight: Tensor) -> bool:
    """Whether the node with which autograd adds to `weight.grad` has hooks."""
    return _is_hooked(get_gradient_edge(weight).node)


def _is_hooked(node: Node) -> bool:
    # torch does not list them. But all hooks of a node share a dictionary, which the handle of a new hook knows.
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *gradients: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def will_run(node: Node) -> bool | None:
    """Whether the current backward will run `node`: `torch.autograd.grad` runs only nodes that its inputs need."""
    # None if `node` is itself one of those inputs: the gradient then belongs to the caller of `torch.autograd.grad`.
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def find_saving_hooks() -> object:
    """The innermost hooks for tensors that autograd saves, such as those of the checkpoint around this call."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_apply(function: object) -> bool:
    """Whether this is `apply` of an autograd Function."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and function == owner.apply


@contextmanager
def catch_applies(applies: Iterable[Callable[..., Any]], catch: Callable[..., Any]) -> Iterator[None]:
    """Context in which a call of one of these `apply` runs `catch(apply, types, args, kwargs)`: no mode sees it."""
    with ExitStack() as stack:
        for each in applies:
            owner: Any = each.__self__  # type: ignore[attr-defined]
            own = vars(owner).get("apply")
            owner.apply = staticmethod(lambda *args, _apply=each, **options: catch(_apply, (), args, options))
            stack.callback(partial(delattr, owner, "apply") if own is None else partial(setattr, owner, "apply", own))
        yield


any_autocast = torch._C._is_any_autocast_enabled


def without_torch_functions() -> AbstractContextManager[None]:
    """Context in which functions of `torch.nn.functional` in Python do not ask for torch function modes."""
    # Those that they call, which are not in Python, still do.
    return replaced(torch.nn.functional, has_torch_function=lambda tensors: False)


_find_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing


def is_transformed() -> bool:
    """Whether `torch.func`, forward-mode AD or TorchScript's tracer is active."""
    return _find_transform() is not None or forward_ad._current_level >= 0 or _is_tracing()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, so that NaN is an ordinary number."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])
    # In a 64-bit sum the signs of an even number of elements would cancel out.
    return bits ^ (bits >> 31) if bits.dtype is torch.int64 else bits


HIDDEN = -(1 << 63)
"""The fingerprint of tensors with hidden content, such as results of pending collectives."""


def fingerprint(tensor: Tensor) -> Tensor:
    """A number on the device that changes with the content; `HIDDEN` for tensors with hidden content."""
    tensor = _local(tensor).detach()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return torch.full((), HIDDEN, dtype=torch.int64, device=tensor.device)
    by_place = _bits(tensor)  # sums of integers do not depend on the order in which a device adds them up
    if by_place.dim() > 1 and by_place.numel() > _FEW:
        columns = by_place.sum(tuple(range(by_place.dim() - 1)), dtype=torch.int64)
        by_place = torch.cat([columns, by_place.sum(-1, dtype=torch.int64).flatten()])
    number = by_place.numel()
    factors = _FACTORS[:number] if tensor.is_cpu and number <= _FEW else _make_factors(number, tensor.device)
    return (by_place.flatten() * factors).sum()


_FEW = 1 << 12
"""Number of elements up to which each has a factor."""


def _make_factors(number: int, device: torch.device) -> Tensor:
    """A different factor per element, or per row and column, detects numbers that change places."""
    factors = torch.arange(1, number + 1, device=device) * -7046029254386353131
    return factors ^ (factors >> 29)


with _disable_current_modes():  # a job may import this among fake tensors
    _FACTORS = _make_factors(_FEW, torch.device("cpu"))


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether both are bit-identical. It waits for the device."""
    return torch.equal(_bits(_local(one)), _bits(_local(other)))


def is_torchs_own(tensor: Tensor) -> bool:
    """Whether only torch has the tensor's memory: it is neither lent to nor borrowed from others, such as NumPy."""
    tensor = _local(tensor)
    return not _shows_storage(tensor) or tensor.untyped_storage().resizable()


def find_memory(tensor: Tensor) -> tuple[int | None, int, int]:
    """The storage of a tensor, the number of tensors that it counts for there, and the storage's bytes."""
    # A view keeps its base alive, so it counts for two.
    # No storage for tensors that hide it, such as results of pending collectives.
    tensor = _local(tensor)
    number = 1 if tensor._base is None else 2
    if not _shows_storage(tensor):
        return None, number, 0
    storage = tensor.untyped_storage()
    return storage._cdata, number, storage.nbytes()


def _shows_storage(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided


def list_holders(tensor: Tensor) -> list[Tensor]:
    """Tensors that hold the memory of `tensor`: itself and its base. Empty unless it is a plain tensor."""
    if type(tensor) is not Tensor:
        return []
    return [tensor] if tensor._base is None else [tensor, tensor._base]


def count_holders(storage: int) -> int:
    """Number of tensors in a storage returned by `find_memory`."""
    return int(torch._C._storage_Use_Count(storage)) - _ASKING


def _count_asking() -> int:
    alone = torch.empty(1)
    return int(torch._C._storage_Use_Count(alone.untyped_storage()._cdata)) - 1


_ASKING = _count_asking()
"""`find_memory` leaves one more Python object, which counts as a holder."""


def has_hooks_after_accumulation(weight: Tensor) -> bool:
    """Whether `weight` has hooks of `register_post_accumulate_grad_hook`, which may change or use `.grad`."""
    return bool(weight._post_accumulate_grad_hooks)


def keep_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Context in which autograd does not notice writes to `tensors`. The caller restores their values."""
    counted = tuple(each for each in tensors if not each.is_inference())
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(counted)


PASS_ON = {
    "AliasBackward0",
    "PermuteBackward0",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
    "_ToTorchTensorBackward",
    "_UnwrapWeightBackward",
    "_UnsafeViewBackward0",
}
"""Nodes that save no tensors of the forward, so that a second backward can run them at almost no cost."""
_KNOWN = {
    "torchao": frozenset(
        (
            *("matmul_with_hp_or_float8_args", "mx_mm", "nvfp4_mm_triton", "_BitNetTrainingLinear"),
            *("_Int8MixedPrecisionTrainingLinearFunction", "_Int8WeightOnlyLinear", "_MXFP8GroupedMM"),
            *("_Round", "_RoundToFloat8", "_ToAffineFakeQuantized"),
        )
    ),
    "peft": frozenset(("BlockCircularConvolution", "HadaWeight", "HadaWeightCP", "UniqueBaseGrad")),
}
"""Functions of libraries whose gradients the tests compare, by package. Their backwards have no side effects."""
_VIEWS = frozenset(
    (
        *("Alias", "AsStrided", "Diagonal", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "T", "Transpose", "Unbind", "Unfold", "UnsafeView", "Unsqueeze", "View"),
    )
)
"""Nodes of torch's own views, without what follows in their names."""


def passes_on(node: Node) -> bool:
    """Whether the node is in `PASS_ON`, and not somebody's Function of such a name."""
    function = getattr(node, "_forward_cls", None)
    return node.name() in PASS_ON and (function is None or _package_of(function) in ("torch", "torchao"))


def is_known(function: type) -> bool:
    """Whether the backward of this autograd Function has no side effects, so that a part of it may run in W."""
    return function.__qualname__ in _KNOWN.get(_package_of(function), ()) or _package_of(function) == "zbpipe"


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def let_pass_nothing(node: Node | None) -> None:
    """Have the Functions between a product and its leaf pass on that there is no gradient, instead of zeros."""
    while node is not None and passes_on(node):
        if node.name() in _IDENTITIES:
            cast(Any, node).set_materialize_grads(False)
        node = node.next_functions[0][0]


_IDENTITIES = {"_UnwrapWeightBackward"}
"""Functions whose backward returns what it gets: torchao's weights for MXFP8 and grouped products."""


class Part(NamedTuple):
    """A part of a leaf: the tensor's place in the leaf's memory."""

    leaf: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements before the first."""
    node: Node
    """The node with which autograd adds to the leaf's `.grad`."""

    def is_shown_by(self, tensor: Tensor) -> bool:
        """Whether a view with the same offset into the leaf shows this part."""
        return tensor.shape == self.size and tensor.stride() == self.stride and _leads_to(tensor.grad_fn, self.node)

    def fits(self, grad: Tensor) -> bool:
        """Whether `grad` lies in memory as the leaf does."""
        return not grad.is_sparse and grad.stride() == self.leaf.stride() and not grad.requires_grad

    def of(self, grad: Tensor) -> Tensor:
        """The same part of `grad`."""
        return grad.as_strided(self.size, self.stride, grad.storage_offset() + self.offset)


def find_part(tensor: Tensor) -> Part | None:
    """The part of a leaf that a view shows; None if it is no view of one, or shows an element twice."""
    leaf = tensor._base
    if leaf is None or type(leaf) not in (Tensor, nn.Parameter) or leaf.dtype != tensor.dtype:
        return None
    if tensor.is_conj() or tensor.is_neg() or has_hooks(leaf) or not leaf.is_contiguous():
        return None
    # For autograd, the view of a detached tensor belongs to that one.
    end = get_gradient_edge(leaf).node if leaf.is_leaf and leaf.requires_grad else None
    if end is None or not _leads_to(tensor.grad_fn, end, _is_hooked):
        return None
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return None
        reach += stride * (size - 1)
    return Part(leaf, tensor.shape, tensor.stride(), int(tensor.storage_offset() - leaf.storage_offset()), end)


def _leads_to(node: Node | None, end: Node, is_barred: Callable[[Node], bool] = lambda node: False) -> bool:
    """Whether all of the node's gradient goes to `end`, through torch's own views, none of them barred."""
    while node is not None and node is not end:
        if node.name().rstrip("0123456789").removesuffix("Backward") not in _VIEWS or is_barred(node):
            return False
        node = node.next_functions[0][0]
    return node is end


def identify_view(tensor: Tensor) -> tuple[int, int] | None:
    """The tensor that a view shows, by its id, and the place where the view begins; None if it is no view."""
    base = tensor._base
    return None if base is None else (id(base), int(tensor.storage_offset()))


class Made(NamedTuple):
    """A weight computed from parameters alone, such as a normalised, a quantised or an indexed one."""

    edge: GradientEdge
    """Where autograd takes the gradient of the weight. It keeps the graph of the computation alive."""
    leaves: tuple[Tensor, ...]
    """The parameters, the largest first."""
    nodes: tuple[Node, ...]
    """All nodes of the computation."""

    def of_leaves(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the parameters, for one of the weight."""
        differentiable = torch.is_grad_enabled()
        if any(map(has_hooks, self.leaves)):  # since the forward: they must run once
            torch.autograd.backward([self.edge], [gradient], retain_graph=True, create_graph=differentiable)
            return tuple(None for _ in self.leaves)
        return torch.autograd.grad(
            [self.edge], self.leaves, [gradient], retain_graph=True, create_graph=differentiable, allow_unused=True
        )


_MOST_MAKING = 64
"""Limit of nodes that make a weight. Activations usually show by then that they depend on other parameters."""
_NOT_MAKING = ("CompiledFunction", "Embedding")
_CHOICES = {"GatherBackward0", "IndexBackward0", "IndexSelectBackward0"}
_MATRIX = 2
_KEEP_NO_WEIGHTS = {
    "CatBackward0",
    "CloneBackward0",
    "ExpandBackward0",
    "GatherBackward0",
    "IndexBackward0",
    "IndexSelectBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SqueezeBackward1",
    "StackBackward0",
    "UnbindBackward0",
}
"""Nodes that keep no weight for their backward. FSDP may have freed its memory by W."""


def find_making(
    tensor: Tensor, owns: Callable[[Tensor], bool], may_keep_weights: bool, through_products: bool = False
) -> Made | None:
    """How the tensor is made, if from parameters alone that `owns` accepts, and if its graph can last until W.

    `through_products`: also by products whose own gradient could wait.
    """
    can_last = find_saving_hooks() is None  # a checkpoint would repeat its forward in W
    seen, waiting, leaves = dict[Node, None](), [tensor.grad_fn], dict[int, Tensor]()
    looks_up = False
    while waiting:
        node = cast(Any, waiting.pop())
        if node is None or node in seen:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            if not (owns(leaf) and leaf.requires_grad) or has_hooks(leaf):
                return None
            leaves[id(leaf)] = leaf
            continue
        if len(seen) >= _MOST_MAKING or not _may_make(node, through_products):
            return None
        seen[node] = None
        waiting += [each for each, _ in node.next_functions]
        can_last &= may_keep_weights or node.name() in _KEEP_NO_WEIGHTS or passes_on(node)
        looks_up |= node.name() in _CHOICES and len(find_shape(GradientEdge(*node.next_functions[0]))) == _MATRIX
    if not leaves or (looks_up and all(leaf.dim() <= _MATRIX for leaf in leaves.values())):
        return None
    ordered = sorted(leaves.values(), key=lambda leaf: -leaf.numel())
    made = Made(get_gradient_edge(tensor), tuple(ordered), tuple(seen))
    if can_last:
        return made
    cast(Any, tensor.grad_fn).metadata[MADE] = made.leaves  # for `graph_products`
    return None


MADE = "zbpipe: made from"
"""Key of the leaves in the metadata of a node that makes a weight."""


def _may_make(node: Any, through_products: bool) -> bool:
    """Whether the node may belong to the computation of a weight."""
    function, is_ours = getattr(node, "_forward_cls", None), hasattr(node, "deferral")
    if (is_ours and not through_products) or any(word in node.name() for word in _NOT_MAKING):
        return False
    return function is None or is_ours or is_known(function) or passes_on(node)


def find_leaf(tensor: Tensor | GradientEdge | Part | Made) -> Tensor | None:
    """The leaf of which `tensor` is a cast, a transpose, a view or a local part; None if it is anything else."""
    # For an edge, the leaf that receives a gradient passed to the edge.
    if isinstance(tensor, Part):
        return tensor.leaf
    if isinstance(tensor, Made):
        return tensor.leaves[0]
    if not isinstance(tensor, Tensor):
        return find_leaf_behind(tensor.node)
    if (node := tensor.grad_fn) is None:
        return tensor
    leaf = find_leaf_behind(node)
    if leaf is None and tensor._base is not None and (part := find_part(tensor)) is not None:
        return part.leaf
    return leaf


def find_leaf_behind(node: Node | None) -> Tensor | None:
    """The leaf to which `node` passes a gradient on without saved tensors."""
    while node is not None and passes_on(node):
        node = node.next_functions[0][0]
    return cast(Tensor | None, getattr(node, "variable", None))


def number_edges(node: Any) -> dict[int, int]:
    """Numbers of the edges of a Function's node that lead to gradients, by the places of its arguments."""
    # A node has an edge for every tensor, which leads nowhere for one without a gradient.
    numbers = [number for number, (source, _) in enumerate(node.next_functions) if source is not None]
    places = [place for place, is_needed in enumerate(node.needs_input_grad) if is_needed]
    return dict(zip(places, numbers, strict=True)) if len(places) == len(numbers) else {}


def find_edge(tensor: Tensor) -> GradientEdge | None:
    """The edge at which a later backward can pass a gradient of `tensor` to its leaf; None if the leaf has hooks."""
    edge = get_gradient_edge(tensor)
    leaf = find_leaf_behind(edge.node)
    return None if leaf is None or has_hooks(leaf) else edge


def find_shape(weight: Tensor | GradientEdge | Part | Made) -> torch.Size:
    """The shape of gradients for a weight, for a part of one, or for the edge of a weight."""
    if isinstance(weight, Tensor):
        return weight.shape
    if isinstance(weight, Part):
        return weight.size
    if isinstance(weight, Made):
        weight = weight.edge
    return torch.Size(cast(Any, weight.node)._input_metadata[weight.output_nr].shape)


grouped_mm = torch._grouped_mm
"""Groups of rows, each multiplied by its own weight: (x, weight, offs=...). TorchTitan's experts call it."""


def find_grad_dtype(weight: Tensor, gradient: Tensor) -> torch.dtype:
    """The dtype in which autograd would accumulate `gradient` of `weight`."""
    # FSDP2 sets `grad_dtype` to get wider gradients. None means the gradient's own dtype. torch before 2.13 lacks it.
    return cast(torch.dtype, getattr(weight, "grad_dtype", weight.dtype) or gradient.dtype)


def set_available_device_type(device_type: str) -> None:
    """Make `device_type` torch's answer when it is asked for the machine's accelerator."""
    torch._utils._get_available_device_type = lambda: device_type
