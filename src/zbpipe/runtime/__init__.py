"""Schedules on PyTorch: the classes that torch's executor runs, and the backward split on its stages.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""

from importlib import import_module
from pkgutil import iter_modules

import torch

from zbpipe.runtime import _torch

KNOWN = ("2.11", "2.15")
"""Oldest and newest tested torch."""

try:
    for _module in iter_modules(_torch.__path__, "zbpipe.runtime._torch."):
        import_module(_module.name)
except ImportError as error:
    raise ImportError(
        f"zbpipe uses private names of torch {KNOWN[0]} to {KNOWN[1]}, and torch {torch.__version__} lacks one of"
        f" them ({error}): install one of these versions, or a newer zbpipe"
    ) from None

__all__ = ["KNOWN"]
