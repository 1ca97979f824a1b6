"""One stage of a job, ready to train without its neighbours. Imports no torchtitan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class StageUnderTest(NamedTuple):
    """A stage of a job, ready to train."""

    module: nn.Module
    device: torch.device
    tokens: tuple[int, ...]
    """The shape of a microbatch's token ids."""
    vocabulary: int
    hidden: tuple[int, torch.dtype]
    """The width and the dtype of what stages hand on."""
    keywords: Mapping[str, Any]
    """Of its forward."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Of the model's last stage."""
