"""Is the split right for this model? Gradients by I and W against an ordinary backward, microbatch by microbatch.

What I and W of a microbatch add to `.grad` is measured as the difference of `.grad` around them, in the real step, so
that the real accumulation is tested, with all of its sharing of memory. After I the same microbatch runs once more, by
`zbpipe.runtime.reference`, and W has to bring the rest.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves

from zbpipe.ir import Op, OpKind, Schedule
from zbpipe.runtime import _torch
from zbpipe.runtime.failures import told_to_other_ranks
from zbpipe.runtime.measure.recording import surround
from zbpipe.runtime.reference import Microbatch, State, gradients_of, wide
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split.layers import deferrals
from zbpipe.runtime.split.stage import product_dtypes

TOLERANCES = MappingProxyType(
    {
        **dict.fromkeys((torch.float64, torch.complex128), 1e-9),
        **dict.fromkeys((torch.float32, torch.complex64), 1e-4),
        torch.float16: 1e-2,
        torch.bfloat16: 3e-2,
    }
)
"""Of the error of a gradient, relative to its norm.

A product that sums in another order is off by a few roundings (2e-16, 1e-7, 1e-3, 8e-3), and by more where a sum nearly
cancels. A gradient that is lost, doubled or of the wrong microbatch is off by 0.1 and more. Between the two there is
room in every dtype, and most of it is left to the kernels.
"""
_SMALL = 0.01
"""A gradient below this share of the norm of all of the stage's is measured against that share: some, such as that of a
bias in front of a normalisation, are zero but for roundings."""
_STEPS_ALONE = 2
"""Of `check_gradients`: in the first step the first microbatch leaves nothing to W."""
_TOLD = 10
"""Names in an error."""

logger = logging.getLogger(__name__)


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
        named = ", ".join(f"{name} {report.errors[stage, name]:.2g}" for _, name in off[:_TOLD])
        more = f" and {len(off) - _TOLD} more" if len(off) > _TOLD else ""
        super().__init__(
            f"stage {stage}, microbatch {microbatch}: the split gives other gradients than an ordinary backward, with"
            f" relative errors above {report.tolerances[stage]:.0e}: {named}{more}. Please report this. Until it is"
            " mended, set weight_products = {} on each of these layers, so that it computes its weight gradient in I,"
            " or use a schedule without I and W, for example 1F1B"
        )


class GradientCheck:
    """Checks the gradients of a schedule while it trains, and then is out of its way.

        check = zbpipe.GradientCheck(schedule, steps=2)
        ...             # train
        check.report    # after that many steps, the same on all ranks of the pipeline; None before

    In these steps every microbatch runs twice on every stage, forward and backward: by the schedule, and after its I
    once more by one ordinary full backward on the same rank, from the same weights, buffers and random numbers. What I
    and W added to `.grad` has to be the same, and so has the gradient that the stage before gets. Losses and gradients
    of the steps are those that they would have been. It costs one more forward and backward of every microbatch, and
    memory: a copy of the stage's gradients for each microbatch that waits for W and three more for a moment, and one
    copy of its weights and buffers. Steps after them run as if there were no check.

    For a model without a running job there is `check_gradients`. They are two because this one takes part in steps that
    are the caller's, and that one makes and runs its own.

    Args:
        schedule: any of zbpipe's. All ranks of the pipeline have to have a check.
        steps: how many steps of `schedule.step` to check, from 1 on.
        tolerance: of relative errors; by default by the coarsest dtype in a stage's products, see `TOLERANCES`.
        done: called with the report, between two steps.

    Raises:
        ValueError: one of torch's schedules, which do not have zbpipe's split, or less than one step, or a tolerance
            that is not above 0.

    A step in which a gradient is off by more raises `PipelineError` from a `GradientMismatchError`, on this rank, and
    the other ranks learn of it. A pass is told in the log of the pipeline's first rank.
    """

    def __init__(
        self,
        schedule: _torch.PipelineSchedule,
        steps: int = 1,
        *,
        tolerance: float | None = None,
        done: Callable[[GradientReport], None] = lambda report: None,
    ) -> None:
        if not isinstance(schedule, RegisteredSchedule):
            raise ValueError(
                f"{type(schedule).__name__} does not have zbpipe's split, so there is nothing to check: use one of"
                " zbpipe's schedules, for example ZBH1, which has the memory of 1F1B"
            )
        if steps < 1:
            raise ValueError(f"a check of gradients needs at least 1 step, got steps={steps}")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance={tolerance} would refuse any rounding: give a number above 0, or leave it out")
        self.report: GradientReport | None = None
        self._left = steps
        self._tolerance = tolerance
        self._done = done
        self._found = GradientReport("", steps, steps * _torch.num_microbatches(schedule), {}, {})
        """By this rank."""
        surround(schedule, self._next)

    def _next(self, schedule: RegisteredSchedule) -> AbstractContextManager[None] | None:
        return self._step(schedule) if self._left else None

    @contextmanager
    def _step(self, schedule: RegisteredSchedule) -> Iterator[None]:
        self._left -= 1
        with _Checked(schedule, self._tolerance, self._add).attached():
            yield
        if not self._left:
            # Another rank may have found something in its last op, after the last message to this one.
            with told_to_other_ranks():
                self.report = self._gathered(schedule)
            self._done(self.report)

    def _add(self, found: GradientReport) -> None:
        self._found = self._found.with_(found)

    def _gathered(self, schedule: RegisteredSchedule) -> GradientReport:
        group = _torch.stages_of(schedule)[0].group
        everything = [self._found] * dist.get_world_size(group)
        dist.all_gather_object(everything, self._found, group=group)
        report = replace(reduce(GradientReport.with_, everything), schedule=schedule.schedule.name)
        if dist.get_rank(group) == 0:
            logger.info("the split gives the gradients of an ordinary backward. %s", report)
        return report


def _larger(one: Mapping[Any, float], other: Mapping[Any, float]) -> dict[Any, float]:
    # An error that is no number is larger than all.
    return {**one, **{key: value for key, value in other.items() if not value <= one.get(key, -1.0)}}


class _Checked:
    """One step of this rank."""

    def __init__(
        self, schedule: RegisteredSchedule, tolerance: float | None, found: Callable[[GradientReport], None]
    ) -> None:
        self._schedule = schedule
        self._tolerance = tolerance
        self._found = found
        self._stages = {stage.stage_index: stage for stage in _torch.stages_of(schedule)}
        self._states: dict[int, State] = {}
        """By stage, of its last microbatch: equal values are kept once."""
        self._open: dict[tuple[int, int], _Comparison] = {}
        """By stage and microbatch, from F to W."""
        self._current: _Comparison | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        undo = (
            _torch.wrap_compute(self._schedule, self._around),
            _torch.wrap_calls(self._schedule, self._forward, self._loss, self._backward),
        )
        try:
            yield
        finally:
            for each in reversed(undo):
                each()

    def _around(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        key = stage, microbatch
        if key not in self._open:  # F; the loss comes as a second one
            defers_loss = self._schedule.defers_loss
            again = Microbatch(self._stages[stage], microbatch, self._states.get(stage), defers_loss=defers_loss)
            self._states[stage] = again.state
            self._open[key] = _Comparison(again)
            with self._in(key):
                return compute()
        comparison = self._open[key]
        with self._in(key), comparison.measured():
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

    # The first step also calls these before any op, to learn shapes.

    def _forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        again = self._current and self._current.again
        return again.forward(call, *args, **kwargs) if again else call(*args, **kwargs)

    def _loss(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        again = self._current and self._current.again
        return again.loss(call, *args, **kwargs) if again else call(*args, **kwargs)

    def _backward(self, call: Callable[..., Any], kind: str, tensors: dict[str, Any], **kwargs: Any) -> Any:
        if self._current is None or self._current.knows_backward or "output_grads" not in tensors:
            return call(kind, tensors, **kwargs)
        return self._current.backward(call, kind, tensors, **kwargs)

    def _judge(self, stage: int, microbatch: int, comparison: _Comparison) -> None:
        tolerance = self._tolerance or comparison.tolerance
        errors, not_compared = comparison.errors(tolerance)
        report = GradientReport(
            schedule=self._schedule.schedule.name,
            steps=1,
            microbatches=1,
            errors={(stage, name): error for name, error in errors.items()},
            tolerances={stage: tolerance},
            not_compared=frozenset((stage, name) for name in not_compared),
        )
        if not report.passed:
            raise GradientMismatchError(report, stage, microbatch)
        self._found(report)


class _Comparison:
    """One microbatch on one stage: what the split added, less what an ordinary backward gives."""

    def __init__(self, again: Microbatch) -> None:
        self.again: Microbatch | None = again
        """Until it ran once more."""
        self.knows_backward = False
        self.tolerance = 0.0
        self._stage = again.stage
        self._index = again.index
        self._rest: dict[str, Tensor] = {}
        """By parameter, what was added and is not accounted for; with a minus, what is still to come."""
        self._norms: dict[str, float] = {}
        """Of the ordinary backward's gradients."""
        self._roundings: dict[str, float] = defaultdict(float)
        """What the accumulation into `.grad` may have rounded, which shows in the differences."""
        self._was_not_finite: set[str] = set()
        self._moved: set[str] = set()
        """Not added by this microbatch alone."""
        self._input_grads: list[Tensor | None] = []
        self._input_errors: dict[str, float] = {}

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around what adds to `.grad`."""
        module = self._stage.submod
        before = gradients_of(module)
        yield
        self.tolerance = max(self.tolerance, _tolerance(self._stage))
        eps = {each.name: torch.finfo(each.gradient.dtype).eps for each in _torch.accumulated(module)}
        after = gradients_of(module)
        # A loss with a backward of its own may have FSDP2 reduce all that its group has, of other microbatches as well.
        self._moved |= {name + _torch.REDUCED for name in before.keys() - after.keys()}
        for name, gradient in after.items():
            added = gradient - before[name] if name in before else gradient
            if name in before and not math.isfinite(_norm(before[name])):
                self._was_not_finite.add(name)
            elif added.any():
                self._add(name, added)
                self._roundings[name] += eps[name] * _norm(gradient)

    def _add(self, name: str, gradient: Tensor) -> None:
        self._rest[name] = self._rest[name] + gradient if name in self._rest else gradient

    def backward(self, call: _torch.Call, kind: str, tensors: dict[str, Any], **kwargs: Any) -> Any:
        """The stage's own backward, `call`, of which both ends are remembered."""
        assert self.again is not None, "a microbatch has one backward"
        self.knows_backward = True
        self.again.remember_backward(tensors)
        result = call(kind, tensors, **kwargs)
        self._input_grads = [None if each is None else wide(each, each) for each in result[0]]
        return result

    def subtract_reference(self) -> None:
        """Run the microbatch once more; what it gives is what the split has to add."""
        assert self.again is not None
        reference = self.again.gradients()
        self.again = None
        for name, gradient in reference.parameters.items():
            self._norms[name] = _norm(gradient)
            self._add(name, -gradient)
        for n, (found, expected) in enumerate(zip(self._input_grads, reference.inputs, strict=False)):
            if found is not None and expected is not None and math.isfinite(norm := _norm(expected)):
                self._input_errors[f"input {n}"] = _relative(_norm(found - wide(expected, expected)), norm)

    def errors(self, tolerance: float) -> tuple[dict[str, float], set[str]]:
        """Relative errors by parameter and input, and the names of the parameters that cannot be compared.

        Above `tolerance`, what the accumulation into `.grad` may have rounded is taken off.
        """
        norm = math.hypot(*filter(math.isfinite, self._norms.values()))
        left = {
            name
            for name, parameter in self._stage.submod.named_parameters()
            if _torch.hooks_after_accumulation(parameter)
            or name in self._was_not_finite
            or not math.isfinite(self._norms.get(name, 0.0))
        }
        errors = dict(self._input_errors)
        for name in self._rest.keys() - left - self._moved:
            size = max(self._norms.get(name, 0.0), _SMALL * norm)
            error, without_rounding = _norm(self._rest[name]), _norm(self._rest[name]) - self._roundings[name]
            errors[_readable(name)] = max(min(_relative(error, size), tolerance), _relative(without_rounding, size))
        return errors, set(map(_readable, left))


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))


