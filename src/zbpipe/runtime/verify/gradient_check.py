"""Check of the split for a job's model: gradients of a whole step against ordinary backwards.

The step runs twice on all ranks, with the same messages: first with each I as one ordinary backward (B) and without W,
as without zbpipe; then as scheduled, from the same weights, buffers, attributes and random numbers. So the check
includes the real accumulation, shared memory, and FSDP2's reductions. Only the second run leaves gradients.

`GradientCheck` checks a running job, `check_gradients` a model without a job, in this process only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from zbpipe.runtime import checks
from zbpipe.runtime._torch import autograd, fsdp2, hooks, pipelining
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime.build import build_pipeline_schedule
from zbpipe.runtime.measure.recording import Wanted, Watcher, watch
from zbpipe.runtime.module_state import ModuleState
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split.deferring_layers import deferrals
from zbpipe.runtime.split.stage import SplitWork, find_split
from zbpipe.runtime.verify.gradient_report import GradientMismatchError, GradientReport
from zbpipe.schedule.ir import Op, OpKind, Schedule, require_whole

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
cancels. One of m equal microbatches that is lost, doubled or wrong gives 1 / m or more.
"""
_ONE_OF = 0.5
"""The limit is at most this share of one of the microbatches, but at least a tenth of `TOLERANCES`."""
_SMALL = 0.01
"""Smaller gradients have errors relative to this share of the norm of all the stage's gradients. Some, such as a bias's
before a normalisation, are zero except for rounding."""

logger = logging.getLogger(__name__)


class GradientCheck(Watcher):
    """Checks the gradients of a schedule in the next steps of a running job.

        check = zbpipe.GradientCheck(schedule, steps=2)
        ...             # train
        check.report    # after two steps, the same on all ranks of the pipeline; None before

    These steps run twice on all ranks, with all messages: with ordinary backwards, and as scheduled, from the same
    weights, buffers, attributes and random numbers. Both runs have to add the same to `.grad`. Losses and gradients of
    the steps do not change. The check costs one more step, and memory: a copy of the stages' gradients, one more if
    `.grad` has gradients of earlier steps, and one of their weights and buffers.

    `check_gradients` checks a model without a job.

    Args:
        schedule: a zbpipe schedule. Every rank of the pipeline needs a check.
        steps: number of steps to check, at least 1.
        tolerance: largest relative error. Default: that of the coarsest dtype in a stage's products (`TOLERANCES`), or
            half a microbatch's share if that is less, but at least a tenth.

    Raises:
        ValueError: a torch schedule, which lacks zbpipe's split, or an invalid argument.

    If an error is larger, the step raises `PipelineError` on all ranks, from a `GradientMismatchError` with the stages
    and parameters. If all gradients pass, the pipeline's first rank logs the report. A forward that depends on state
    besides tensors, plain attributes and random numbers, such as a counter in a container, also gives another gradient
    in the second run. The error names containers and objects that have changed.
    """

    def __init__(
        self, schedule: pipelining.PipelineSchedule, steps: int = 1, *, tolerance: float | None = None
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
        self._found = GradientReport("", steps, steps * pipelining.num_microbatches(schedule))
        watch(schedule, self)

    def before(self) -> Wanted | None:
        return Wanted.STEP if self._left else None

    @contextmanager
    def around(self, schedule: RegisteredSchedule) -> Iterator[None]:
        with replaced(schedule, run_checked=partial(self._check, schedule)):
            yield
        self._left -= 1
        if not self._left:
            self.report = self._found
            if dist.get_rank(pipelining.stages_of(schedule)[0].group) == 0:
                logger.info("the split gives the gradients of an ordinary backward. %s", self.report)

    def _check(
        self, schedule: RegisteredSchedule, run: Callable[..., None], args: Any, kwargs: Any, *more: Any, **options: Any
    ) -> None:
        """Run the microbatches twice, by `run(args, kwargs, ...)`, and compare."""
        stages = [_CheckedStage(stage) for stage in pipelining.stages_of(schedule)]
        initialize = schedule.initialize_stages

        def begin(*given: Any, **named: Any) -> None:
            initialize(*given, **named)  # before the first step it makes lazy parameters
            for stage in stages:
                stage.note_state()

        with _as_without_split(schedule), replaced(schedule, initialize_stages=begin):
            # Inputs may have graphs, and a stage may write into them.
            run(autograd.copy_leaves(args), autograd.copy_leaves(kwargs), *more, **options)
            for stage in stages:
                stage.take_reference()
        for stage in stages:
            stage.restore()
        for work in schedule.works:
            work.forget_run()
        run(args, kwargs, *more, **options)
        name, microbatches = schedule.schedule.name, pipelining.num_microbatches(schedule)
        found = [stage.compare(microbatches, self._tolerance) for stage in stages]
        changed = [words for stage in stages for words in stage.find_changed_objects()]
        group = pipelining.stages_of(schedule)[0].group
        everything: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everything, (found, changed), group=group)
        compared = [each for reports, _ in everything for each in reports]
        of_step = reduce(GradientReport.with_, compared, GradientReport(name, 1, microbatches))
        if not of_step.passed:
            raise GradientMismatchError(of_step, [words for _, names in everything for words in names])
        self._found = replace(reduce(GradientReport.with_, compared, self._found), schedule=name)


