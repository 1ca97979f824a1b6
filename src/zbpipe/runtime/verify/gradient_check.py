"""Check of the split for a job's model: gradients of I and W against an ordinary backward, per microbatch.

A microbatch's contribution is the difference of `.grad` before and after its I and W in the real step. So the check
includes the real accumulation and shared memory. After I the microbatch runs once more
(`zbpipe.runtime.verify.rerun`), and W has to add the missing part.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpipe.runtime import checks
from zbpipe.runtime._torch import autograd, fsdp2, hooks, pipelining
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.fsdp2 import without_overlap
from zbpipe.runtime.measure.recording import Wanted, Watcher, watch
from zbpipe.runtime.module_state import ModuleState
from zbpipe.runtime.ranks.failures import share_with_other_ranks
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split.stage import find_split, find_weight_work
from zbpipe.runtime.verify.gradient_report import GradientMismatchError, GradientReport
from zbpipe.runtime.verify.rerun import Microbatch, copy_gradients, widen
from zbpipe.schedule.ir import require_whole

TOLERANCES = MappingProxyType(
    {
        **dict.fromkeys((torch.float64, torch.complex128), 1e-9),
        **dict.fromkeys((torch.float32, torch.complex64), 1e-4),
        torch.float16: 1e-2,
        torch.bfloat16: 3e-2,
    }
)
"""Largest passing error of a gradient by dtype, relative to the gradient's norm.

