"""torch.compile: compiled modules, their calls, and the state of the compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_compilation_metrics
from torch._dynamo.variables.torch import get_overridable_functions
from torch._guards import CompileContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor import config as inductor_config
from torch.fx.experimental.symbolic_shapes import guard_or_false

from zbpipe.runtime._torch.hooks import Call
from zbpipe.runtime.attributes import replaced

CompilerError = TorchDynamoException
"""What the compiler raises if it cannot compile a function."""

_OURS = ("zbpipe", "WeightWithSlots", "_weight_deferral")
"""Words in the compiler's reasons that belong to zbpipe."""


def find_complaints_since(last: object) -> list[str]:
    """The first lines of reasons that belong to zbpipe, for breaking a graph or compiling again since `last`."""
    reasons: list[str] = []
    for each in reversed(get_compilation_metrics()):
        if each is last:
            break
        reasons += each.restart_reasons or ()
        # The guard that failed, without the line that it comes from.
        reasons += [each.recompile_reason.partition("  #")[0]] if each.recompile_reason else []
    return [each.partition("\n")[0] for each in reasons if any(word in each for word in _OURS)]


def find_last_compilation() -> object:
    """The compiler's record of its last compilation; None before the first."""
    known = get_compilation_metrics()
    return known[-1] if known else None


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called on it."""
    return is_optimized(module) or module._compiled_call_impl is not None


def is_optimized(module: nn.Module) -> bool:
    """Whether this is a wrapper returned by `torch.compile(module)`. The wrapper exposes the inner module's
    attributes."""
    return isinstance(module, OptimizedModule)


def runs_in_cuda_graphs(module: nn.Module) -> bool:
    """Whether a module will run in CUDA graphs, according to its options, Inductor's configuration, or the compiler's
    backend."""
    if not is_compiled(module):
        return False
    backend = find_backend(module)
    options = getattr(backend, "config", None)  # Inductor's options, if the user gave some
    if options is None:
        return getattr(backend, "compiler_name", "") == "cudagraphs"
    return bool(options.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def find_backend(module: nn.Module) -> Any:
    """The backend with which a module is compiled; None if it is unknown."""
    if isinstance(module, OptimizedModule):
        context: Any = module.dynamo_ctx
    else:
        compiled, _ = find_diverted_calls(module) or (module._compiled_call_impl, None)
        context = inspect.getclosurevars(cast(Call, compiled)).nonlocals.get("self")
    backend = getattr(context, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def divert_compiled_call(module: nn.Module, region: Callable[..., Any]) -> None:
    """Make calls of a compiled module run `region(compiled, eager, *args, **kwargs)`."""
    if isinstance(module, OptimizedModule):
        module.forward = partial(region, module.forward, module._orig_mod)
    else:
        module._compiled_call_impl = partial(region, module._compiled_call_impl, module._call_impl)


def exclude_from_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, excluded from compilation."""
    return cast(Callable[..., Any], torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def find_compiled_call(module: nn.Module) -> Any:
    """The callable behind a compiled module."""
    call = getattr(module, _call_name(module))
    return call.func if isinstance(call, partial) else call


def find_diverted_calls(module: nn.Module) -> tuple[Call, Call] | None:
    """The pair (compiled, eager) passed to the region of a diverted module; None for other modules."""
    call = getattr(module, _call_name(module)) if is_compiled(module) else None
    return call.args if isinstance(call, partial) else None


def with_calls(module: nn.Module, compiled: Call, eager: Call) -> AbstractContextManager[None]:
    """Context in which the region of a diverted module gets these calls."""
    name = _call_name(module)
    return replaced(module, **{name: partial(getattr(module, name).func, compiled, eager)})


def without_region(module: nn.Module, call: Call) -> AbstractContextManager[None]:
    """Context in which a diverted module's calls run `call` instead of its region."""
    return replaced(module, **{_call_name(module): call})


def _call_name(module: nn.Module) -> str:
    return "forward" if isinstance(module, OptimizedModule) else "_compiled_call_impl"


def make_slot_permit() -> Callable[[], str]:
    """A function that a layer calls during its compilation. The answer becomes a constant of the graph.

    "take": use the slots and remove them. "borrow": use them without removal, because a checkpointed part of a graph
    must not change state. "no": another product uses them, or this part of the graph may run several times.
    """
    last_trace: Any = None
    was_borrowed = is_in_parts = False

    def ask() -> str:
        nonlocal last_trace, was_borrowed, is_in_parts
        trace = CompileContext.current_trace_id()
        if trace == last_trace:
            return "no"
        last_trace = trace
        output = InstructionTranslator.current_tx().output
        # After "borrow" the slots are still there, so no later part of the same code may use them.
        is_part = output.root_tx.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
        if output.current_tracer.parent is None:
            is_in_parts |= is_part
            return "no" if is_part and was_borrowed else "take"
        if is_part or is_in_parts or not _is_in_checkpoints_only(output.current_tracer):
            return "no"
        was_borrowed = True
        return "borrow"

    # A new function each time: the compiler treats functions with the same code as equal, and reuses one block's graph
    # for the next.
    return cast(Callable[[], str], torch.compiler.assume_constant_result(ask))  # type: ignore[no-untyped-call]


def _is_in_checkpoints_only(tracer: Any) -> bool:
    """Whether only activation checkpointing surrounds the traced code. A loop would run it several times."""
    while tracer.parent is not None:
        if tracer.source_target is not tag_activation_checkpoint:
            return False
        tracer = tracer.parent
    return True


def let_compiler_dispatch(function: Callable[..., Any]) -> None:
    """Make the compiler call the arguments' `__torch_function__` for a non-public function, as torch does."""
    get_overridable_functions().add(function)


def is_surely_same_shape(one: Tensor, other: Tensor) -> bool:
    """Whether the shapes are equal, without a guard. A data-dependent size counts as different."""
    return one.dim() == other.dim() and all(
        guard_or_false(size == wanted) for size, wanted in zip(one.shape, other.shape, strict=True)
    )