@contextmanager
def _as_without_split(schedule: RegisteredSchedule) -> Iterator[None]:
    """Context of a run with ordinary backwards, whose gradients do not stay."""
    with ExitStack() as kept:
        kept.enter_context(pipelining.with_whole_backwards(schedule))
        kept.enter_context(replaced(schedule.waits, budgets={}, is_measuring=False))
        for work in schedule.works:
            outer = [each for each in work.hooks if each[0] < hooks.HookOrder.RECORD]
            kept.enter_context(replaced(work, hooks=outer, fsdp_mode="torch"))
            if isinstance(work, SplitWork):
                kept.enter_context(replaced(work, leaves_whole=True))
            kept.enter_context(fsdp2.without_gradients(work.stage.submod))
        yield


class _CheckedStage:
    def __init__(self, stage: pipelining.Stage) -> None:
        self._stage = stage
        self._module = stage.submod
        self._before = copy_gradients(self._module)
        self._expected: dict[str, Tensor] = {}

    def note_state(self) -> None:
        self._state = ModuleState(self._module, pipelining.device_of(self._stage))
        self._objects = _describe_objects(self._module)

    def take_reference(self) -> None:
        self._expected = copy_gradients(self._module)

    @torch.no_grad()
    def restore(self) -> None:
        self._state.restore()

    def find_changed_objects(self) -> set[str]:
        """Names of attributes with changed containers or objects, which `restore` cannot restore."""
        index, now = self._stage.stage_index, _describe_objects(self._module)
        return {f"{name} of stage {index}" for name, words in self._objects.items() if now.get(name) != words}

    def compare(self, microbatches: int, tolerance: float | None) -> GradientReport:
        """This stage's gradients, compared with those of the reference."""
        tolerance = tolerance or _find_tolerance(self._stage, microbatches)
        norms = {name: _norm(gradient) for name, gradient in self._expected.items()}
        of_stage = math.hypot(*filter(math.isfinite, norms.values()))
        parameters = self._module.named_parameters()
        hooked = {_readable(name) for name, each in parameters if autograd.has_hooks_after_accumulation(each)}
        not_compared, errors = set(hooked), {}
        found = {each.name: each for each in fsdp2.iterate_accumulated(self._module)}
        for name in found.keys() | norms.keys():
            norm, nothing = norms.get(name, 0.0), torch.zeros(())
            before, expected = (each.get(name, nothing) for each in (self._before, self._expected))
            if _readable(name) in hooked or not math.isfinite(norm + _norm(before)):
                not_compared.add(_readable(name))
                continue
            eps, after = 0.0, before
            if name in found:
                eps = torch.finfo(found[name].gradient.dtype).eps
                after = widen(found[name].gradient, found[name].parameter)
            # The possible rounding of the accumulation reduces errors above `tolerance`.
            error, rounding = _norm(after - before - expected), eps * math.sqrt(microbatches) * _norm(after)
            size = max(norm, _SMALL * of_stage)
            errors[_readable(name)] = max(min(_relative(error, size), tolerance), _relative(error - rounding, size))
        return self._describe(errors, tolerance, not_compared)

    def _describe(self, errors: dict[str, float], tolerance: float, not_compared: set[str]) -> GradientReport:
        index, split = self._stage.stage_index, find_split(self._stage)
        work = split.work if split else None
        learned = work if split and split.num_split > 1 else None  # the first I leaves nothing to W

        def name(names: Iterable[str]) -> frozenset[tuple[int, str]]:
            return frozenset((index, _readable(each)) for each in names)

        return GradientReport(
            schedule="",
            steps=1,
            microbatches=0,
            errors={(index, name): error for name, error in errors.items()},
            tolerances={index: tolerance},
            not_compared=name(not_compared),
            deferred=name(learned.mostly_in_w) if learned else frozenset(),
            not_deferred=name(learned.mostly_in_i) if learned else frozenset(),
            flops={index: work.flops} if work else {},
            shares={index: work.share} if work else {},
            in_i=tuple((index, each) for each in work.in_i) if work else (),
        )


