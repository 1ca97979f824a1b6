"""Steps that begin before the last optimizer step is validated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from zbpipe.runtime._torch import fsdp, hooks, pipelining, running_ahead
from zbpipe.runtime.optimizer.backup import RandomState
from zbpipe.simulator.post_validation import RunAhead


class Validation(Protocol):
    """Of an optimizer step that was made before all gradients were known."""

    @property
    def is_pending(self) -> bool:
        """Whether there is a step to validate."""

    @property
    def counts(self) -> Any:
        """A dataclass with a number for each kind of step."""

    def verdict(self) -> bool:
        """Wait until it is known whether the step counts."""

    def redo(self) -> None:
        """After a verdict against it: make the step again."""

    def finish(self) -> None:
        """Both, if there is a step to validate."""


def run_validated(
    schedule: pipelining.OwnRuntime,
    validation: Validation | None,
    cut: Callable[[], RunAhead | None],
    run: Callable[[], None],
) -> None:
    """Run a step ahead of `validation` if that is pending; the step begins again if the optimizer step did not count.

    Args:
        schedule: whose step it is.
        validation: of the last optimizer step.
        cut: the lists of the schedule cut for that; None where it cannot run ahead.
        run: the step.
    """
    kept = _kept_gradients(schedule)
    ahead = None
    if validation is not None and validation.is_pending and pipelining.trains(schedule) and not kept:
        ahead = cut()
    if validation is None or ahead is None:
        schedule.finish_optimizer_step()
        with pipelining.saved_from_scaling(schedule, kept):
            run()
        return
    random = RandomState.now(pipelining.device_of(hooks.stages_of(schedule)[0]))
    if not running_ahead.run_ahead(schedule, ahead, validation.verdict, run):
        validation.redo()
        random.restore()
        run()


def _kept_gradients(schedule: pipelining.OwnRuntime) -> list[Tensor]:
    """Those that earlier steps have left, if the end of this step divides all gradients by its microbatches."""
    if not (schedule.scale_grads and pipelining.trains(schedule)):
        return []
    return fsdp.find_kept_gradients(stage.submod for stage in hooks.stages_of(schedule))
