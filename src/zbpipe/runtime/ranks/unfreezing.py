"""Where the model begins with frozen stages, ranks tell the next one whether that is still so."""

from __future__ import annotations

from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.ranks.step_board import StepBoard


def pass_on_unfreezing(schedule: pipelining.ScheduleRuntime, board: StepBoard) -> None:
    """Before the messages of a step: have gradients come back for parameters that are to be trained now.

    Only the rank of a stage sees that its parameters are. Then gradients have to come back from the stage after it,
    which has none to give as the messages are set up.
    """
    if (
        not pipelining.trains(schedule)
        or not pipelining.is_set_up(schedule)
        or not pipelining.can_infer_shapes(schedule)
    ):
        return
    stages = hooks.stages_of(schedule)
    own = {stage.stage_index for stage in stages}
    is_unfrozen = False
    for stage in stages:
        index, has_none = stage.stage_index, pipelining.is_without_gradients(stage, "inputs")
        if index - 1 not in own:
            is_unfrozen = has_none and not board.is_alone and _ask_previous(board, index)
        if has_none and is_unfrozen:
            pipelining.give_gradients(stage, "inputs")
        if pipelining.is_without_gradients(stage, "outputs"):
            if is_unfrozen := is_unfrozen or pipelining.is_unfrozen(stage):
                pipelining.give_gradients(stage, "outputs")
            if index + 1 not in own and not board.is_alone:
                pipelining.default_store().set(_key(board, index + 1), str(int(is_unfrozen)))


def _ask_previous(board: StepBoard, stage: int) -> bool:
    """Wait for the report of the rank before `stage`."""
    store, key = pipelining.default_store(), _key(board, stage)
    is_unfrozen = bool(store.get(key) == b"1")
    store.delete_key(key)
    return is_unfrozen


def _key(board: StepBoard, stage: int) -> str:
    return board.key(f"unfrozen/{stage}")
