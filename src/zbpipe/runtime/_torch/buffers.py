"""Memory of messages: received tensors live from their receive to their last use, sent tensors until they arrive.

torch 2.15 does that by itself. Before, torch allocates the receive buffers of all microbatches at once and keeps them
for the whole job. It keeps sent tensors until the end of the step. With m microbatches these are up to 4 m messages
each way on a rank with two stages. `zbpipe.simulator.passes.messages_held` counts the messages held with this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from enum import StrEnum
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _ComputationType, _wait_batch_p2p
from torch.distributed.pipelining.stage import _PipelineStageBase


class ReceivesOnDemand(_PipelineStageBase):
    """A stage that allocates each receive buffer when it posts the receive, and releases it when it runs F, I or B."""

    def receive_on_demand(self) -> None:
        """Release allocated buffers. Call it once, after these methods were added to the stage's class."""
        self.args_recv_info = _Received(self.args_recv_info)
        self.grad_recv_info = _Received(self.grad_recv_info)

    def forget_shapes(self) -> None:
        """Forget all shapes, as before the first step."""
        self._stage_meta = type(self._stage_meta)()
        self.args_recv_info, self.grad_recv_info = _Received({}), _Received({})
        self.act_send_info, self.grad_send_info = {}, None

    def forget_receives(self) -> None:
        """Forget all messages before torch sets up a step's again: torch would reuse leftovers of a larger step."""
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        self.grad_send_info = None

    def is_without_gradients(self, side: Literal["inputs", "outputs"]) -> bool:
        """Whether messages on this side were set up (from torch 2.13 on) without any gradient, because all earlier
        stages are frozen."""
        if self.is_first if side == "inputs" else self.is_last:
            return False
        metas = self.metas(side)
        return any(each.dtype.is_floating_point for each in metas) and not any(each.requires_grad for each in metas)

    def give_gradients(self, side: Literal["inputs", "outputs"]) -> None:
        """Exchange gradients from now on for the messages on this side, which were set up without them."""
        known = self._stage_meta
        if any(hasattr(each, "placements") for each in getattr(known, side)):
            raise ValueError(
                f"stage {self.stage_index} passes DTensors, and parameters were unfrozen: torch learns how gradients"
                " are placed when it sets up its messages, so build the schedule anew on all ranks"
            )
        metas = tuple(
            replace(each, requires_grad=True) if each.dtype.is_floating_point else each for each in getattr(known, side)
        )
        gradients = tuple(
            replace(each, requires_grad=False) if each.dtype.is_floating_point else None for each in metas
        )
        if side == "outputs":
            known.outputs, known.output_grads = metas, gradients
            self.grad_recv_info = _Received({0: self._create_grad_recv_info(self.act_send_info)})
        else:
            known.inputs, known.input_grads = metas, gradients
            infos = tuple(map(copy, self.args_recv_info[0]))
            for info, meta in zip(infos, metas, strict=True):
                info.tensor_meta = meta
            self.args_recv_info, self.grad_send_info = _Received({0: infos}), None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        _allocate(self.args_recv_info[fwd_chunk_id], self.device, self.infers_shapes)
        return self._order_by_memory(super().get_fwd_recv_ops(fwd_chunk_id), self.args_recv_info[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.device, self.infers_shapes)
        operations = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._order_by_memory(operations, self.grad_recv_info[bwd_chunk_id]) if operations else []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        return self._make_contiguous(operations, self.metas("outputs"))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        return self._make_contiguous(operations, [each for each in self.metas("input_grads") if each is not None])

    @property
    def infers_shapes(self) -> bool:
        """Whether torch (from 2.13 on) infers shapes. Both ends of a message then have the same inferred shape."""
        return getattr(getattr(self, "_inference_mode", None), "name", "") == "DYNAMIC"

    def metas(self, kind: str) -> Sequence[Any]:
        """Metadata that torch (from 2.13 on) has for tensors of this kind, the same on both ends."""
        return getattr(getattr(self, "_stage_meta", None), kind, None) or ()

    def _make_contiguous(self, operations: list[Any], metas: Sequence[Any]) -> list[Any]:
        """The sends with tensors contiguous, as backends require, in the dimension order that the receiver expects."""
        for number, operation in enumerate(operations):
            order = memory_order(metas[number].shape, metas[number].stride) if self.infers_shapes else None
            tensor = operation.tensor if order is None else operation.tensor.permute(order)
            operation.tensor = tensor.contiguous()
        return operations

    def _order_by_memory(self, operations: list[Any], infos: Sequence[Any]) -> list[Any]:
        """The receives, each into its buffer as a contiguous tensor."""
        for operation in operations:
            buffer = operation.tensor
            if buffer.is_contiguous():
                continue
            if self.infers_shapes and (order := memory_order(buffer.shape, buffer.stride())) is not None:
                operation.tensor = buffer.permute(order)
                continue
            for info in infos:  # a buffer that torch 2.15 allocated by itself
                if info.buffer is buffer:
                    info.buffer = operation.tensor = torch.empty_like(buffer, memory_format=torch.contiguous_format)
        return operations

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        inputs = super()._retrieve_recv_activations(fwd_chunk_id)  # type: ignore[no-untyped-call, unused-ignore]
        _let_go(self.args_recv_info[fwd_chunk_id])
        if self.has_backward and torch.is_grad_enabled():
            for number, (given, meta) in enumerate(zip(inputs, self.metas("inputs"), strict=False)):
                if meta.requires_grad and not given.requires_grad:
                    raise _make_error(self.stage_index, fwd_chunk_id, f"cannot give the gradient of its input {number}")
        return inputs

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        # The next stage is on this rank and had no gradient, which torch replaces by zeros.
        for missing in _allocate(self.grad_recv_info[bwd_chunk_id], self.device, self.infers_shapes):
            missing.zero_()
        gradients = super()._retrieve_recv_grads(bwd_chunk_id)  # type: ignore[no-untyped-call, unused-ignore]
        _let_go(self.grad_recv_info[bwd_chunk_id])
        for number, (given, meta) in enumerate(zip(gradients, self.metas("output_grads"), strict=False)):
            if meta is not None and given is None:
                raise _make_error(self.stage_index, bwd_chunk_id, f"does not get the gradient of its output {number}")
        return gradients


def _make_error(stage: int, microbatch: int, what: str) -> RuntimeError:
    """The error for a missing gradient: torch would continue with zeros, and all earlier stages' gradients would be
    wrong."""
    return RuntimeError(
        f"stage {stage} {what} in microbatch {microbatch}, although the stages were set up to pass it on: something was"
        " left from a step of another kind. Build the schedule anew, and please report this"
    )


@cache
def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Order of the dimensions in which a tensor is contiguous; None if it already is contiguous, or in no order.

    >>> memory_order((2, 3, 4), (3, 1, 6))
    (2, 0, 1)
    """
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != step:
            return None  # with gaps or overlapping elements
        step *= shape[dim]
    return None if order == tuple(range(len(shape))) else order


class _Received(dict[int, tuple[Any, ...]]):
    """torch's descriptions of a stage's receives per microbatch, each with a meta tensor instead of its buffer."""

    def __init__(self, known: Mapping[int, tuple[Any, ...]]) -> None:
        super().__init__()
        for microbatch, infos in known.items():
            self[microbatch] = infos

    def __missing__(self, microbatch: int) -> tuple[Any, ...]:
        """Copy microbatch 0's descriptions: steps may have more microbatches than the step of torch's setup."""
        if not microbatch:
            raise KeyError(microbatch)
        infos = tuple(copy(info) for info in self[0])
        _empty(infos)  # microbatch 0 keeps its own received tensors
        self[microbatch] = infos
        return infos

    def __setitem__(self, microbatch: int, infos: tuple[Any, ...]) -> None:
        for info in infos:
            # torch 2.15 has no buffer here yet. The user's input of stage 0 never has one.
            if isinstance(getattr(info, "buffer", None), Tensor):
                info.buffer = info.placeholder = _make_like(info.buffer, "meta")
        super().__setitem__(microbatch, infos)


def _make_like(buffer: Tensor, device: torch.device | str, keeps_strides: bool = True) -> Tensor:
    has_order = keeps_strides and memory_order(buffer.shape, buffer.stride()) is not None
    empty = (
        torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device=device)
        if has_order
        else torch.empty(buffer.size(), dtype=buffer.dtype, device=device)
    )
    # torch 2.11 reports this when it sets up the stage, later versions when F takes it.
    return empty.requires_grad_(buffer.requires_grad)


def _allocate(infos: Iterable[Any], device: torch.device | str, keeps_strides: bool) -> list[Tensor]:
    """Replace placeholders by buffers, optionally with the same strides; returns the new ones."""
    empty = [info for info in infos if info.buffer is not None and info.buffer is getattr(info, "placeholder", None)]
    for info in empty:
        info.buffer = _make_like(info.placeholder, device, keeps_strides)
    return [info.buffer for info in empty]


def _empty(infos: Iterable[Any]) -> None:
    """Replace buffers by placeholders, also where torch (from 2.15 on) keeps the buffers itself."""
    for info in infos:
        if hasattr(info, "take_buffer"):
            info.buffer = None
    _let_go(infos)


def _let_go(infos: Iterable[Any]) -> None:
    for info in infos:
        if hasattr(info, "placeholder"):
            info.buffer = info.placeholder


def release_receives(stage: _PipelineStageBase) -> None:
    """Release received tensors that `stage` has not used."""
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
"""Kinds of waits by name, for a schedule with `wait_for_sends`."""


def wait_for_sends(runtime: Any) -> None:
    """Make `runtime` run actions of `WAIT_KINDS`, instead of torch's wait for all sends at the end of a step."""
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
