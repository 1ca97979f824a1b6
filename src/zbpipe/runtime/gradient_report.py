"""What a check of gradients found, and the error that it raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_MOST_NAMES = 10
"""In an error."""


@dataclass(frozen=True)
class GradientReport:
    """What a check found, the same on all ranks of the pipeline."""

    schedule: str
    steps: int
    microbatches: int
    """That were compared, on each of the stages."""
    errors: Mapping[tuple[int, str], float]
    """By stage and parameter, the largest relative error of any microbatch; "input n" is the gradient that goes to the
    stage before."""
    tolerances: Mapping[int, float]
    """By stage, for its errors."""
    not_compared: frozenset[tuple[int, str]] = frozenset()
    """Parameters whose `.grad` hooks change once it is accumulated, or whose gradients were not finite."""

    @property
    def passed(self) -> bool:
        """Whether all errors are within their tolerances."""
        return not self.off()

    def with_(self, other: GradientReport) -> GradientReport:
        """With what `other` found besides, the larger one of each."""
        return replace(
            self,
            errors=_larger(self.errors, other.errors),
            tolerances=_larger(self.tolerances, other.tolerances),
            not_compared=self.not_compared | other.not_compared,
        )

    def off(self) -> list[tuple[int, str]]:
        """Stage and parameter of the errors that are too large, the largest first."""
        found = [key for key, error in self.errors.items() if not error <= self.tolerances[key[0]]]
        return sorted(found, key=lambda key: -self.errors[key])

    def __str__(self) -> str:
        """For the log."""
        words = (
            f"{self.schedule}: {self.microbatches} microbatches of {self.steps} steps on {len(self.tolerances)} stages,"
            f" {len(self.errors)} gradients"
        )
        if self.errors:
            stage, name = max(self.errors, key=self.errors.__getitem__)
            words += (
                f", largest relative error {self.errors[stage, name]:.1e} ({name} of stage {stage}, where"
                f" {self.tolerances[stage]:.0e} is tolerated)"
            )
        left = ", ".join(f"{name} of stage {stage}" for stage, name in sorted(self.not_compared))
        return f"{words}; not compared: {left}" if left else words


class GradientMismatchError(RuntimeError):
    """The split gave other gradients than an ordinary backward. The step raises a `PipelineError` from it."""

    def __init__(self, report: GradientReport, stage: int, microbatch: int) -> None:
        self.report = report
        """Of this stage and this microbatch."""
        off = report.off()
        named = ", ".join(f"{name} {report.errors[stage, name]:.2g}" for _, name in off[:_MOST_NAMES])
        more = f" and {len(off) - _MOST_NAMES} more" if len(off) > _MOST_NAMES else ""
        super().__init__(
            f"stage {stage}, microbatch {microbatch}: the split gives other gradients than an ordinary backward, with"
            f" relative errors above {report.tolerances[stage]:.0e}: {named}{more}. Please report this. Until it is"
            " mended, set weight_products = {} on each of these layers, so that it computes its weight gradient in I,"
            " or use a schedule without I and W, for example 1F1B"
        )


def _larger(one: Mapping[Any, float], other: Mapping[Any, float]) -> dict[Any, float]:
    # An error that is no number is larger than all.
    return {**one, **{key: value for key, value in other.items() if not value <= one.get(key, -1.0)}}