def copy_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the current gradients, at least in float32. For DTensors, this rank's part."""
    return {each.name: widen(each.gradient, each.parameter) for each in fsdp2.iterate_accumulated(module)}


def widen(gradient: Tensor, like: Tensor) -> Tensor:
    """A copy, at least in float32. For DTensors, this rank's part, placed as `like`."""
    gradient = gradient.detach()
    if isinstance(gradient, DTensor):
        if isinstance(like, DTensor):
            gradient = gradient.redistribute(placements=like.placements)
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))


def _relative(error: float, norm: float) -> float:
    if error <= 0:
        return 0.0
    return error / norm if norm else math.inf


def _find_tolerance(stage: pipelining.Stage, microbatches: int) -> float:
    """Tolerance of the coarsest dtype of the stage's weights and products. Only products show autocast."""
    split = find_split(stage)
    dtypes = {each.dtype for each in stage.submod.parameters()} | (split.dtypes if split else frozenset())
    found = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0) or TOLERANCES[torch.float32]
    return min(found, max(_ONE_OF / microbatches, found / 10))


def _describe_objects(module: nn.Module) -> dict[str, str]:
    """Attributes with containers and objects as text, with their contents."""
    return {
        f"{name}.{attribute}".lstrip("."): repr(getattr(value, "__dict__", value))
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if not (attribute.startswith("_") or callable(value) or isinstance(value, Tensor))
    }


def _readable(name: str) -> str:
    """A parameter name without the insertions of checkpointing, the compiler and FSDP2's gradients."""
    return name.removesuffix(fsdp2.REDUCED).replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


_STEPS = 2
"""Number of steps. In the first one, the first microbatch leaves nothing to W."""
_NO_GRADIENT = (
    "no parameter gets a gradient, so there is nothing to check: all are frozen, or behind a reentrant checkpoint whose"
    " inputs need no gradient. For such a checkpoint call batch.requires_grad_(), or set use_reentrant to False"
)


