"""The weight gradients that backwards defer to W, and checks that nothing changes what W reads.

autograd's versions miss writes through `.data` or by a kernel. So the content is also compared, but only in the first
microbatches of a layer: a correct job pays nothing after its second step. Each checking I and W waits for the device
once, and from the third step on a CUDA graph can capture steps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zbpipe.runtime._torch import collectives, tensor_data
from zbpipe.runtime.split import sources
from zbpipe.runtime.split.products import PendingGradient

STEPS, RUNS = 2, 4


@dataclass(slots=True)
class Checks:
    """Selects the checked uses of a layer: all in the first I of its first steps."""

    seen_steps: int = 0
    seen_runs: int = 0
    last: tuple[int, int] = (0, 0)

    def is_due(self, step: int, run: int) -> bool:
        """Whether to check in this run of this step. Step 0 precedes the first step."""
        if self.seen_steps > STEPS:
            return False
        if step and step != self.last[0]:
            self.seen_steps += 1
            self.seen_runs = 0
        if (step, run) != self.last:
            self.seen_runs += 1
            self.last = step, run
        return self.seen_steps <= STEPS and self.seen_runs <= RUNS

    def are_over(self, step: int) -> bool:
        """Whether no check follows `step` if later steps use the same layers."""
        return self.seen_steps >= STEPS or self.last[0] != step


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum per tensor, on the first tensor's device."""
    return torch.stack([tensor_data.fingerprint(each).to(tensors[0].device) for each in tensors])


def differ(one: float, other: float) -> bool:
    """Whether two fingerprints differ. Content that only becomes visible in a copy is no change."""
    return tensor_data.HIDDEN not in (one, other) and one != other


Changes = list[tuple[PendingGradient, str]]
"""Deferred gradients with changed tensors, and the names of these."""


def find_changed_versions(pending: Iterable[PendingGradient]) -> Changes:
    """In-place changes since the layers deferred their gradients, as counted by autograd."""
    changes = []
    for gradient in pending:
        now = tensor_data.versions_of(gradient.tensors)
        if now != gradient.versions:
            changes.append((gradient, gradient.name_where(map(operator.ne, now, gradient.versions))))
    return changes


def find_changed_contents(pending: Iterable[PendingGradient]) -> Changes:
    """Content changes since the fingerprints were taken, or since the last call."""
    checked = [each for each in pending if each.contents is not None]
    if not checked:
        return []
    now = [fingerprints(each.tensors) for each in checked]
    noted = [each.contents for each in checked if isinstance(each.contents, Tensor)]
    numbers = iter(torch.cat([each.to(now[0].device) for each in (*now, *noted)]).tolist())
    found = [[next(numbers) for _ in each.tensors] for each in checked]
    changes = []
    for gradient, new in zip(checked, found, strict=True):
        known = gradient.contents
        old = [next(numbers) for _ in new] if isinstance(known, Tensor) else known
        if words := gradient.name_where(map(differ, new, old or new)):
            changes.append((gradient, words))
        gradient.contents = new
    return changes


class WeightGradients:
    """Collects the weight gradients that backwards defer. One per schedule and rank."""

    def __init__(self, *, may_fuse: bool = True) -> None:
        self.may_fuse = may_fuse
        """Whether W may add a product to `.grad` by one kernel, which rounds less often than autograd."""
        # Plain attributes, because autograd runs the backward of CUDA ops in its own threads.
        self.recording: list[PendingGradient] | None = None
        """The deferred gradients; None while nothing records."""
        self.on_trial = False
        self.is_inferring = False
        """Whether torch infers shapes, one stage after the other. Compiled regions then run without the compiler."""
        self.are_whole = False
        """Whether the running F or B has no I. Its layers compute as without zbpipe, in less host time."""
        self.has_collectives: set[int] | None = None
        """Ids of the weights whose gradients need collectives in W; None if nobody asks."""
        self.step = self._run = 0
        """Counters of steps, and of their recordings."""

    @contextmanager
    def record(self, on_trial: bool = False) -> Iterator[list[PendingGradient]]:
        """Context in which layers defer their weight gradients into the yielded list."""
        # On trial, the gradients are added at once, and the list shows which ones would be deferred.
        pending: list[PendingGradient] = []
        self.recording, self.on_trial = pending, on_trial
        try:
            yield pending
        finally:
            self.recording, self.on_trial = None, False
            self._run += 1

    def defer(self, gradient: PendingGradient, checks: Checks | None = None) -> bool:
        """Defer `gradient`. False if nothing records, so that it has to be computed now."""
        if self.recording is None:
            return False
        gradient.may_fuse = self.may_fuse
        gradient.versions = tensor_data.versions_of(gradient.tensors)
        if checks is not None and self.step and checks.is_due(self.step, self._run):
            gradient.contents = fingerprints(gradient.tensors)
        self.recording.append(gradient)
        if self.on_trial:
            recording, self.recording = self.recording, None  # products that make a weight do not wait
            if self.has_collectives is None:
                gradient.accumulate()
            else:
                with collectives.finding_collectives() as has_any:
                    gradient.accumulate()
                if has_any():
                    self.has_collectives.add(id(sources.find_leaf(gradient.weight)))
            self.recording = recording
        return True
