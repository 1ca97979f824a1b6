"""Sources of a weight in autograd's graph: its leaf, a part of a leaf, or the parameters that make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zbpipe.runtime._torch import autograd
from zbpipe.runtime._torch.autograd import function_of, has_hooks, is_hooked
from zbpipe.runtime._torch.tensor_data import base_of

PLAIN = (Tensor, nn.Parameter)
"""Types of weights whose gradient is only a product of x and dY."""

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
"""Nodes that save no tensors, so that a second backward can run them at almost no cost."""
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
"""Libraries' Functions whose gradients the tests compare, by package. Their backwards have no side effects."""
_VIEWS = frozenset(
    (
        *("Alias", "AsStrided", "Diagonal", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "T", "Transpose", "Unbind", "Unfold", "UnsafeView", "Unsqueeze", "View"),
    )
)
"""Prefixes of the names of torch's own view nodes."""


def passes_on(node: Node) -> bool:
    """Whether the node is in `PASS_ON`, and not a user's Function of that name."""
    function = function_of(node)
    return node.name() in PASS_ON and (function is None or _package_of(function) in ("torch", "torchao"))


def is_known(function: type) -> bool:
    """Whether this Function's backward has no side effects, so that a part of it may run in W."""
    return function.__qualname__ in _KNOWN.get(_package_of(function), ()) or _package_of(function) == "zbpipe"


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def let_pass_nothing(node: Node | None) -> None:
    """Let the Functions between a product and its leaf pass on no gradient instead of zeros."""
    while node is not None and passes_on(node):
        if node.name() in _IDENTITIES:
            cast(Any, node).set_materialize_grads(False)
        node = node.next_functions[0][0]


_IDENTITIES = {"_UnwrapWeightBackward"}
"""Functions whose backward returns its argument: torchao's weights for MXFP8 and grouped products."""


class Part(NamedTuple):
    """A part of a leaf, by its place in the leaf's memory."""

    leaf: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    node: Node
    """The node with which autograd adds to the leaf's `.grad`."""

    def is_shown_by(self, tensor: Tensor) -> bool:
        """Whether a view with the same offset into the leaf shows this part."""
        return tensor.shape == self.size and tensor.stride() == self.stride and _leads_to(tensor.grad_fn, self.node)

    def fits(self, grad: Tensor) -> bool:
        """Whether `grad` has the leaf's memory layout."""
        return not grad.is_sparse and grad.stride() == self.leaf.stride() and not grad.requires_grad

    def of(self, grad: Tensor) -> Tensor:
        return grad.as_strided(self.size, self.stride, grad.storage_offset() + self.offset)


def find_part(tensor: Tensor) -> Part | None:
    """The part of a leaf that a view shows; None without one, or if an element appears twice."""
    leaf = base_of(tensor)
    if leaf is None or type(leaf) not in (Tensor, nn.Parameter) or leaf.dtype != tensor.dtype:
        return None
    if tensor.is_conj() or tensor.is_neg() or has_hooks(leaf) or not leaf.is_contiguous():
        return None
    # To autograd, the view of a detached tensor belongs to that one.
    end = get_gradient_edge(leaf).node if leaf.is_leaf and leaf.requires_grad else None
    if end is None or not _leads_to(tensor.grad_fn, end, is_hooked):
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


class Made(NamedTuple):
    """A weight computed only from parameters, such as a normalised, quantised or indexed one."""

    edge: GradientEdge
    """Where autograd takes the weight's gradient. It keeps the graph of the computation alive."""
    leaves: tuple[Tensor, ...]
    nodes: tuple[Node, ...]

    def of_leaves(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled()
        if any(map(has_hooks, self.leaves)):  # added since the forward; they must run once
            torch.autograd.backward([self.edge], [gradient], retain_graph=True, create_graph=differentiable)
            return tuple(None for _ in self.leaves)
        return torch.autograd.grad(
            [self.edge], self.leaves, [gradient], retain_graph=True, create_graph=differentiable, allow_unused=True
        )


_MOST_MAKING = 64
"""Limit of nodes that make a weight. By then activations usually show a dependency on other parameters."""
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
"""Nodes that keep no weight for their backward, because FSDP may free it before W."""


def find_making(
    tensor: Tensor, owns: Callable[[Tensor], bool], may_keep_weights: bool, through_products: bool = False
) -> Made | None:
    """The computation that makes the tensor only from parameters that `owns` accepts, if its graph can last until W.
    `through_products`: also by products whose own gradient could wait."""
    can_last = autograd.find_saving_hooks() is None  # a checkpoint would repeat its forward in W
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
    cast(Any, tensor.grad_fn).metadata[MADE] = made.leaves  # for `work`
    return None


MADE = "zbpipe: made from"
"""Metadata key for the leaves of a node that makes a weight."""


def _may_make(node: Any, through_products: bool) -> bool:
    """Whether the node may be part of a weight's computation."""
    function, is_ours = function_of(node), hasattr(node, "deferral")
    if (is_ours and not through_products) or any(word in node.name() for word in _NOT_MAKING):
        return False
    return function is None or is_ours or is_known(function) or passes_on(node)


def find_leaf(tensor: Tensor | GradientEdge | Part | Made) -> Tensor | None:
    """The leaf of which `tensor` is a cast, a transpose, a view or a local part; None otherwise."""
    # For an edge, the leaf that receives the edge's gradient.
    if isinstance(tensor, Part):
        return tensor.leaf
    if isinstance(tensor, Made):
        return tensor.leaves[0]
    if not isinstance(tensor, Tensor):
        return find_leaf_behind(tensor.node)
    if (node := tensor.grad_fn) is None:
        return tensor
    leaf = find_leaf_behind(node)
    if leaf is None and (part := find_part(tensor)) is not None:
        return part.leaf
    return leaf


def find_leaf_behind(node: Node | None) -> Tensor | None:
    """The leaf to which `node` passes a gradient on without saved tensors."""
    while node is not None:
        leaf = cast(Tensor | None, getattr(node, "variable", None))
        if leaf is not None or not passes_on(node):
            return leaf
        node = node.next_functions[0][0]
    return None


def number_edges(node: Any) -> dict[int, int]:
    """Numbers of a Function's edges that lead to gradients, by the indices of its arguments."""
    # A node has an edge for every tensor. Without a gradient it leads nowhere.
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
    return torch.Size(autograd.shape_of(weight.node, weight.output_nr))
