"""The report of a gradient check, and the error that the check raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from zbpipe.runtime.split.work import StaysInI, describe, percent

_MOST_NAMES = 10


@dataclass(frozen=True)
class GradientReport:
    """Results of a gradient check, the same on all ranks of the pipeline.

    >>> import torch, zbpipe
    >>> report = zbpipe.check_gradients(torch.nn.Linear(4, 4), torch.ones(2, 4))
    >>> report.passed, sorted(name for stage, name in report.errors)
    (True, ['bias', 'weight'])
    """

    schedule: str
    steps: int
    microbatches: int
    """Number of compared microbatches per stage."""
    errors: Mapping[tuple[int, str], float] = field(default_factory=lambda: MappingProxyType({}))
    """Largest relative error of any step, by stage and parameter."""
    tolerances: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Largest passing error by stage."""
    not_compared: frozenset[tuple[int, str]] = frozenset()
    """Stage and parameter of a gradient that hooks change after its accumulation, or that was not finite."""
    deferred: frozenset[tuple[int, str]] = frozenset()
    """Stage and parameter of gradients of products that are mostly deferred to W."""
    not_deferred: frozenset[tuple[int, str]] = frozenset()
    """Stage and parameter of other gradients of products, mostly computed in I."""
    flops: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """FLOPs of a microbatch's weight gradients by stage: of products, without lookups and norms."""
    shares: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Share of these FLOPs that is deferred to W, by stage."""
    in_i: tuple[tuple[int, StaysInI], ...] = ()
    """Products whose weight gradient I computes, with their stages, each stage's largest first."""

    @property
    def passed(self) -> bool:
        return not self.off()

    def with_(self, other: GradientReport) -> GradientReport:
        deferred = self.deferred | other.deferred
        return replace(
            self,
            errors=_take_larger(self.errors, other.errors),
            tolerances=_take_larger(self.tolerances, other.tolerances),
            not_compared=self.not_compared | other.not_compared,
            deferred=deferred,
            not_deferred=(self.not_deferred | other.not_deferred) - deferred,
            flops={**self.flops, **other.flops},
            shares={**self.shares, **other.shares},
            in_i=tuple(each for each in self.in_i if each[0] not in other.flops) + other.in_i,
        )

    @property
    def share(self) -> float:
        """Share of all stages' weight gradient FLOPs that is deferred to W; 1 without any FLOPs."""
        waiting = sum(self.shares[stage] * flops for stage, flops in self.flops.items())
        return waiting / total if (total := sum(self.flops.values())) else 1.0

    def off(self) -> list[tuple[int, str]]:
        """Stage and parameter of errors above the tolerance, largest first."""
        found = [key for key, error in self.errors.items() if not error <= self.tolerances[key[0]]]
        return sorted(found, key=lambda key: -self.errors[key])

    def __str__(self) -> str:
        words = (
            f"{self.schedule}: {self.microbatches} microbatches of {self.steps} steps on {len(self.tolerances)} stages,"
            f" {len(self.errors)} gradients; {len(self.deferred)} weight gradients waited for W,"
            f" {len(self.not_deferred)} did not"
        )
        if any(self.flops.values()):
            total = sum(self.flops.values())
            in_i = [
                (f"{each.parameter} of stage {stage}", each.share * self.flops[stage] / total, each.reason)
                for stage, each in self.in_i
            ]
            words += f"; {percent(self.share)} of the weight gradients' FLOPs are deferred to W"
            words += f"; in I: {describe(in_i)}" if in_i else ""
        if self.errors:
            stage, name = max(self.errors, key=self.errors.__getitem__)
            words += (
                f"; largest relative error {self.errors[stage, name]:.1e} ({name} of stage {stage}, where"
                f" {self.tolerances[stage]:.0e} is tolerated)"
            )
        not_compared = [f"{name} of stage {stage}" for stage, name in sorted(self.not_compared)]
        left = ", ".join(not_compared[:_MOST_NAMES])
        left += f" and {len(not_compared) - _MOST_NAMES} more" if len(not_compared) > _MOST_NAMES else ""
        return f"{words}; not compared: {left}" if left else words


class GradientMismatchError(RuntimeError):
    """The split's gradients differ from an ordinary backward's. It is the cause of the step's `PipelineError`."""

    place = "after its last action"

    def __init__(self, report: GradientReport, changed: Sequence[str] = ()) -> None:
        """`changed`: names of attributes with changed containers or objects."""
        super().__init__(report, changed)  # for pickle
        self.report = report

    def __str__(self) -> str:
        report, changed = self.args
        off = report.off()
        # Wrong gradients of its inputs make those of all earlier stages wrong.
        last = max(stage for stage, _ in off)
        own = [name for stage, name in off if stage == last]
        named = ", ".join(f"{name} {report.errors[last, name]:.2g}" for name in own[:_MOST_NAMES])
        more = f" and {len(own) - _MOST_NAMES} more" if len(own) > _MOST_NAMES else ""
        stages = sorted({stage for stage, _ in off} - {last})
        more += f", and gradients of the stages {', '.join(map(str, stages))} before it" if stages else ""
        known = f" ({', '.join(changed[:_MOST_NAMES])} changed)" if changed else ""
        return (
            f"stage {last}: the split's gradients differ from those of an ordinary backward, with relative errors above"
            f" {report.tolerances[last]:.0e}: {named}{more}. If this layer declares weight_products itself, look at the"
            " function there. If a forward depends on something that it changes itself outside of tensors, plain"
            f" attributes and random numbers{known}, the second run differs without a fault: keep that in a buffer or"
            " directly in an attribute, or omit the check. If all parameters of a stage are off, also look at the"
            " gradient that the next stage sends. Else report this. Until it is fixed, set weight_products = {} on each"
            " of these layers, so that it computes its weight gradient in I, or use a schedule without I and W, for"
            " example 1F1B"
        )


def _take_larger(one: Mapping[Any, float], other: Mapping[Any, float]) -> dict[Any, float]:
    # NaN counts as larger than any number.
    return {**one, **{key: value for key, value in other.items() if not value <= one.get(key, -1.0)}}
