"""torch.compile: compiled modules, their calls, and the state of the compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.backends import common
from torch._functorch import partitioners
from torch._functorch._aot_autograd import descriptors
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config

default_partition: Callable[..., Any] = partitioners.default_partition
compile_whole: Callable[..., Any] = common.aot_module_simplified
PlainInput = descriptors.PlainAOTInput
"""Description of a region's argument, by its number `idx`."""


def call(compile_region: Callable[..., Any], run: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """`run(*args, **kwargs)`, in which `compile_region` compiles regions instead of `compile_whole`."""
    # Without a context, because each call of a compiled block in each microbatch waits for this.
    before, common.aot_module_simplified = common.aot_module_simplified, compile_region
    try:
        return run(*args, **kwargs)
    finally:
        common.aot_module_simplified = before


def find_metadata() -> Any:
    return TracingContext.get().fw_metadata


def note_context() -> Callable[[], AbstractContextManager[None]]:
    """A context that restores the present state of the compilation later."""
    region, compilation = TracingContext.try_get(), CompileContext.try_get()

    @contextmanager
    def resume() -> Iterator[None]:
        with tracing(region), compile_context(compilation):
            yield

    return resume


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called on it."""
    return is_optimized(module) or module._compiled_call_impl is not None


def is_optimized(module: nn.Module) -> bool:
    """Whether this is the wrapper of `torch.compile(module)`, which exposes the inner module's attributes."""
    return isinstance(module, OptimizedModule)


def runs_in_cuda_graphs(module: nn.Module) -> bool:
    """Whether a module runs in CUDA graphs: by its options, Inductor's configuration, or the backend."""
    if not is_compiled(module):
        return False
    backend = find_backend(module)
    options = getattr(backend, "config", None)  # Inductor's options, if the user gave some
    if options is None:
        return getattr(backend, "compiler_name", "") == "cudagraphs"
    return bool(options.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def find_backend(module: nn.Module) -> Any:
    """The backend of a compiled module; None if unknown."""
    if isinstance(module, OptimizedModule):
        context: Any = module.dynamo_ctx
    else:
        call: Any = module._compiled_call_impl
        compiled = call.args[-2] if isinstance(call, partial) else call  # diverted
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    backend = getattr(context, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def divert_compiled_call(module: nn.Module, region: Callable[..., Any]) -> None:
    """Let calls of a compiled module run `region(compiled, eager, *args, **kwargs)`."""
    if isinstance(module, OptimizedModule):
        if not isinstance(module.forward, partial):
            module.forward = partial(region, module.forward, module._orig_mod)
    elif not isinstance(module._compiled_call_impl, partial):
        module._compiled_call_impl = partial(region, module._compiled_call_impl, module._call_impl)


def exclude_from_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], torch.compiler.disable(function))  # type: ignore[no-untyped-call]
