"""Whether W finds what the layer saw in I, by content: autograd's versions miss writes through `.data` or by a kernel.

Only the first microbatches of a layer are checked, so that a good job pays nothing after its second step. Each I and
each W that checks waits for the device once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbpipe.runtime._torch import autograd

STEPS, RUNS = 2, 4


@dataclass(slots=True)
class Checks:
    """Which uses of a layer are checked: all in its first runs of its first steps."""

    runs: int = RUNS
    """The number of runs (F or I) of a step."""
    seen_steps: int = 0
    seen_runs: int = 0
    last: tuple[int, int] = (0, 0)

    def is_due(self, step: int, run: int) -> bool:
        """Whether to check in this run of this step; both are counted, and 0 is before the first step."""
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
    """A number for each tensor, on the device of the first, which changes if its content does."""
    return torch.stack([autograd.fingerprint(each).to(tensors[0].device) for each in tensors])


def differ(one: float, other: float) -> bool:
    """Whether two fingerprints show a change: a copy of what was hidden shows its content."""
    return autograd.HIDDEN not in (one, other) and one != other
