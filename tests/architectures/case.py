"""A small model of somebody else's library, and the share of its weight gradients that waits for W."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# PyPI's torchvision is built for CUDA. Its operators do not load with a CPU build of torch, but its import registers
# kernels for two of them.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if "+cpu" in torch.__version__:
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

SAMPLES = 4
"""Samples in a batch: two microbatches of two."""
LENGTH = 8
"""Tokens of a sample."""
VOCABULARY = 48


class Case(NamedTuple):
    """One architecture."""

    name: str
    build: Callable[[], nn.Module]
    """Makes the model, with random weights."""
    batch: Callable[[], Tensor | tuple[Tensor, ...]]
    """Makes the arguments of the model."""
    share: float = 0.95
    """Least share of the weight gradients that is deferred to W, by FLOPs and by elements."""


class Takes(nn.Module):
    """A model whose arguments have names, with the one output that a pipeline hands on."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str | int, **constant: Any) -> None:
        super().__init__()
        self.model = model
        self.names, self.output, self.constant = names, output, constant

    def forward(self, *args: Tensor) -> Tensor:
        output: Any = self.model(**dict(zip(self.names, args, strict=True)), **self.constant)
        result: Tensor = output[self.output]
        return result


def tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (SAMPLES, LENGTH))


def image() -> Tensor:
    return torch.randn(SAMPLES, 3, 32, 32)


def transformer(config: str, auto: str, options: Mapping[str, Any], **more: Any) -> nn.Module:
    """A model of transformers: `auto` is the class for its task."""
    import transformers

    model: nn.Module = getattr(transformers, auto).from_config(getattr(transformers, config)(**options), **more)
    return model.train()
