"""Autograd: nodes of its graph, hooks, Functions, and the modes under which it records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from zbpipe.runtime._torch.attributes import replaced

tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only


def copy_leaves(values: Any) -> Any:
    """`values` with copies of all tensors, without their graphs."""
    return tree_map_only(Tensor, lambda each: each.detach().clone().requires_grad_(each.requires_grad), values)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to each part that is no plain list, tuple or dictionary. pytree is slower."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(each, change) for each in value])
    if kind is dict:
        return {key: map_leaves(each, change) for key, each in value.items()}
    return change(value)


def copy_type(function: type[torch.autograd.Function], plain: Callable[..., Any]) -> None:
    """Let strict SPMD type checking (spmd_types) give `function` the types of `plain`."""
    # `plain` takes the same arguments, and computes the same with torch's own functions.
    _TYPED[function] = plain
    register_types()


_TYPED: dict[type[torch.autograd.Function], Callable[..., Any]] = {}


def register_types() -> None:
    """Register zbpipe's Functions with spmd_types if the job has imported it. Types are checked only then."""
    register = getattr(sys.modules.get("spmd_types"), "register_decomposition", None)
    while register is not None and _TYPED:
        register(*_TYPED.popitem())


def add_properties(function: type[torch.autograd.Function], **properties: Callable[[Any], Any]) -> None:
    for name, read in properties.items():
        setattr(cast(Any, function)._backward_cls, name, property(read))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own dictionary of parameters, also if attributes of the same names hide them."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


def profiler_is_on() -> bool:
    return bool(torch._C._autograd._profiler_enabled())


def has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks) or bool(weight._post_accumulate_grad_hooks)


def has_hooks_on_node(weight: Tensor) -> bool:
    return is_hooked(get_gradient_edge(weight).node)


def is_hooked(node: Node) -> bool:
    # torch does not list them, but all hooks of a node share a dictionary, which the handle of a new hook knows.
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
    """The innermost saved-tensor hooks, such as those of the checkpoint around this call."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def function_of(node: Any) -> Any:
    """The autograd Function of a node; None for torch's own nodes."""
    return getattr(node, "_forward_cls", None)


def shape_of(node: Any, number: int) -> Any:
    """Shape of the gradient for a node's result of this number."""
    return node._input_metadata[number].shape


def count_results(node: Any) -> int:
    return len(node._input_metadata)


def find_nodes(tensors: Iterable[Any]) -> list[Node]:
    """The nodes that made these tensors. Leaves have none."""
    return [each.grad_fn for each in tensors if isinstance(each, Tensor) and each.grad_fn is not None]


Edge = tuple[Node | None, int]


def edges_before(node: Node) -> Sequence[Edge]:
    return node.next_functions


def sort_nodes(roots: Iterable[Node], edges_of: Callable[[Node], Sequence[Edge]] = edges_before) -> Iterator[Node]:
    waiting, opened, done = list(roots), set[Node](), set[Node]()
    while waiting:
        node = waiting[-1]
        if node in done:
            waiting.pop()
        elif node in opened:
            waiting.pop()
            done.add(node)
            yield node
        else:
            opened.add(node)
            waiting += [each for each, _ in edges_of(node) if each is not None and each not in done]


current_backward = torch._C._current_graph_task_id
"""Number of this thread's running backward; -1 if none."""
run_engine: Callable[..., Any] = torch.autograd._engine_run_backward


def replace_engine(run: Callable[..., Any]) -> AbstractContextManager[None]:
    """Context in which `run` runs backwards instead of `run_engine`."""
    return replaced(torch.autograd, _engine_run_backward=run)


is_wrapper = is_traceable_wrapper_subclass
"""Whether a tensor wraps others, such as a quantised one with its scale."""
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
sees_no_functions = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of classes that change no function."""
without_functions = torch._C.DisableTorchFunction
without_modes = _disable_current_modes
without_autocast = torch._C._DisableAutocast


@contextmanager
def outside_of_modes(*, with_autocast: bool) -> Iterator[None]:
    """Context of computations within an F or a backward that no layer, checkpoint, type check or graph sees."""
    with ExitStack() as left:
        while torch._C._len_torch_function_stack():
            left.enter_context(_pop_mode_temporarily())
        if torch._C._len_torch_dispatch_stack():
            left.enter_context(_disable_current_modes())
        left.enter_context(torch.no_grad())
        if not with_autocast:
            left.enter_context(without_autocast())
        yield


def schema_of(operator: Any) -> Any:
    """The schema of one of torch's operators; None for other callables."""
    return getattr(operator, "_schema", None)


any_autocast = torch._C._is_any_autocast_enabled
_find_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing


def is_transformed() -> bool:
    """Whether `torch.func`, forward-mode AD or TorchScript's tracer is active."""
    return _find_transform() is not None or forward_ad._current_level >= 0 or _is_tracing()


def has_hooks_after_accumulation(weight: Tensor) -> bool:
    """Whether `weight` has hooks of `register_post_accumulate_grad_hook`, which may change or use `.grad`."""
    return bool(weight._post_accumulate_grad_hooks)


grouped_mm = torch._grouped_mm
"""Multiplies groups of rows, each by its own weight: (x, weight, offs=...). TorchTitan's experts call it."""


def set_available_device_type(device_type: str) -> None:
    """Make `device_type` torch's answer for the machine's accelerator."""
    torch._utils._get_available_device_type = lambda: device_type
