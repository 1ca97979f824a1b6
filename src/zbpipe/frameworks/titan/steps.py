"""The optimizer step of TorchTitan's trainer without a pipeline-wide barrier. Imports no torchtitan."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime.optimizer.step import OptimizerStep

logger = logging.getLogger(__name__)


def validate_steps(trainer_class: Any, dist_utils: Any, max_norm: Callable[[Any], float]) -> None:
    """Let each rank's trainer step at once, and validate the norm of the gradients later. Replaces `train` and
    `train_step` of TorchTitan's `Trainer`. `dist_utils` is TorchTitan's module with the function `clip_grad_norm_`, and
    `max_norm` returns the norm to which a trainer clips."""
    train, train_step = trainer_class.train, trainer_class.train_step

    def train_in_steps(self: Any) -> None:
        require_own_steps(type(self))
        steps, checkpointer = _Steps(self, dist_utils, max_norm(self)), part_of(self, "checkpointer")
        save = checkpointer.save

        def save_finished(step: int, last_step: bool = False) -> Any:
            # Other ranks save at other steps.
            is_due = getattr(checkpointer, "_should_save", lambda *args: True)
            if checkpointer.enable and is_due(step, last_step):
                steps.step.finish()
            return save(step, last_step)

        with replaced(checkpointer, save=save_finished), replaced(self, _zbpipe_steps=steps):
            validator = getattr(self, "validator", None)
            if validator is None:
                train(self)
            else:
                with replaced(validator, validate=_after(steps.step.finish, validator.validate)):
                    train(self)
        steps.step.finish()
        logger.info("Optimizer steps: %s", ", ".join(f"{n} {way}" for way, n in asdict(steps.step.counts).items() if n))

    def run_step(self: Any, data_iterator: Any) -> None:
        self._zbpipe_steps.train_step(lambda: train_step(self, data_iterator))

    trainer_class.train, trainer_class.train_step, trainer_class._zbpipe_steps = train_in_steps, run_step, None


def require_own_steps(trainer_class: type[Any]) -> None:
    """Refuse a trainer class with its own training methods, which would bypass those of `validate_steps`."""
    for name in ("train", "train_step"):
        method = inspect.unwrap(getattr(trainer_class, name))
        # An override that only adds code calls the base class's method.
        if method.__module__ != __name__ and "super" not in method.__code__.co_names:
            raise ValueError(
                "--zbpipe.optimizer-step validated has no effect in"
                f" {trainer_class.__module__}.{trainer_class.__qualname__}, which overrides {name}: omit the option"
            )


def part_of(trainer: Any, name: str) -> Any:
    """A part of the trainer. TorchTitan's main branch keeps some in `trainer.engine`."""
    engine = getattr(trainer, "engine", None)
    return getattr(engine if hasattr(engine, name) else trainer, name)


class _Steps:
    """The optimizer steps of a `Trainer`, which clips, steps and sets gradients to None through this object."""

    def __init__(self, trainer: Any, dist_utils: Any, max_norm: float) -> None:
        self._trainer = ref(trainer)
        self._dist_utils = dist_utils
        self._clip_as: Callable[[], Tensor] = _nothing  # type: ignore[assignment]
        self.step = OptimizerStep(
            part_of(trainer, "pp_schedule"),
            list(part_of(trainer, "optimizers").optimizers),
            max_norm=max_norm,
            lr_schedulers=part_of(trainer, "lr_schedulers"),
            clip=self._clip_now,
            step=self._step_containers,
        )

    def train_step(self, run: Callable[[], None]) -> None:
        """Run TorchTitan's own step, which makes the calls of this object one by one."""
        trainer, clip, norms = self._trainer(), self._dist_utils.clip_grad_norm_, []
        assert trainer is not None

        def clip_and_step(*args: Any, **kwargs: Any) -> Tensor:
            self._clip_as = lambda: clip(*args, **kwargs)
            with replaced(self._dist_utils, clip_grad_norm_=clip):
                norms.append(self.step(now=part_of(trainer, "metrics_processor").should_log(part_of(trainer, "step"))))
            return torch.tensor(norms[-1] or 0.0)

        with (
            replaced(self._dist_utils, clip_grad_norm_=clip_and_step),
            replaced(part_of(trainer, "optimizers"), step=_nothing, zero_grad=_nothing),
            replaced(part_of(trainer, "lr_schedulers"), step=_nothing),
        ):
            run()

    def _clip_now(self) -> Tensor:
        return self._clip_as()

    def _step_containers(self) -> None:
        trainer = self._trainer()
        assert trainer is not None
        part_of(trainer, "checkpointer").maybe_wait_for_staging()
        for each in (part_of(trainer, "optimizers"), part_of(trainer, "lr_schedulers")):
            type(each).step(each)


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def call_after(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return call_after


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
