"""Where the model begins with frozen stages, ranks tell the next one whether that is still so."""

from __future__ import annotations

from zbpipe.runtime import _torch
from zbpipe.runtime.ranks.step_board import StepBoard


def pass_on_unfreezing(schedule: _torch.ScheduleRuntime, board: StepBoard) -> None:
    """Before the messages of a step: have gradients come back for parameters that are to be trained now.

    Only the rank of a stage sees that its parameters are. Then gradients have to come back from the stage after it,
    which has none to give as the messages are set up.
    """
    if not _torch.trains(schedule) or not _torch.is_set_up(schedule) or not _torch.can_infer_shapes(schedule):
        return
    stages = _torch.stages_of(schedule)
    own = {stage.stage_index for stage in stages}
    is_unfrozen = False
    for stage in stages:
        index, has_none = stage.stage_index, _torch.is_without_gradients(stage, "inputs")
        if index - 1 not in own:
            is_unfrozen = has_none and not board.is_alone and _ask_previous(board, index)
        if has_none and is_unfrozen:
            _torch.give_gradients(stage, "inputs")
        if _torch.is_without_gradients(stage, "outputs"):
            if is_unfrozen := is_unfrozen or _torch.is_unfrozen(stage):
                _torch.give_gradients(stage, "outputs")
            if index + 1 not in own and not board.is_alone:
                _torch.default_store().set(_key(board, index + 1), str(int(is_unfrozen)))


def _ask_previous(board: StepBoard, stage: int) -> bool:
    """Wait for what the rank before `stage` tells it."""
    store, key = _torch.default_store(), _key(board, stage)
    is_unfrozen = bool(store.get(key) == b"1")
    store.delete_key(key)
    return is_unfrozen


def _key(board: StepBoard, stage: int) -> str:
    return board.key(f"unfrozen/{stage}")