Another order of a product's sum gives an error of a few roundings (2e-16, 1e-7, 1e-3, 8e-3), or more if the sum nearly
cancels. A gradient that is lost, doubled or of the wrong microbatch is off by 0.1 or more. The limits are between, and
leave most of the gap to the kernels.
"""
_SMALL = 0.01
"""Smaller gradients have errors relative to this share of the norm of all the stage's gradients. Some, such as a bias's
before a normalisation, are zero except for rounding."""

logger = logging.getLogger(__name__)


class GradientCheck(Watcher):
    """Checks the gradients of a schedule in the next steps of a running job.

        check = zbpipe.GradientCheck(schedule, steps=2)
        ...             # train
        check.report    # after two steps, the same on all ranks of the pipeline; None before

    In these steps every microbatch runs twice on every stage: by the schedule, and after its I once more, by an
    ordinary forward and full backward, on the same rank, from the same weights, buffers and random numbers. The
    contributions of I and W to `.grad`, and the gradient for the previous stage, have to be the same. Losses and
    gradients of the steps do not change. The check costs one more forward and backward of every microbatch, and memory:
    a copy of the stage's gradients per microbatch that waits for W, three more temporary copies, and one copy of the
    weights and buffers.

    `check_gradients` checks a model without a job.

    Args:
        schedule: a zbpipe schedule. Every rank of the pipeline needs a check.
        steps: number of steps to check, at least 1.
        tolerance: largest relative error. Default: that of the coarsest dtype in a stage's products (`TOLERANCES`).

    Raises:
        ValueError: a torch schedule, which lacks zbpipe's split, or an invalid argument.

    If an error is larger, the step raises `PipelineError` from a `GradientMismatchError` on this rank, and the other
    ranks learn of it. If all gradients pass, the pipeline's first rank logs the report. A forward that gives another
    output in its second run also ends the step with a `PipelineError`: it depends on state besides tensors, plain
    attributes and random numbers, such as a counter in a container, and the error names this state.
    """

    def __init__(
        self,
        schedule: pipelining.PipelineSchedule,
        steps: int = 1,
        *,
        tolerance: float | None = None,
    ) -> None:
        checks.require_schedule("zbpipe.GradientCheck", schedule)
        if not isinstance(schedule, RegisteredSchedule):
            raise ValueError(
                f"{type(schedule).__name__} does not have zbpipe's split, so there is nothing to check: use one of"
                " zbpipe's schedules, for example ZB, which stays within 1F1B's memory"
            )
        (steps,) = require_whole(1, steps=steps)
        checks.require_above_0("tolerance", tolerance)
        self.report: GradientReport | None = None
        self._left = steps
        self._tolerance = tolerance
        self._found = GradientReport("", steps, steps * pipelining.num_microbatches(schedule), {}, {})
        watch(schedule, self)

    def before(self) -> Wanted | None:
        return Wanted.STEP if self._left else None

    @contextmanager
    def around(self, schedule: RegisteredSchedule) -> Iterator[None]:
        with _Checked(schedule, self._tolerance, self._add).attach():
            yield
        self._left -= 1
        if not self._left:
            # Another rank may have found an error in its last op, after its last message to this one.
            with share_with_other_ranks():
                self.report = self._gather(schedule)

    def _add(self, found: GradientReport) -> None:
        self._found = self._found.with_(found)

    def _gather(self, schedule: RegisteredSchedule) -> GradientReport:
        group = pipelining.stages_of(schedule)[0].group
        everything = [self._found] * dist.get_world_size(group)
        dist.all_gather_object(everything, self._found, group=group)
        report = replace(reduce(GradientReport.with_, everything), schedule=schedule.schedule.name)
        if dist.get_rank(group) == 0:
            logger.info("the split gives the gradients of an ordinary backward. %s", report)
        return report


class _Checked:
    def __init__(
        self, schedule: RegisteredSchedule, tolerance: float | None, found: Callable[[GradientReport], None]
    ) -> None:
        self._schedule = schedule
        self._tolerance = tolerance
        self._found = found
        self._stages = {stage.stage_index: stage for stage in pipelining.stages_of(schedule)}
        self._states: dict[int, ModuleState] = {}
        """State of each stage's last microbatch. The next one shares equal values."""
        self._open: dict[tuple[int, int], _Comparison] = {}
        """Running comparisons, from F to W, by stage and microbatch."""
        self._current: _Comparison | None = None

    @contextmanager
    def attach(self) -> Iterator[None]:
        with (
            without_overlap(self._schedule.works),
            replaced(self._schedule.waits, is_paused=True),
            hooks.hook(self._schedule, hooks.HookOrder.CHECK, self._around),
            hooks.route_calls(
                self._schedule,
                partial(self._record, Microbatch.forward),
                partial(self._record, Microbatch.loss),
                self._backward,
            ),
        ):
            yield

    def _around(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        key = stage, microbatch
        if key not in self._open:  # F; the loss is a second one
            defers_loss = self._schedule.defers_loss
            again = Microbatch(self._stages[stage], microbatch, self._states.get(stage), defers_loss=defers_loss)
            self._states[stage] = again.state
            self._open[key] = _Comparison(again)
            with self._in(key):
                return compute()
        comparison = self._open[key]
        split = find_split(self._stages[stage])
        comparison.is_trial |= kind == "I" and split is not None and split.tries_out
        with self._in(key), comparison.measure(kind):
            result = compute()
        if comparison.knows_backward and comparison.again is not None:
            comparison.subtract_reference()
        if kind in ("B", "W"):
            self._judge(stage, microbatch, self._open.pop(key))
        return result

    @contextmanager
    def _in(self, key: tuple[int, int]) -> Iterator[None]:
        self._current = self._open[key]
        try:
            yield
        finally:
            self._current = None

    # The first step also calls these before any op, while torch infers shapes.

    def _record(self, record: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        again = self._current and self._current.again
        return record(again, call, *args, **kwargs) if again else call(*args, **kwargs)

    def _backward(self, call: Callable[..., Any], kind: str, tensors: dict[str, Any], **kwargs: Any) -> Any:
        if self._current is None or self._current.knows_backward or "output_grads" not in tensors:
            return call(kind, tensors, **kwargs)
        return self._current.backward(call, kind, tensors, **kwargs)

    def _judge(self, stage: int, microbatch: int, comparison: _Comparison) -> None:
        tolerance = self._tolerance or comparison.tolerance
        errors, not_compared = comparison.errors(tolerance)
        deferred, not_deferred = comparison.when()
        work = find_weight_work(self._stages[stage])
        report = GradientReport(
            schedule=self._schedule.schedule.name,
            steps=1,
            microbatches=1,
            errors={(stage, name): error for name, error in errors.items()},
            tolerances={stage: tolerance},
            not_compared=frozenset((stage, name) for name in not_compared),
            deferred=frozenset((stage, name) for name in deferred),
            not_deferred=frozenset((stage, name) for name in not_deferred),
            flops={} if work is None else {stage: work.flops},
            shares={} if work is None else {stage: work.share},
            in_i=() if work is None else tuple((stage, each) for each in work.in_i),
        )
        if not report.passed:
            raise GradientMismatchError(report, stage, microbatch)
        self._found(report)


class _Comparison:
    """Comparison of a microbatch on a stage: the split's gradients minus an ordinary backward's."""

    def __init__(self, again: Microbatch) -> None:
        self.again: Microbatch | None = again
        """The microbatch's rerun; None afterwards."""
        self.knows_backward = False
        self.is_trial = False
        """Whether this I leaves nothing to W."""
        self.tolerance = 0.0
        self._stage = again.stage
        self._rest: dict[str, Any] = {}
        """Remaining difference by parameter: the split's contribution minus the reference's."""
        self._norms: dict[str, float] = {}
        """Norms of the ordinary backward's gradients."""
        self._roundings: dict[str, float] = defaultdict(float)
        """Largest rounding error of the accumulation into `.grad`, by parameter."""
        self._grew: dict[str, set[str]] = defaultdict(set)
        """Gradients that each kind of op has added to."""
        self._was_not_finite: set[str] = set()
        self._moved: set[str] = set()
        """Gradients that other microbatches also changed."""
        self._input_grads: list[Tensor | None] = []
        self._input_errors: dict[str, float] = {}

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        module = self._stage.submod
        before = copy_gradients(module)
        yield
        self.tolerance = max(self.tolerance, _find_tolerance(self._stage))
        eps = {each.name: torch.finfo(each.gradient.dtype).eps for each in fsdp2.iterate_accumulated(module)}
        after = copy_gradients(module)
        # A backward in the loss may make FSDP2 reduce all gradients of a group, also those of other microbatches.
        self._moved |= {name + fsdp2.REDUCED for name in before.keys() - after.keys()}
        for name, gradient in after.items():
            added = gradient - before[name] if name in before else gradient
            if name in before and not math.isfinite(_norm(before[name])):
                self._was_not_finite.add(name)
            elif added.any():
                self._rest[name] = self._rest.get(name, 0.0) + added
                self._grew[kind].add(name)
                self._roundings[name] += eps[name] * _norm(gradient)

    def backward(self, call: hooks.Call, kind: str, tensors: dict[str, Any], **kwargs: Any) -> Any:
        """Run the stage's backward, `call`, and record its inputs and results."""
        assert self.again is not None, "a microbatch has one backward"
        self.knows_backward = True
        self.again.remember_backward(tensors)
        result = call(kind, tensors, **kwargs)
        self._input_grads = [None if each is None else widen(each, each) for each in result[0]]
        return result

    def subtract_reference(self) -> None:
        assert self.again is not None
        by_parameter, of_inputs = self.again.compute_gradients()
        self.again = None
        for name, gradient in by_parameter.items():
            self._norms[name] = _norm(gradient)
            self._rest[name] = self._rest.get(name, 0.0) - gradient
        for n, (found, expected) in enumerate(zip(self._input_grads, of_inputs, strict=False)):
            if found is not None and expected is not None and math.isfinite(norm := _norm(expected)):
                self._input_errors[f"input {n}"] = _relative(_norm(found - widen(expected, expected)), norm)

    def errors(self, tolerance: float) -> tuple[dict[str, float], set[str]]:
        """Relative errors by parameter and input, and the names of the parameters that cannot be compared."""
        # The possible rounding of the accumulation reduces errors above `tolerance`.
        norm = math.hypot(*filter(math.isfinite, self._norms.values()))
        left = {
            name
            for name, parameter in self._stage.submod.named_parameters()
            if autograd.has_hooks_after_accumulation(parameter)
            or name in self._was_not_finite
            or not math.isfinite(self._norms.get(name, 0.0))
        }
        errors = dict(self._input_errors)
        for name in self._rest.keys() - left - self._moved:
            size = max(self._norms.get(name, 0.0), _SMALL * norm)
            error, without_rounding = _norm(self._rest[name]), _norm(self._rest[name]) - self._roundings[name]
            errors[_readable(name)] = max(min(_relative(error, size), tolerance), _relative(without_rounding, size))
        return errors, set(map(_readable, left))

    def when(self) -> tuple[set[str], set[str]]:
        """Parameters with gradients deferred to W, and parameters with products mostly in I."""
        work = find_weight_work(self._stage)
        if self.is_trial or work is None:
            return set(), set()
        in_i = self._grew["I"] & work.mostly_in_i()
        return set(map(_readable, self._grew["W"] - self._moved - in_i)), set(map(_readable, in_i))


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))


def _relative(error: float, norm: float) -> float:
    if error <= 0:
        return 0.0
    return error / norm if norm else math.inf


def _find_tolerance(stage: pipelining.Stage) -> float:
    """Tolerance of the coarsest dtype of the stage's weights and products. Only products show autocast."""
    split = find_split(stage)
    dtypes = {each.dtype for each in stage.submod.parameters()} | (split.dtypes if split else frozenset())
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0) or TOLERANCES[torch.float32]


def _readable(name: str) -> str:
    """A parameter name without the insertions of checkpointing and the compiler."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