def _relative(error: float, norm: float) -> float:
    if error <= 0:
        return 0.0
    return error / norm if norm else math.inf


def _tolerance(stage: _torch.Stage) -> float:
    """By the coarsest dtype of the stage's weights, and of its products: autocast shows there."""
    dtypes = {parameter.dtype for parameter in stage.submod.parameters()} | product_dtypes(stage)
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0) or TOLERANCES[torch.float32]


def _readable(name: str) -> str:
    """Without what checkpointing and the compiler put into the names of parameters."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def check_gradients(
    parts: nn.Module | PipelineStage | Sequence[nn.Module | PipelineStage],
    batch: Tensor | tuple[Any, ...],
    target: Tensor | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    microbatches: int = 2,
    tolerance: float | None = None,
) -> GradientReport:
    """Two checked steps of a model in this process alone, whose parts are the stages.

        zbpipe.check_gradients([first, second], tokens, targets, loss_fn)

    All W come last, as in no schedule that anybody would want: so every x and dY waits for as long as it can, and meets
    everything that could change it. There are two steps because the first I of all leaves nothing to W. `GradientCheck`
    does the same in a running job, with its own schedule.

    Args:
        parts: the model, or its parts in their order, as modules or as stages; on one device. Weights, gradients,
            buffers and random numbers are afterwards what they were.
        batch: of the first part, the arguments if there are several; the first dimension is that of the samples.
        target: for `loss_fn`.
        loss_fn: `(output, target) -> loss`; without one it is the mean of the squares of all outputs.
        microbatches: into how many parts of equal size the batch is cut; from 2 on one waits while another runs.
        tolerance: as in `GradientCheck`.

    Returns:
        The report of a pass.

    Raises:
        PipelineError: the gradients differ; its cause, a `GradientMismatchError`, has the report.
        ValueError: a batch that cannot be cut so, a target without a loss function or the reverse, or this process
            belongs to a job of several ranks.
    """
    listed = [parts] if isinstance(parts, (nn.Module, PipelineStage)) else list(parts)
    modules = [each.submod if isinstance(each, PipelineStage) else each for each in listed]
    args = batch if isinstance(batch, tuple) else (batch,)
    size = _samples(args)
    if not modules or microbatches < 1 or size % microbatches:
        raise ValueError(
            f"{len(modules)} parts and {size} samples do not make stages and microbatches={microbatches} of equal size:"
            " give at least one part, and a multiple of so many samples"
        )
    if (target is None) != (loss_fn is None):
        raise ValueError("target and loss_fn go together: give both, or none for the mean of the squares of the output")
    if target is None:
        loss_fn, target = _mean_of_squares, torch.zeros(size)
    device = next((each.device for module in modules for each in module.parameters()), torch.device("cpu"))
    with _alone(), _followed_as_before(modules):
        stages = [PipelineStage(module, n, len(modules), device) for n, module in enumerate(modules)]
        schedule = _WLast(stages, microbatches, loss_fn)
        check = GradientCheck(schedule, _STEPS_ALONE, tolerance=tolerance)
        with _left_as_they_are(modules, device):
            for _ in range(_STEPS_ALONE):
                schedule.step(*args, target=target)
    assert check.report is not None, "a step that returns was checked"
    return check.report


class _WLast(RegisteredSchedule):
    """All F, then all I, then all W, with any number of stages on the only rank."""

    schedule_name = "InterleavedZeroBubble"

    def __init__(self, stages: list[PipelineStage], n_microbatches: int, loss_fn: Callable[..., Tensor] | None) -> None:
        super().__init__(stages, n_microbatches, loss_fn)
        upwards = range(len(stages))
        order = ((OpKind.F, upwards), (OpKind.I, upwards[::-1]), (OpKind.W, upwards))
        ops = [Op(stage, kind, n) for kind, row in order for n in range(n_microbatches) for stage in row]
        self.adopt(Schedule.from_rows([ops], "all W last"))


def _samples(args: tuple[Any, ...]) -> int:
    return next((each.shape[0] for each in args if isinstance(each, Tensor) and each.dim()), 0)


def _mean_of_squares(output: Any, target: Tensor) -> Tensor:
    outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    return sum((each.abs().square().mean() for each in outputs), torch.zeros((), device=outputs[0].device))


@contextmanager
def _alone() -> Iterator[None]:
    """With a process group of one rank, which torch's stages need."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise ValueError(
                f"check_gradients runs in one process, but this one belongs to a job of {dist.get_world_size()} ranks:"
                " call it outside of the job, or check the job's own steps by zbpipe.GradientCheck(schedule)"
            )
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _followed_as_before(modules: list[nn.Module]) -> Iterator[None]:
    """Modules that are part of another schedule go on putting their gradients off for that one."""
    followed = {each: each.gradients for module in modules for each in deferrals(module).values()}
    try:
        yield
    finally:
        for deferral, gradients in followed.items():
            deferral.gradients = gradients


@contextmanager
def _left_as_they_are(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    with ExitStack() as kept:
        for module in modules:
            kept.callback(State(module, device).put_back)
            kept.enter_context(_torch.without_gradients(module))
        yield
