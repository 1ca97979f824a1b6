"""An optimizer step without a pipeline-wide barrier: step first, validate the norm of all gradients later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import getclosurevars, isfunction, signature, unwrap
from math import inf
from typing import Literal, get_args
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.device import RandomState
from zbpipe.runtime.optimizer.backup import Backup, Scheduler, parameters_of
from zbpipe.runtime.optimizer.norm import Votes, clip, square_on_rank
from zbpipe.runtime.ranks.agreement import is_alone
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.simulator.simulation import LEAST_GAIN

OnNonfinite = Literal["propagate", "skip", "raise"]
_CLOSE = 1e-5
"""Relative margin below the limit within which a norm is checked again synchronously."""
_NO_SCALER = (
    "OptimizerStep does not unscale the gradients of a GradScaler: train in bfloat16 without one, or step without"
    " OptimizerStep, by scaler.step(optimizer) of a torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, which"
    " skips a step on all ranks of its process_group if gradients overflow on one"
)
_TORCHS_EPSILON = 1e-6
"""torch clips by max_norm / (norm + 1e-6) if that is below 1."""


@dataclass(frozen=True)
class StepCounts:
    """Number of optimizer steps of each kind."""

    synchronous: int = 0
    """All ranks waited for the norm."""
    validated: int = 0
    """Ranks continued, and the norm was below the limit."""
    repeated: int = 0
    """Ranks continued, and had to step again with clipped gradients."""
    unlimited: int = 0
    """Ranks had nothing to wait for."""


class OptimizerStep:
    """Clips the gradients of a pipeline, steps optimizers and learning rates, and sets gradients to None.

        step = zbpipe.OptimizerStep(schedule, [optimizer], max_norm=1.0, lr_schedulers=[scheduler])
        for batch, target in data:
            schedule.step(batch, target=target)
            step()
        step.finish()

    Clipping needs the norm of all ranks' gradients, so in an ordinary step all ranks wait for the last one. Here each
    rank steps without clipping when it is done, and begins its next step. The norm is known when all ranks are done.
    Usually it is below `max_norm`; then the result is bit-identical to that of an ordinary step. Otherwise the rank
    restores its state, clips, steps again, and begins the next step again (Zero Bubble Pipeline Parallelism, arXiv
    2401.10241, section 4).

    Until the norm is known, a copy of the parameters and of the optimizers' state is kept: 12 bytes per parameter in
    float32 with AdamW. If the last step clipped, or if `now=True`, a step waits for the norm, as an ordinary step does.
    With `max_norm=inf` nothing waits, and nothing is copied.

    Args:
        schedule: a zbpipe schedule on its stages. Its gradients have to be scaled when `step` is called.
        optimizers: torch optimizers, or similar ones, whose state is tensors and numbers. All their parameters in this
            rank's stages are clipped together.
        max_norm: largest norm of all ranks' gradients together; infinite for no clipping.
        lr_schedulers: stepped after the optimizers.
        on_nonfinite: action if the norm is infinite or NaN: step anyway, as torch does ("propagate"), "skip" the step,
            or "raise" FloatingPointError on all ranks.
        clip: the job's function that clips the gradients of the whole pipeline and returns their norm. Default:
            torch's, with one all-reduce over the pipeline.
        step: the job's function that steps optimizers and learning rates. Default: each one's `step()`.
        predict: whether a step waits if the last one clipped. Without it, a job that clips often loses time.
        group: all ranks that run this schedule, including other replicas. Default: all ranks of the job.

    Raises:
        TypeError: `schedule` is not a zbpipe schedule, or a list has an item of another type.
        ValueError: a schedule without a gain or with another OptimizerStep, an optimizer that cannot repeat a step, a
            scheduler that needs an argument (ReduceLROnPlateau), or a bad argument.
    """

    # More than seven parameters: users write them as keywords.
    def __init__(
        self,
        schedule: RegisteredSchedule,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        max_norm: float = 1.0,
        lr_schedulers: Scheduler | Sequence[Scheduler] = (),
        on_nonfinite: OnNonfinite = "propagate",
        clip: Callable[[], Tensor] | None = None,
        step: Callable[[], None] | None = None,
        predict: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(schedule, RegisteredSchedule):
            raise TypeError(
                f"OptimizerStep takes a schedule of zbpipe's, as zbpipe.build_pipeline_schedule('ZBV', ...) returns it,"
                f" got {schedule!r}"
            )
        if schedule.optimizer_steps:
            raise ValueError(
                f"{schedule.schedule.name} already has an OptimizerStep, and one validates all gradients of a schedule:"
                " give it all optimizers, zbpipe.OptimizerStep(schedule, [first, second])"
            )
        _refuse_scalers(optimizers, clip, step, pipelining.loss_fn_of(schedule))
        self._optimizers = _as_tuple(optimizers)
        for each in self._optimizers:
            if isinstance(each, LBFGS):
                raise ValueError("OptimizerStep cannot step LBFGS, which runs the model itself: use its own step")
            if getattr(each, "grad_scale", None) is not None or getattr(each, "found_inf", None) is not None:
                raise ValueError(_NO_SCALER)
        if max_norm is None:
            raise ValueError("max_norm=None is not a limit: give a number above 0, or math.inf for no clipping")
        checks.require_above_0("max_norm", max_norm)
        checks.require_yes_or_no("predict", predict)
        checks.require_group(group)
        checks.require_one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self._clip = self._clip_by_torch if clip is None else clip
        self._step = self._step_each if step is None else step
        checks.require_callable(clip=self._clip, step=self._step)
        self._schedulers = tuple(lr_schedulers) if isinstance(lr_schedulers, (list, tuple)) else (lr_schedulers,)
        if step is None:
            _refuse_schedulers_with_arguments(self._schedulers)
        self._schedule = ref(schedule)  # the schedule's step refers to this object, and keeps process groups alive
        self._copies = schedule.tied_copies
        self._max_norm = max_norm
        self._on_nonfinite = on_nonfinite
        self._predict = predict
        stages = pipelining.stages_of(schedule)
        self._modules = [stage.submod for stage in stages]
        self._pipeline = stages[0].group
        self._device = pipelining.device_of(stages[0])
        self._pending: tuple[Future[float], Backup] | None = None
        """The pending norm, and the state that the last step changed."""
        self._last: Tensor | float | None = None
        """The last step's norm, maybe still on the device."""
        self._number = 0
        self.counts = StepCounts()
        self._votes: Votes | None = None
        if self._validates and not is_alone(group):
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            own = dist.new_group(ranks, backend="gloo", use_local_synchronization=group is not None)
            self._votes = Votes(stages[0].group_rank, stages[0].group_size, own)  # type: ignore[arg-type]
            if not schedule.changes_by_itself:
                _require_gain(schedule)
        schedule.optimizer_step = self

    @property
    def _validates(self) -> bool:
        return self._max_norm < inf or self._on_nonfinite != "propagate"

    @property
    def _parameters(self) -> list[Tensor]:
        # A job may add a group of parameters later.
        return list({id(each): each for of in self._optimizers for each in parameters_of(of)}.values())

    @property
    def is_pending(self) -> bool:
        """Whether the last step is still to be validated."""
        return self._pending is not None

    @property
    def last_norm(self) -> float | None:
        """Gradient norm of the last step with a known norm; waits for the device."""
        return None if self._last is None else float(self._last)

    @torch.no_grad()
    def __call__(self, *, now: bool = False) -> float | None:
        """One optimizer step. All ranks have to call it.

        Args:
            now: wait for the norm, because the step will be logged, saved or evaluated.

        Returns:
            The norm of all gradients if `now`, else None.

        Raises:
            ValueError: a sparse gradient.
            FloatingPointError: the norm is not finite, and `on_nonfinite` is "raise". If only the next `schedule.step`
                finds this, it is the cause of a PipelineError.
        """
        self.finish()
        for each in self._parameters:
            if each.grad is not None and each.grad.is_sparse:
                raise ValueError(
                    f"a parameter of shape {tuple(each.shape)} has a sparse gradient, whose norm torch does not"
                    " compute: use sparse=False in its layer, or the optimizer's own step"
                )
        self._number += 1
        if not self._validates:
            norm = self._clip() if now else None
            self._step()
            self._drop_gradients()
            self._last = self._last if norm is None else norm
            self._count("unlimited")
        elif now or self._has_to_wait():
            self._step_synchronously()
            self._count("synchronous")
        else:
            self._step_ahead()
        return self.last_norm if now else None

    def finish(self) -> None:
        """Wait until the last step is validated.

        Call it before a checkpoint, an evaluation, the end of the job, and before you change weights or gradients.
        """
        self.require_unchanged()
        if self._pending is not None and not self.verdict():
            self.redo()

    def require_unchanged(self) -> None:
        if self._pending is not None:
            self._pending[1].require_unchanged()

    def verdict(self) -> bool:
        """Wait for the norm. Without clipping, the step counts, and the gradients are freed."""
        assert self._pending is not None
        self._last = norm = self._pending[0].result()
        if self._clips(norm):
            return False
        self._pending = None
        self._count("validated")
        return True

    @torch.no_grad()
    def redo(self) -> None:
        """Repeat a rejected step as an ordinary one, with a pipeline-wide barrier."""
        assert self._pending is not None
        _, backup = self._pending
        random, restore_settings = RandomState(self._device), backup.save_new_settings()
        backup.restore()
        self._pending = None
        self._step_synchronously()
        random.restore()
        restore_settings()
        self._count("repeated")

    def _step_ahead(self) -> None:
        assert self._votes is not None, "else it has to wait"
        about = f"step {self._number}, {self._max_norm}, {self._on_nonfinite}"
        norm = self._votes.cast(square_on_rank(self._parameters, self._device, copies=self._copies), about)
        backup = Backup(self._optimizers, self._schedulers, self._modules, self._device)
        self._pending = norm, backup
        self._step()
        self._drop_gradients()  # the backup keeps them
        backup.note_result()

    def _step_synchronously(self) -> None:
        self._last = self._clip()
        if self._on_nonfinite == "propagate" or torch.isfinite(torch.as_tensor(self._last)):
            self._step()
        elif self._on_nonfinite == "raise":
            raise FloatingPointError(
                f"the norm of the gradients is {self.last_norm} in optimizer step {self._number}: lower the learning"
                " rate, or skip such steps with on_nonfinite='skip'"
            )
        self._drop_gradients()

    def _step_each(self) -> None:
        for each in (*self._optimizers, *self._schedulers):
            each.step()

    def _clip_by_torch(self) -> Tensor:
        return clip(self._parameters, self._max_norm, self._pipeline, self._device, copies=self._copies)

    def _clips(self, norm: float) -> bool:
        """Whether gradients of this norm are clipped, or so close to the limit that the order of the sum matters."""
        return not norm * (1 + _CLOSE) + _TORCHS_EPSILON < self._max_norm

    def _has_to_wait(self) -> bool:
        """Whether to wait: the schedule cannot run ahead, the last step clipped, or this is the first step."""
        schedule = self._schedule()
        if self._votes is None or schedule is None or schedule.lists.cut(schedule) is None:
            return True
        return self._predict and (self._last is None or self._clips(float(self._last)))

    def _drop_gradients(self) -> None:
        for each in self._parameters:
            each.grad = None

    def _count(self, which: str) -> None:
        self.counts = replace(self.counts, **{which: getattr(self.counts, which) + 1})


