"""Memory of messages: what a rank receives lives from its receive to its last use, what it sends until it has arrived.

torch 2.15 does that by itself. Before, torch allocates what all microbatches of a step receive at once and keeps it
for the whole job, and keeps what it sends until the end of the step: with m microbatches up to 4 m messages each way
on a rank with two stages. `zbpipe.passes.messages_held` tells how many there are now. Known from torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    _Action,
    _batch_p2p,
    _ComputationType,
    _wait_batch_p2p,
)
from torch.distributed.pipelining.stage import _PipelineStageBase


class ReceivesOnDemand(_PipelineStageBase):
    """A stage that allocates what it receives when it posts the receive, and lets go of it when it runs F, I or B.

    Whoever needs it for longer, as autograd and what waits for W do, holds it then.
    """

    def receive_on_demand(self) -> None:
        """Let go of what is allocated. Call it once, after the stage's class has got these methods."""
        self.args_recv_info = _Received(self.args_recv_info)
        self.grad_recv_info = _Received(self.grad_recv_info)

    def forget_shapes(self) -> None:
        """Know of no shapes, as before the first step."""
        self._stage_meta = type(self._stage_meta)()
        self.args_recv_info, self.grad_recv_info = _Received({}), _Received({})
        self.act_send_info, self.grad_send_info = {}, None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        inputs = super()._retrieve_recv_activations(fwd_chunk_id)  # type: ignore[no-untyped-call, unused-ignore]
        _let_go(self.args_recv_info[fwd_chunk_id])
        return inputs

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        # The next stage is on this rank and had no gradient to give, which torch replaces by zeros.
        for missing in _allocate(self.grad_recv_info[bwd_chunk_id], self.device):
            missing.zero_()
        gradients = super()._retrieve_recv_grads(bwd_chunk_id)  # type: ignore[no-untyped-call, unused-ignore]
        _let_go(self.grad_recv_info[bwd_chunk_id])
        return gradients


class _Received(dict[int, tuple[Any, ...]]):
    """By microbatch torch's descriptions of what a stage receives, each with a placeholder instead of its buffer.

    The placeholder has the shape of the buffer and is on the device "meta", so it takes no memory.
    """

    def __init__(self, known: Mapping[int, tuple[Any, ...]]) -> None:
        super().__init__()
        for microbatch, infos in known.items():
            self[microbatch] = infos

    def __missing__(self, microbatch: int) -> tuple[Any, ...]:
        """Steps may have more microbatches than the one for which torch has set this up."""
        if not microbatch:
            raise KeyError(microbatch)
        infos = tuple(copy(info) for info in self[0])
        _empty(infos)  # what microbatch 0 has received is its own
        self[microbatch] = infos
        return infos

    def __setitem__(self, microbatch: int, infos: tuple[Any, ...]) -> None:
        for info in infos:
            # torch 2.15 has no buffer here yet, and what the user gives to stage 0 never has one.
            if isinstance(getattr(info, "buffer", None), Tensor):
                info.buffer = info.placeholder = _like(info.buffer, "meta")
        super().__setitem__(microbatch, infos)


def _like(buffer: Tensor, device: torch.device | str) -> Tensor:
    empty = torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device=device)
    # torch 2.11 says so when it sets up the stage, later versions when F takes it.
    return empty.requires_grad_(buffer.requires_grad)


def _allocate(infos: Iterable[Any], device: torch.device | str) -> list[Tensor]:
    """Replace placeholders by buffers; returns the new ones."""
    empty = [info for info in infos if info.buffer is not None and info.buffer is getattr(info, "placeholder", None)]
    for info in empty:
        info.buffer = _like(info.placeholder, device)
    return [info.buffer for info in empty]


def _empty(infos: Iterable[Any]) -> None:
    """As before anything was received, also where torch (from 2.15 on) keeps the buffers itself."""
    for info in infos:
        if hasattr(info, "take_buffer"):
            info.buffer = None
    _let_go(infos)


def _let_go(infos: Iterable[Any]) -> None:
    for info in infos:
        if hasattr(info, "placeholder"):
            info.buffer = info.placeholder


def release_receives(stage: _PipelineStageBase) -> None:
    """Let go of what `stage` has received and not used."""
    for received in (stage.args_recv_info, stage.grad_recv_info):
        for infos in received.values():
            _empty(infos)


class _Wait(StrEnum):
    """Actions that torch has from 2.15 on."""

    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"


_SEND_OF = {_Wait.WAIT_SEND_F: _ComputationType.SEND_F, _Wait.WAIT_SEND_B: _ComputationType.SEND_B}
WAITS_FOR_SENDS = _Wait.WAIT_SEND_F in {each.value for each in _ComputationType}
"""Whether the installed torch has these actions by itself."""
WAIT_KINDS: dict[str, Any] = {each.value: each for each in _Wait}
"""By name the kinds of waits for a schedule that was given `wait_for_sends`."""


def wait_for_sends(runtime: Any) -> None:
    """Make `runtime` run actions of `WAIT_KINDS`, in place of torch's wait for all sends at the end of a step."""
    runtime.sends_under_way = {}
    functions = dict.fromkeys(_SEND_OF.values(), _send) | dict.fromkeys(_SEND_OF, _wait)
    runtime._comp_type_to_function_map.update(functions)


def _send(action: _Action, context: Any) -> None:
    runtime, kind = context.schedule_ref, action.computation_type
    stage = next(each for each in runtime._stages if each.stage_index == action.stage_index)
    operations = stage.get_fwd_send_ops if kind is _ComputationType.SEND_F else stage.get_bwd_send_ops
    runtime.sends_under_way[action] = _batch_p2p(operations(action.microbatch_index))


def _wait(action: _Action, context: Any) -> None:
    send = action._replace(computation_type=_SEND_OF[action.computation_type])  # type: ignore[index]
    _wait_batch_p2p(context.schedule_ref.sends_under_way.pop(send))  # type: ignore[no-untyped-call, unused-ignore]
