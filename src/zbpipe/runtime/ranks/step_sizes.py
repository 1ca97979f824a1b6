"""Steps of other sizes: all ranks have to know the number and the shapes of microbatches before the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbpipe.runtime import checks
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.ranks.step_board import StepBoard, StepSize


class StepSizes:
    """The sizes of the steps of one schedule."""

    def __init__(self, board: StepBoard, usual: int) -> None:
        self._board = board
        self.usual = usual
        """Default number of microbatches of a step."""
        self.last = StepSize(usual)
        """Size of the running step, or of the last one."""
        self.are_set_up = False
        """Whether torch has set up messages for any shapes."""
        self.keywords_are_alike = False
        """Whether all ranks get keyword inputs of the same shapes. New shapes of these are then a new size."""
        self._keywords: list[Any] = []
        """Shapes of the keyword inputs in the first step."""
        self._inputs: list[Any] = []
        """Known input shapes, indexed by their number. Only on the rank with stage 0, which sees the input."""
        self._set_up: list[pipelining.Shapes] = []
        """torch's setups, indexed by the shapes' number. Outdated for the last step's shapes."""

    @property
    def last_was_usual(self) -> bool:
        """Whether the last step had the usual number of microbatches, and the shapes of the first step."""
        return self.last == StepSize(self.usual)

    def find_number(self, microbatches: int | None, keywords: object) -> int | None:
        """The number of microbatches requested for a step, or already split by a framework; None for the usual one."""
        if microbatches is not None or not isinstance(keywords, list) or not keywords:
            return microbatches
        shapes = checks.describe_inputs(each.values() for each in keywords) if self.keywords_are_alike else []
        if not self.are_set_up:
            self._keywords = shapes
        return len(keywords) if len(keywords) != self.usual or shapes != self._keywords else None

    def agree(self, runtime: pipelining.OwnRuntime, inputs: Sequence[Any] | None) -> bool:
        """Agree on the step's size with all ranks before its messages; returns whether torch infers new shapes.

        Raises:
            ValueError: different numbers of microbatches, new shapes where torch cannot infer them, or another rank
                refuses the step.
            PipelineError: another rank does not reach the step.
        """
        stage = hooks.stages_of(runtime)[0]
        size, number = StepSize(pipelining.num_microbatches(runtime)), None
        if not self.are_set_up:
            self._inputs.clear()  # left by a refused step
        shapes = checks.describe_inputs(inputs or ())
        if stage.is_first:
            number = self._inputs.index(shapes) if shapes in self._inputs else len(self._inputs)
        if self._board.is_compared:
            size = self._board.agree_on_size(size.microbatches, number)
        is_new = self._use_shapes(runtime, size.shapes)
        if size.shapes == len(self._inputs):
            self._inputs.append(shapes)
        self.last = size
        return is_new

    def pass_on_unfreezing(self, schedule: pipelining.OwnRuntime) -> None:
        """Before a step's messages, request gradients for newly unfrozen parameters."""
        # In a model that begins with frozen stages, only a stage's own rank sees that its parameters are no longer
        # frozen. Then the next stage has to send gradients, which the messages' setup lacks. So ranks report to the
        # next rank.
        is_ready = pipelining.is_set_up(schedule) and pipelining.can_infer_shapes(schedule)
        if not pipelining.trains(schedule) or not is_ready:
            return
        own = {stage.stage_index for stage in schedule.own_stages}
        is_unfrozen = False
        for stage in schedule.own_stages:
            index, has_none = stage.stage_index, stage.is_without_gradients("inputs")
            if index - 1 not in own:
                waits, rank_of = has_none and not self._board.is_alone, schedule.stage_index_to_group_rank
                is_unfrozen = waits and self._board.take(f"unfrozen/{index}", rank_of[index - 1]) == "1"
            if has_none and is_unfrozen:
                stage.give_gradients("inputs")
            if stage.is_without_gradients("outputs"):
                if is_unfrozen := is_unfrozen or stage.is_unfrozen:
                    stage.give_gradients("outputs")
                if index + 1 not in own:
                    self._board.give(f"unfrozen/{index + 1}", str(int(is_unfrozen)))

    def _use_shapes(self, runtime: pipelining.OwnRuntime, number: int) -> bool:
        if not self.are_set_up or number == self.last.shapes:
            return False
        self._set_up = self._set_up or [pipelining.shapes_of(runtime)]
        self._set_up[self.last.shapes] = pipelining.shapes_of(runtime)
        if number < len(self._set_up):
            pipelining.use_shapes(runtime, self._set_up[number])
            return False
        checks.require_inferred_shapes(runtime)
        # The stages run once to infer shapes, which needs validated weights.
        runtime.finish_optimizer_step()
        pipelining.forget_shapes(runtime)
        self._set_up.append(pipelining.shapes_of(runtime))
        return True
