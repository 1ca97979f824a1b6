"""Whether W finds what the layer saw in I, by content: autograd's versions miss writes through `.data` or by a kernel.

Only the first microbatches of a layer are checked, so that a good job pays nothing after its second step. Each I and
each W that checks waits for the device once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from zbpipe.runtime._torch import autograd

if TYPE_CHECKING:
    from zbpipe.runtime.split.products import PendingGradient

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


def name_operands(changed: tuple[str, ...]) -> str:
    """For messages."""
    words = {"x": "the input (x)", "dY": "the gradient of the output (dY)", "argument": "a tensor argument"}
    return " and ".join(words[each] for each in changed)


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each tensor, on the device of the first, which changes if its content does."""
    return autograd.stack([autograd.fingerprint(each) for each in tensors])


def _differ(one: float, other: float) -> bool:
    """A copy of what was hidden shows its content, so only two that are shown can be compared."""
    return autograd.HIDDEN not in (one, other) and one != other


def find_changes(pending: Iterable[PendingGradient]) -> list[tuple[PendingGradient, tuple[str, ...]]]:
    """All that has changed since its content was noted, or since the last call."""
    checked = [each for each in pending if each.contents is not None]
    if not checked:
        return []
    now = [fingerprints(each.tensors) for each in checked]
    noted = [each.contents for each in checked if isinstance(each.contents, Tensor)]
    numbers = iter(autograd.concatenate([*now, *noted]).tolist())
    found = [[next(numbers) for _ in each.tensors] for each in checked]
    changed = []
    for gradient, new in zip(checked, found, strict=True):
        known = gradient.contents
        old = [next(numbers) for _ in new] if isinstance(known, Tensor) else known
        names = gradient.names_where(_differ(*each) for each in zip(new, old or new, strict=True))
        if names:
            changed.append((gradient, names))
        gradient.contents = new
    return changed
