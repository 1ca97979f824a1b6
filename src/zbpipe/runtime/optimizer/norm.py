"""The norm of a pipeline's gradients: one rank's part, and the vote of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import fsum, inf, isfinite, sqrt
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zbpipe.runtime.device import find_device


def group_by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters with a gradient, by device mesh, because torch computes norms of one mesh at a time."""
    found: dict[Any, list[Tensor]] = defaultdict(list)
    for each in parameters:
        if each.grad is not None:
            found[each.grad.device_mesh if isinstance(each.grad, DTensor) else None].append(each)
    return list(found.values())


def square_on_rank(parameters: Iterable[Tensor], device: torch.device, *, copies: Sequence[Tensor] = ()) -> Tensor:
    """Squared norm of a pipeline rank's gradients, a float32 scalar, the same on all processes that share them.
    Parameters among `copies` of others do not count."""
    square, uncounted = torch.zeros((), device=device), set(map(id, copies))
    for group in group_by_mesh(each for each in parameters if id(each) not in uncounted):
        norm = get_total_norm([each.grad for each in group if each.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        square += norm.to(square.dtype) ** 2
    return square


def clip(
    parameters: Sequence[Tensor],
    max_norm: float,
    pipeline: dist.ProcessGroup | None,
    device: torch.device,
    *,
    copies: Sequence[Tensor] = (),
) -> Tensor:
    """Clip the gradients of a pipeline with a barrier over its ranks. Returns their norm without `copies`."""
    total = square_on_rank(parameters, device, copies=copies)
    dist.all_reduce(total, group=pipeline)
    total = total.sqrt()
    if max_norm < inf:
        for group in group_by_mesh(parameters):
            clip_grads_with_norm_(group, max_norm, total)
    return total


class Votes:
    """Asynchronous exchange of the ranks' gradient norms, one vote per step. Votes run over gloo in a separate thread,
    because a vote on the device would delay the next computations. All ranks, including other replicas, get the same
    numbers in the same order, so that all decide alike. `group` has the backend gloo and no other use."""

    def __init__(self, pipeline_rank: int, num_ranks: int, group: dist.ProcessGroup) -> None:
        self._rank = pipeline_rank
        self._num_ranks = num_ranks
        self._group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zbpipe votes")

    def cast(self, square: Tensor, about: str) -> Future[float]:
        """Send this rank's squared norm. Returns the norm over all ranks, infinite if one is not finite."""
        # `about` has to be the same on all ranks.
        stream = find_device(square.device).current_stream()
        return self._thread.submit(self._run, square, float(crc32(about.encode())), stream)

    def _run(self, square: Tensor, about: float, stream: torch.Stream) -> float:
        with stream:  # another stream, such as the thread's default, may be ahead of it
            mine = float(square)
        # The maximum of every number, because replicas' numbers are equal or almost equal.
        ballot = torch.zeros(self._num_ranks + 2, dtype=torch.float64)
        ballot[self._rank] = mine if isfinite(mine) else inf
        ballot[-2:] = torch.tensor([about, -about])
        dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._group)
        *squares, most, least = ballot.tolist()
        if most != -least:
            raise RuntimeError(
                "the ranks do not validate the same optimizer step: all of them have to call zbpipe.OptimizerStep"
                " equally often, with the same arguments and schedule"
            )
        return sqrt(fsum(squares)) if all(map(isfinite, squares)) else inf
