"""TorchTitan on a machine without an accelerator: the CPU stands in for it.

It uses gloo, no CUDA graphs, and causal attention, because FlexAttention has no backward on the CPU. So documents
packed into one sequence see each other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from inspect import isfunction, signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend

from zbpipe.frameworks.titan import batches
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.autograd import set_available_device_type

NOTICE = (
    "zbpipe: no accelerator found, so this trains on the CPU"
    " (gloo, causal attention in place of FlexAttention, no CUDA graphs)"
)


def is_needed() -> bool:
    return not torch.accelerator.is_available()


def stand_in() -> None:
    """Make the CPU TorchTitan's device. Call this before the import of torchtitan."""
    set_available_device_type("cpu")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    answers = {
        "get_device_name": lambda device=None: platform.processor() or platform.machine(),
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=memory),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)
    # torch returns the string "cpu", but TorchTitan uses it as an index.
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]


@contextmanager
def compiling_late() -> Iterator[None]:
    """Context in which torch.compile waits for a function's first call: its backend takes half a second to load."""
    compile_now: Any = torch.compile

    def compile_late(function: Any = None, **options: Any) -> Any:
        if not isfunction(function):
            return compile_now(function, **options)
        compiled = cache(partial(compile_now, function, **options))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    with replaced(torch, compile=compile_late):
        yield


def make_summing(parallelize_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`parallelize_fn`, with FSDP2 set to sum and then scale: gloo has no reduction that scales."""

    def parallelize(*args: Any, **kwargs: Any) -> Any:
        model = parallelize_fn(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def adapt(config: Any) -> None:
    """Change a job's `Trainer.Config` in place, so that the CPU can run it."""
    config.training.disable_cuda_graphs = True
    if config.model_spec is not None:
        use_causal_attention(config.model_spec, batches.length(config.training))
        config.model_spec = replace(config.model_spec, parallelize_fn=make_summing(config.model_spec.parallelize_fn))


def train_spec(spec: Any) -> Any:
    """A model's `TrainSpec`, changed so that the CPU can run it."""
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    torch.histc = _histogram
    model_args = {flavor: ask_for_causal_attention(args) for flavor, args in spec.model_args.items()}
    return replace(spec, model_args=model_args, parallelize_fn=make_summing(spec.parallelize_fn))


def _histogram(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.histc`, which counts the experts' tokens. torch's CPU version takes only floating point."""
    return _titans_histogram(input.float(), *args, **kwargs).to(input.dtype)


_titans_histogram = torch.histc


def ask_for_causal_attention(args: Any) -> Any:
    if getattr(args, "attn_type", "sdpa") == "sdpa":
        return args
    changed = copy(args)
    changed.attn_type, changed.attn_mask_type = "sdpa", "causal"
    return changed


@cache
def _in_row() -> Any:
    """TorchTitan's causal attention, for tokens in one row with a new sequence every `length` tokens."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class CausalAttentionInRow(ScaledDotProductAttention):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
            length: int = 0

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.length = config.length

        # TorchTitan shards the arguments by these names.
        def forward(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, **keywords: Any) -> Any:  # noqa: N803
            tokens = q_TNH.shape[0]
            length = tokens if tokens % self.length else self.length
            sequences = [each.reshape(-1, length, *each.shape[1:]) for each in (q_TNH, k_TNH, v_TNH)]
            return super().forward(*sequences, **keywords).flatten(0, 1)

    return CausalAttentionInRow


def use_causal_attention(model_spec: Any, length: int) -> None:
    """Give a `ModelSpec` of 0.3 or later, with sequences of `length` tokens, attention that the CPU supports."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention

    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    in_row = "q_TNH" in signature(FlexAttention.forward).parameters
    for masked in (FlexAttention.Config, VarlenAttention.Config):
        for _, _, owner, attribute in list(model_spec.traverse(masked)):
            causal = _in_row().Config(length=length) if in_row else ScaledDotProductAttention.Config()
            if isinstance(owner, list):
                owner[attribute] = causal
            else:
                setattr(owner, attribute, causal)