def _as_tuple(given: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    found = (given,) if isinstance(given, Optimizer) else given
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(each, Optimizer) for each in found):
        raise TypeError(f"OptimizerStep takes optimizers of torch.optim, for example [optimizer], got {given!r}")
    return tuple(found)


def _refuse_scalers(*where: object) -> None:
    """Refuse gradient scalers, because scaled gradients would be clipped and stepped."""
    for each in where:
        function = unwrap(each) if callable(each) else each
        used = [getattr(function, "__self__", function)]
        if isfunction(function):
            with suppress(ValueError):  # a closure variable that is still unset
                known = getclosurevars(function)
                used += [*known.nonlocals.values(), *known.globals.values()]
        if any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in used):
            raise ValueError(_NO_SCALER)


def _refuse_schedulers_with_arguments(schedulers: Sequence[Scheduler]) -> None:
    for each in schedulers:
        try:
            signature(each.step).bind()
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"OptimizerStep steps learning rates without an argument, and cannot step {each!r} ({error}): omit it"
                " from lr_schedulers, and step it yourself after step.finish()"
            ) from error


def _require_gain(schedule: RegisteredSchedule) -> None:
    gained = schedule.lists.gain_of_running_ahead()
    if gained < LEAST_GAIN:
        raise ValueError(
            f"{schedule.schedule.name} gains nothing ({gained:.1%} of a step) from an optimizer step that no rank waits"
            " for: use ZBV, ZBH2 or ZB2P with twice as many microbatches as ranks, or clip and step as usual"
        )
