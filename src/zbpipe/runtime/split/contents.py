"""Checks of content between I and W: autograd's versions miss writes through `.data` or by a kernel.

Only the first microbatches of a layer are checked, so that a correct job pays nothing after its second step. Each
checking I and W waits for the device once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbpipe.runtime._torch import tensor_data

STEPS, RUNS = 2, 4


@dataclass(slots=True)
class Checks:
    """Selects the checked uses of a layer: all in the first runs of its first steps."""

    runs: int = RUNS
    """Number of checked runs (F or I) per step."""
    seen_steps: int = 0
    seen_runs: int = 0
    last: tuple[int, int] = (0, 0)

    def is_due(self, step: int, run: int) -> bool:
        """Whether to check in this run of this step. Step 0 is before the first step."""
        if self.seen_steps > STEPS:
            return False
        if step and step != self.last[0]:
            self.seen_steps += 1
            self.seen_runs = 0
        if (step, run) != self.last:
            self.seen_runs += 1
            self.last = step, run
        return self.seen_steps <= STEPS and self.seen_runs <= self.runs


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A number per tensor that changes with its content, on the first tensor's device."""
    return torch.stack([tensor_data.fingerprint(each).to(tensors[0].device) for each in tensors])


def differ(one: float, other: float) -> bool:
    """Whether two fingerprints show a change. A hidden content that becomes visible in a copy is no change."""
    return tensor_data.HIDDEN not in (one, other) and one != other
