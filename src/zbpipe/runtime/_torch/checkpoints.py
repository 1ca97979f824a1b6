"""The activation checkpointing of a model, from the wrappers of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from zbpipe.costs.transformer import Checkpointing
from zbpipe.runtime._torch.attributes import plain_attribute


def checkpointing_of(parts: Sequence[nn.Module]) -> Checkpointing:
    """The activation checkpointing of these parts of a model, from `checkpoint_wrapper` around their layers.

    With a `context_fn`, as in TorchTitan, or with unwrapped layers of the same class, it is selective, otherwise full.
    Models of transformers declare it (`gradient_checkpointing`). Other calls of `torch.utils.checkpoint` in a forward
    are not detected: pass `checkpointing=`.
    """
    modules = [module for part in parts for module in part.modules()]
    found = [each for part in parts for each in _find_checkpointed(part)]
    if not found:
        says_so = any(plain_attribute(module, "gradient_checkpointing") is True for module in modules)
        return Checkpointing.FULL if says_so else Checkpointing.NONE
    inside = {id(module) for wrapped, _ in found for module in wrapped.modules()}
    classes = {type(wrapped) for wrapped, _ in found}
    some_are_not = any(type(module) in classes and id(module) not in inside for module in modules)
    keeps_some = any(keeps for _, keeps in found)
    return Checkpointing.SELECTIVE if keeps_some or some_are_not else Checkpointing.FULL


def _find_checkpointed(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Modules under `checkpoint_wrapper`, at any depth, each with whether a policy (`context_fn`) keeps activations."""
    wrappers = [each for each in module.modules() if isinstance(each, CheckpointWrapper)]
    return [
        (each._checkpoint_wrapped_module, "context_fn" in getattr(each.checkpoint_fn, "keywords", {}))
        for each in wrappers
    ]
