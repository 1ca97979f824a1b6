"""Schedules on PyTorch: the classes that torch's executor runs, and the backward split on its stages."""

import torch

KNOWN = ("2.11", "2.15")
"""The oldest and the newest torch that zbpipe was tried with."""

try:
    from zbpipe.runtime._torch import (  # noqa: F401
        abandoned,
        autograd,
        buffers,
        checkpoints,
        compiler,
        frames,
        fsdp,
        graph_products,
        hooks,
        live,
        on_meta,
        pipelining,
        place,
        running_ahead,
    )
except ImportError as error:
    raise ImportError(
        f"zbpipe uses private names of torch {KNOWN[0]} to {KNOWN[1]}, and torch {torch.__version__} lacks one of"
        f" them ({error}): install one of these versions, or a newer zbpipe"
    ) from None

__all__ = ["KNOWN"]