def check_gradients(
    parts: nn.Module | PipelineStage | Sequence[nn.Module | PipelineStage],
    batch: Tensor | tuple[Any, ...],
    target: Tensor | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    microbatches: int = 2,
    tolerance: float | None = None,
) -> GradientReport:
    """Check the split's gradients for a model, in this process only: two steps, with the parts as stages.

    >>> import zbpipe
    >>> parts = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)]
    >>> zbpipe.check_gradients(parts, torch.ones(6, 4), torch.zeros(6, 2), torch.nn.functional.mse_loss).passed
    True

    All W run at the end of a step, so that every x and dY is exposed to changes as long as possible. There are two
    steps because the first I leaves nothing to W. `GradientCheck` checks a running job with its own schedule.

    Args:
        parts: the model, or its parts in order, as modules or as stages, on one device. Weights, gradients, buffers and
            random numbers are restored.
        batch: the argument of the first part, or a tuple of its arguments. The first dimension is the samples'.
        target: target for `loss_fn`.
        loss_fn: `(output, target) -> loss`. Default: the mean of the squares of all outputs.
        microbatches: number of equal parts of the batch. From 2 on, one waits while another runs.
        tolerance: as in `GradientCheck`.

    Returns:
        The report, if all gradients pass.

    Raises:
        PipelineError: the gradients differ. The cause (`GradientMismatchError`) has the report.
        ValueError: the batch cannot be cut into equal parts, only one of target and loss function is given, no
            parameter gets a gradient, or this process belongs to a job of several ranks.
    """
    modules = _list_modules(parts)
    (microbatches,) = require_whole(1, microbatches=microbatches)
    checks.require_above_0("tolerance", tolerance)
    args = batch if isinstance(batch, tuple) else (batch,)
    size = next((each.shape[0] for each in args if isinstance(each, Tensor) and each.dim()), 0)
    if not size or size % microbatches:
        raise ValueError(
            f"{size} samples do not make {microbatches} microbatches of equal size: give a tensor, or a tuple with one,"
            f" whose first dimension is a multiple of {microbatches}, or another number of microbatches"
        )
    if loss_fn is not None:
        checks.require_callable(loss_fn=loss_fn)
    if (target is None) != (loss_fn is None):
        raise ValueError("target and loss_fn go together: give both, or none for the mean of the squares of the output")
    if target is None:
        loss_fn, target = _mean_of_squares, torch.zeros(size)
    device = next((each.device for module in modules for each in module.parameters()), torch.device("cpu"))
    with _alone(), _followed_as_before(modules):
        stages = [PipelineStage(module, n, len(modules), device) for n, module in enumerate(modules)]
        schedule = build_pipeline_schedule(schedule_w_last(len(stages), microbatches), stages, microbatches, loss_fn)
        check = GradientCheck(schedule, _STEPS, tolerance=tolerance)
        with ExitStack() as kept:
            for stage in stages:
                kept.callback(ModuleState(stage.submod, device).restore)
                kept.enter_context(fsdp2.without_gradients(stage.submod))
                kept.enter_context(pipelining.infer_through_checkpoints(stage))
            for _ in range(_STEPS):
                schedule.step(*args, target=target)
    assert check.report is not None, "a step that returns was checked"
    if not check.report.errors and not check.report.not_compared:
        raise ValueError(_NO_GRADIENT)
    return check.report


def _list_modules(parts: nn.Module | PipelineStage | Sequence[nn.Module | PipelineStage]) -> list[nn.Module]:
    kinds = (nn.Module, PipelineStage)
    listed = [parts] if isinstance(parts, kinds) else list(parts) if isinstance(parts, Iterable) else [parts]
    wrong = [each for each in listed if not isinstance(each, kinds)]
    if wrong or not listed:
        raise ValueError(
            "check_gradients takes a model or the parts of one, each an nn.Module or a PipelineStage, got"
            f" {wrong[0] if wrong else listed!r}"
        )
    return [each.submod if isinstance(each, PipelineStage) else each for each in listed]


def schedule_w_last(num_stages: int, microbatches: int, orders: Sequence[str] = ("F", "I", "W")) -> Schedule:
    """A schedule on one rank: all ops of the kinds in the first of `orders`, then those of the next. With all F, all I
    and all W, activations and deferred gradients stay as long as possible."""
    stages = range(num_stages)
    ops = [
        Op(stage, OpKind(kind), microbatch)
        for order, microbatch in product(orders, range(microbatches))
        for stage in (stages[::-1] if "I" in order else stages)
        for kind in order
    ]
    return Schedule.from_rows([ops], "all W last")


def _mean_of_squares(output: Any, target: Tensor) -> Tensor:
    outputs = [each for each in autograd.tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    if not outputs:
        raise ValueError(_NO_GRADIENT)
    return sum((each.abs().square().mean() for each in outputs), torch.zeros((), device=outputs[0].device))


@contextmanager
def _alone() -> Iterator[None]:
    """Context with a process group of one rank, which torch's stages need."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise ValueError(
                f"check_gradients runs in one process, but this one belongs to a job of {dist.get_world_size()} ranks:"
                " call it outside of the job, or check the job's own steps with zbpipe.GradientCheck(schedule)"
            )
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _followed_as_before(modules: list[nn.Module]) -> Iterator[None]:
    """Context after which modules of another schedule defer to that schedule again."""
    followed = {each: each.gradients for module in modules for each in deferrals(module).values()}
    try:
        yield
    finally:
        for deferral, gradients in followed.items():
            deferral.gradients = gradients
