"""Messages of a stage. Received tensors live from their receive to their last use, sent tensors until they arrive.

torch 2.15 does this by itself. Older versions allocate the receive buffers of all microbatches at once, for the whole
job, and keep sent tensors until the end of the step: up to 4 m messages each way on a rank with two stages.
`zbpipe.simulator.passes.messages_held` counts the messages held with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _ComputationType
from torch.distributed.pipelining.stage import _PipelineStageBase

from zbpipe.runtime._torch.autograd import tree_map_only

Route = tuple[Callable[..., Any], int, Any]
"""The route of a message between two ranks: `dist.isend` or `dist.irecv`, the peer's global rank, and the group."""


class StageMessages:
    """The messages of a stage: their setup and their buffers. Supports evaluation. A receive buffer lives from the
    receive to the stage's F, I or B. Nothing is sent to the same rank."""

    METHODS = (
        *("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"),
        *("get_local_bwd_output", "set_local_bwd_input", "_retrieve_recv_activations", "_retrieve_recv_grads"),
        *("_to_tensor", "_get_init_p2p_neighbors_ops"),
    )
    """Methods of torch's stage that this object replaces."""

    def __init__(self, stage: _PipelineStageBase) -> None:
        self.stage: Any = stage
        self._torchs = replace_methods(stage, self, self.METHODS)
        self._frozen: Sequence[tuple[dict[str, Any], str]] = ()
        """Parameters that were frozen when torch set up the messages, by dictionary and name."""
        self.routes: set[Route] | None = None
        """Routes of all messages, if set to an empty set; None to keep none."""
        self.stage.args_recv_info = _Received(self.stage.args_recv_info)
        self.stage.grad_recv_info = _Received(self.stage.grad_recv_info)

    def begin_setup(self) -> None:
        """Note the frozen parameters, before torch sets up the messages of training."""
        owners = [part._parameters for part in self.stage.submod.modules()]
        self._frozen = [
            (own, name) for own in owners for name, each in own.items() if each is not None and not each.requires_grad
        ]

    @property
    def is_unfrozen(self) -> bool:
        return any((parameter := own.get(name)) is not None and parameter.requires_grad for own, name in self._frozen)

    @property
    def setup(self) -> dict[str, Any]:
        """torch's setup for microbatches of some shapes."""
        return {name: getattr(self.stage, name) for name in _SETUP} | {"frozen": self._frozen}

    def use_setup(self, setup: Mapping[str, Any]) -> None:
        self._frozen = setup["frozen"]
        for name in _SETUP:
            setattr(self.stage, name, setup[name])

    def forget_shapes(self) -> None:
        stage = self.stage
        stage._stage_meta = type(stage._stage_meta)()
        stage.args_recv_info, stage.grad_recv_info = _Received({}), _Received({})
        stage.act_send_info, stage.grad_send_info = {}, None

    def forget_receives(self) -> None:
        """Forget all messages before the next setup: torch would reuse leftovers of a larger step."""
        self.stage.args_recv_info.clear()
        self.stage.grad_recv_info.clear()
        self.stage.grad_send_info = None

    def release_receives(self) -> None:
        for received in (self.stage.args_recv_info, self.stage.grad_recv_info):
            for infos in received.values():
                _empty(infos)

    def is_without_gradients(self, side: Literal["inputs", "outputs"]) -> bool:
        """Whether messages on this side were set up (from torch 2.13 on) without gradients, because all earlier stages
        are frozen."""
        if self.stage.is_first if side == "inputs" else self.stage.is_last:
            return False
        metas = self.metas(side)
        return any(each.dtype.is_floating_point for each in metas) and not any(each.requires_grad for each in metas)

    def give_gradients(self, side: Literal["inputs", "outputs"]) -> None:
        """Exchange gradients from now on for messages on this side that were set up without them."""
        stage, known = self.stage, self.stage._stage_meta
        if any(hasattr(each, "placements") for each in getattr(known, side)):
            raise ValueError(
                f"stage {stage.stage_index} passes DTensors, and parameters were unfrozen: torch learns how gradients"
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
            stage.grad_recv_info = _Received({0: stage._create_grad_recv_info(stage.act_send_info)})
        else:
            known.inputs, known.input_grads = metas, gradients
            infos = tuple(map(copy, stage.args_recv_info[0]))
            for info, meta in zip(infos, metas, strict=True):
                info.tensor_meta = meta
            stage.args_recv_info, stage.grad_send_info = _Received({0: infos}), None

    def require_gradients_of(self, output: Any) -> None:
        """Refuse outputs that need gradients if the messages bring none."""
        if not self.stage.has_backward or self.stage.is_last:
            return
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        for number, (given, meta) in enumerate(zip(outputs, self.metas("outputs"), strict=False)):
            if isinstance(given, Tensor) and given.requires_grad and not meta.requires_grad:
                raise ValueError(
                    f"output {number} of stage {self.stage.stage_index} needs a gradient, but the messages between"
                    " stages were set up for one without: if output_args and input_args are given, give tensors that"
                    " require gradients; if parameters were unfrozen, build the schedule anew on all ranks"
                )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        infos = self.stage.args_recv_info[fwd_chunk_id]
        _allocate(infos, self.stage.device, self.infers_shapes)
        return self._order_by_memory(self._torchs.get_fwd_recv_ops(fwd_chunk_id), infos)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.stage.has_backward or self.stage.is_last:
            return []
        infos = self.stage.grad_recv_info[bwd_chunk_id]
        _allocate(infos, self.stage.device, self.infers_shapes)
        return self._order_by_memory(self._torchs.get_bwd_recv_ops(bwd_chunk_id), infos)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._make_contiguous(self._torchs.get_fwd_send_ops(fwd_chunk_id), self.metas("outputs"))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        metas = [each for each in self.metas("input_grads") if each is not None]
        return self._make_contiguous(self._torchs.get_bwd_send_ops(bwd_chunk_id), metas)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Before torch 2.14 a pipeline begins with a message to every neighbour. gloo has none to the same rank."""
        return [each for each in self._torchs._get_init_p2p_neighbors_ops() if each.peer != dist.get_rank()]

    # torch's list also passes gradients between stages of one rank, which do not exist in evaluation.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return self._torchs.get_local_bwd_output(mb_index) if self.stage.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.stage.has_backward:
            self._torchs.set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _to_tensor(self, arg: Any) -> Any:
        """The value from which torch infers shapes. Targets of microbatches may have any type."""
        as_tensor = self._torchs._to_tensor
        if isinstance(arg, Tensor):
            return as_tensor(arg)
        if hasattr(arg, "to_tensor"):
            with torch.no_grad():
                return as_tensor(arg).zero_()  # uninitialised memory is no valid index
        return tree_map_only(Tensor, as_tensor, arg)

    @property
    def infers_shapes(self) -> bool:
        """Whether torch (from 2.13 on) infers shapes. Both ends of a message then have the same inferred shape."""
        return getattr(getattr(self.stage, "_inference_mode", None), "name", "") == "DYNAMIC"

    def metas(self, kind: str) -> Sequence[Any]:
        """Metadata that torch (from 2.13 on) has for tensors of this kind, the same on both ends."""
        return getattr(getattr(self.stage, "_stage_meta", None), kind, None) or ()

    def _make_contiguous(self, operations: list[Any], metas: Sequence[Any]) -> list[Any]:
        """The sends, contiguous (as backends require) in the dimension order that the receiver expects."""
        self._keep_routes(operations)
        for number, operation in enumerate(operations):
            order = memory_order(metas[number].shape, metas[number].stride) if self.infers_shapes else None
            tensor = operation.tensor if order is None else operation.tensor.permute(order)
            operation.tensor = tensor.contiguous()
        return operations

    def _order_by_memory(self, operations: list[Any], infos: Sequence[Any]) -> list[Any]:
        """The receives, each into its buffer as a contiguous tensor."""
        self._keep_routes(operations)
        for operation in operations:
            buffer = operation.tensor
            if buffer.is_contiguous():
                continue
            if self.infers_shapes and (order := memory_order(buffer.shape, buffer.stride())) is not None:
                operation.tensor = buffer.permute(order)
                continue
            for info in infos:  # a buffer that torch 2.15 allocated
                if info.buffer is buffer:
                    info.buffer = operation.tensor = torch.empty_like(buffer, memory_format=torch.contiguous_format)
        return operations

    def _keep_routes(self, operations: list[Any]) -> None:
        if self.routes is not None:
            self.routes.update((each.op, each.peer, each.group) for each in operations)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        inputs = self._torchs._retrieve_recv_activations(fwd_chunk_id)
        _let_go(self.stage.args_recv_info[fwd_chunk_id])
        if self.stage.has_backward and torch.is_grad_enabled():
            for number, (given, meta) in enumerate(zip(inputs, self.metas("inputs"), strict=False)):
                if meta.requires_grad and not given.requires_grad:
                    raise _make_error(self.stage, fwd_chunk_id, f"cannot give the gradient of its input {number}")
        return inputs

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        # The next stage is on this rank and had no gradient, which torch replaces by zeros.
        for missing in _allocate(self.stage.grad_recv_info[bwd_chunk_id], self.stage.device, self.infers_shapes):
            missing.zero_()
        gradients = self._torchs._retrieve_recv_grads(bwd_chunk_id)
        _let_go(self.stage.grad_recv_info[bwd_chunk_id])
        for number, (given, meta) in enumerate(zip(gradients, self.metas("output_grads"), strict=False)):
            if meta is not None and given is None:
                raise _make_error(self.stage, bwd_chunk_id, f"does not get the gradient of its output {number}")
        return gradients


def post(routes: Iterable[Route], device: torch.device) -> list[dist.Work]:
    """Post a small message on each route, one at a time, as torch's schedules do."""
    posted = [_batch_p2p([dist.P2POp(way, torch.zeros(1, device=device), *ends)]) for way, *ends in routes]
    return [work for works in posted for work in works]


def _make_error(stage: Any, microbatch: int, what: str) -> RuntimeError:
    """The error for a missing gradient. torch would continue with zeros, so all earlier stages' gradients would be
    wrong."""
    return RuntimeError(
        f"stage {stage.stage_index} {what} in microbatch {microbatch}, although the stages were set up to pass it on:"
        " something was left from a step of another kind. Build the schedule anew, and please report this"
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
    """torch's descriptions of a stage's receives per microbatch, each with a meta tensor as its buffer."""

    def __init__(self, known: Mapping[int, tuple[Any, ...]]) -> None:
        super().__init__()
        for microbatch, infos in known.items():
            self[microbatch] = infos

    def __missing__(self, microbatch: int) -> tuple[Any, ...]:
        """Copy microbatch 0's descriptions, because steps may have more microbatches than torch's setup."""
        if not microbatch:
            raise KeyError(microbatch)
        infos = tuple(copy(info) for info in self[0])
        _empty(infos)  # microbatch 0 keeps its own received tensors
        self[microbatch] = infos
        return infos

    def __setitem__(self, microbatch: int, infos: tuple[Any, ...]) -> None:
        for info in infos:
            # torch 2.15 has no buffer here yet. Stage 0's input from the user never has one.
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
    # torch 2.11 reports this at the setup, later versions in F.
    return empty.requires_grad_(buffer.requires_grad)


def _allocate(infos: Iterable[Any], device: torch.device | str, keeps_strides: bool) -> list[Tensor]:
    """Replace placeholders by buffers, optionally with the same strides. Returns the new ones."""
    empty = [info for info in infos if info.buffer is not None and info.buffer is getattr(info, "placeholder", None)]
    for info in empty:
        info.buffer = _make_like(info.placeholder, device, keeps_strides)
    return [info.buffer for info in empty]


def _empty(infos: Iterable[Any]) -> None:
    """Replace buffers by placeholders, also those that torch keeps (from 2.15 on)."""
    for info in infos:
        if hasattr(info, "take_buffer"):
            info.buffer = None
    _let_go(infos)


def _let_go(infos: Iterable[Any]) -> None:
    for info in infos:
        if hasattr(info, "placeholder"):
            info.buffer = info.placeholder


_SETUP = ("_stage_meta", "args_recv_info", "grad_recv_info", "act_send_info", "grad_send_info")
"""Attributes of torch's stage that its setup of messages sets."""


def replace_methods(stage: Any, owner: object, names: Sequence[str]) -> SimpleNamespace:
    """Let `stage` call these methods of `owner`, if it has them. Returns its own ones."""
    own = {name: getattr(stage, name) for name in names if hasattr(stage, name)}
    for name in own:
        setattr(stage, name, getattr(owner, name))
    return SimpleNamespace(**own)


def restore_methods(stage: Any, owner: object, own: SimpleNamespace) -> None:
    """Undo `replace_methods`, except for methods that others have replaced since."""
    for name, method in vars(own).items():
        if vars(stage)[name] == getattr(owner, name):
            delattr(stage, name)
            if getattr(stage, name) != method:
                setattr(stage, name, method)


class _Wait(StrEnum):
    """Actions that torch has from 2.15 on."""

    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"


SEND_OF: dict[Any, _ComputationType] = {
    _Wait.WAIT_SEND_F: _ComputationType.SEND_F,
    _Wait.WAIT_SEND_B: _ComputationType.SEND_B,
}
WAITS_FOR_SENDS = _Wait.WAIT_SEND_F in {each.value for each in _ComputationType}
"""Whether the installed torch has these actions."""
WAIT_KINDS: dict[str, Any] = {each.value: each for each in _Wait}
"""Kinds of waits by name, for a schedule with `keep_sends`."""


def keep_sends(runtime: Any) -> None:
    """Let `runtime` keep its sends for the waits in its list, instead of torch's wait for all at the step's end."""
    runtime.sends_under_way = {}
    runtime._comp_type_to_function_map.update(dict.fromkeys(SEND_OF.values(), _send))


def _send(action: _Action, context: Any) -> None:
    runtime, kind = context.schedule_ref, action.computation_type
    stage = next(each for each in runtime._stages if each.stage_index == action.stage_index)
    operations = stage.get_fwd_send_ops if kind is _ComputationType.SEND_F else stage.get_bwd_send_ops
    runtime.sends_under_way[action] = _batch_p2p(operations(action.microbatch_index))
