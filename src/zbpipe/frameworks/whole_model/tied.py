"""Tied weights of the first and last stage that are two tensors: on two ranks, or in two modules of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class TiedWeights:
    """Pairs of weights that stay equal, because both get the sum of their gradients.

    Args:
        names: each pair's names, in the first and in the last stage.
        first: the first stage, if it is on this rank.
        last: the last stage, if it is on this rank.
        peer: the rank with the other stage in the pipeline's group.
        group: the ranks of the pipeline.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, str]],
        first: nn.Module | None,
        last: nn.Module | None,
        peer: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._names = names
        self._first, self._last = first, last
        self._peer, self._group = peer, group

    @property
    def copies(self) -> list[nn.Parameter]:
        """The last stage's weights with another tensor in the first stage."""
        if self._last is None:
            return []
        return [weights[-1] for weights in self._find()]

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Context of a step, after which both weights of a pair have the sum of the step's gradients."""
        pairs = [pair for pair in self._find() if pair[0].requires_grad]
        weights = [weight for pair in pairs for weight in pair]
        earlier = [weight.grad for weight in weights]  # these already are sums
        for weight in weights:
            weight.grad = None
        try:
            yield
        except BaseException:  # such as a refused batch: the next step adds to the same gradients
            for weight, before in zip(weights, earlier, strict=True):
                weight.grad = before
            raise
        for pair in pairs:
            self._add_up([_gradient(weight) for weight in pair])
        for weight, before in zip(weights, earlier, strict=True):
            if before is not None:
                _gradient(weight).add_(_local(before))

    def _find(self) -> list[list[nn.Parameter]]:
        """This rank's weights of each pair with two tensors. FSDP2 replaces a module's parameters."""
        ends = [stage for stage in (self._first, self._last) if stage is not None]
        if not ends:
            return []
        found = []
        for names in self._names:
            used = names if len(ends) == 2 else [names[0 if self._first is not None else 1]]
            weights = [stage.get_parameter(name) for stage, name in zip(ends, used, strict=True)]
            if len(weights) == 1 or weights[0] is not weights[1]:
                found.append(weights)
        return found

    def _add_up(self, gradients: Sequence[Tensor]) -> None:
        mine, *others = gradients
        if others:
            mine += others[0]
            others[0].copy_(mine)
            return
        theirs = torch.empty_like(mine)
        messages = [
            dist.P2POp(dist.isend, mine, group=self._group, group_peer=self._peer),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=self._peer),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        mine += theirs


def _gradient(weight: Tensor) -> Tensor:
    """The gradient on this rank. The two shards of a pair have the same shape."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return _local(weight.grad)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
