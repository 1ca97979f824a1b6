"""Messages of a stage. Received tensors live from their receive to their last use, sent tensors until they arrive.

torch 2.15 does this by itself. Older versions allocate the receive buffers of all microbatches at once, for the whole
job, and keep sent tensors until the end of the step: up to 4 m messages each way on a rank with two stages.
`zbpipe.simulator.passes.messages_held` counts the messages held with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.autograd import tree_map_only
from zbpipe.runtime._torch.shapes import ShapeFunction, Shapes, StepShapes, describe, write

Route = tuple[Callable[..., Any], int, Any]
"""The route of a message between two ranks: `dist.isend` or `dist.irecv`, the peer's global rank, and the group."""


class StageMessages:
    """The messages of a stage: their setup and their buffers. Supports evaluation. A receive buffer lives from the
    receive to the stage's F, I or B. Nothing is sent to the same rank."""

    METHODS = (
        *("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"),
        *("get_local_bwd_output", "set_local_bwd_input", "_retrieve_recv_activations", "_retrieve_recv_grads"),
        *("_to_tensor", "_get_init_p2p_neighbors_ops", "_prepare_forward_infra"),
    )
    """Methods of torch's stage that this object replaces."""

    def __init__(self, stage: _PipelineStageBase) -> None:
        self.stage: Any = stage
        self._torchs = replace_methods(stage, self, self.METHODS)
        self.set_up_by: int | None = None
        """Id of the schedule that has set them up; None for one of torch's own."""
        self._frozen: Sequence[tuple[dict[str, Any], str]] = ()
        """Parameters that were frozen when torch set up the messages, by dictionary and name."""
        self.routes: set[Route] | None = None
        """Routes of all messages, if set to an empty set; None to keep none."""
        self.input_shapes, self.output_shapes = ShapeFunction(), ShapeFunction()
        self._step: StepShapes | None = None
        """Shapes of the running step, if they differ from torch's setup."""
        self._validates = getattr(stage, "_runtime_validate", False)
        self._next: StageMessages | None = None
        """Messages of the next stage, if that is on this rank."""
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

    def follow(self, step: StepShapes | None, then: StageMessages | None) -> None:
        """Exchange messages of these shapes in the next step, None for those of torch's setup. `then` has the messages
        of the next stage, if that is on this rank."""
        if step is None and self._step is None:
            return
        self.stage.args_recv_info.clear()
        self.stage.grad_recv_info.clear()
        self._step, self._next = step, then
        if hasattr(self.stage, "_runtime_validate"):  # of shapes, for a debug level of torch.distributed
            self.stage._runtime_validate = self._validates and step is None

    def learn_last_step(self) -> None:
        """Learn the shapes that were not known in the last step, which is over and was not void."""
        for function in (self.input_shapes, self.output_shapes):
            function.learn_noted()

    def learn_setup(self, inputs: Shapes) -> None:
        """Learn the shapes that torch has set up for this input."""
        self.input_shapes.learn(inputs, _of_metas(self.metas("inputs")))
        self.output_shapes.learn(inputs, _of_metas(self.metas("outputs")))

    def take_output(self, microbatch: int, output: Any) -> None:
        """Prepare messages for this output of F, if its shape may differ from torch's setup.

        Raises:
            ValueError: another output was expected.
        """
        stage, step = self.stage, self._step
        if step is None or stage.is_last:
            return
        found = describe(output if isinstance(output, (tuple, list)) else (output,))
        if self._next is not None:
            self._next._resize("args_recv_info", microbatch, found)
        else:
            inputs, function = step.inputs[microbatch], self.output_shapes
            known = function(inputs)
            expected = known or function.find_noted(inputs) or found
            if found != expected or len(found) != len(self.metas("outputs")):
                raise ValueError(
                    f"stage {stage.stage_index} gives {write(found)} in microbatch {microbatch}, whose input is"
                    f" {write(inputs)}, where other microbatches lead to {write(expected)}: the shapes of a stage's"
                    " output have to follow from the shapes of the pipeline's input, each dimension linearly"
                )
            if known is None:
                function.note(microbatch, inputs, found)
                step.give(f"shapes/{stage.stage_index}/{microbatch}", found)
        if stage.has_backward:
            self._resize("grad_recv_info", microbatch, found)

    def _resize(self, name: str, microbatch: int, shapes: Shapes) -> None:
        """Receive tensors of these shapes for a microbatch."""
        received: _Received = getattr(self.stage, name)
        for info, (shape, dtype) in zip(received[microbatch], shapes, strict=True):
            if info.tensor_meta is not None:  # an output without a gradient
                info.tensor_meta = self._like(info.tensor_meta, shape, dtype)
                if info.buffer is not None:
                    meta = info.tensor_meta
                    empty = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
                    info.buffer = info.placeholder = empty.requires_grad_(info.placeholder.requires_grad)

    def _like(self, meta: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """torch's metadata, with another shape in the same order of dimensions."""
        more, whole = {}, torch.Size(shape)
        if hasattr(meta, "placements"):
            more = {"global_shape": whole, "global_stride": _strides(whole, meta.global_shape, meta.global_stride)}
            mesh = self.stage._mesh_cache.get_mesh(meta.mesh_cache_key)
            whole = torch.Size(compute_local_shape_and_global_offset(whole, mesh, meta.placements)[0])
        strides = _strides(whole, meta.shape, meta.stride)
        return replace(meta, shape=whole, stride=strides, dtype=getattr(torch, dtype), **more)

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
            infos = tuple(map(copy, stage.args_recv_info.first))
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
        if (step := self._step) is not None:
            inputs, before = step.inputs[fwd_chunk_id], self.stage.stage_index - 1
            shapes = self.input_shapes(inputs)
            if shapes is None:
                shapes = step.take(f"shapes/{before}/{fwd_chunk_id}", self.stage.stage_index_to_group_rank[before])
                self.input_shapes.note(fwd_chunk_id, inputs, shapes)
            self._resize("args_recv_info", fwd_chunk_id, shapes)
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
        with nullcontext() if self._step is None else self._sending_zeros_like(bwd_chunk_id):
            return self._make_contiguous(self._torchs.get_bwd_send_ops(bwd_chunk_id), metas)

    def _sending_zeros_like(self, microbatch: int) -> AbstractContextManager[None]:
        """Context in which torch sends zeros of this microbatch's shapes for missing gradients."""
        pairs = zip(self.stage.args_recv_info[microbatch], self.metas("input_grads"), strict=False)
        gradients = tuple(each and self._like(each, *_of_metas([info.tensor_meta])[0]) for info, each in pairs)
        return replaced(self.stage, _stage_meta=replace(self.stage._stage_meta, input_grads=gradients))

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Before torch 2.14 a pipeline begins with a message to every neighbour. gloo has none to the same rank."""
        return [each for each in self._torchs._get_init_p2p_neighbors_ops() if each.peer != dist.get_rank()]

    # torch's list also passes gradients between stages of one rank, which do not exist in evaluation.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return self._torchs.get_local_bwd_output(mb_index) if self.stage.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.stage.has_backward:
            self._torchs.set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self.set_up_by = None
        return self._torchs._prepare_forward_infra(*args, **kwargs)

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

    first: tuple[Any, ...] = ()
    """Descriptions that torch set up for microbatch 0."""

    def __init__(self, known: Mapping[int, tuple[Any, ...]]) -> None:
        super().__init__()
        for microbatch, infos in known.items():
            self[microbatch] = infos

    def __missing__(self, microbatch: int) -> tuple[Any, ...]:
        """Copy microbatch 0's descriptions, because steps may have more microbatches than torch's setup."""
        if not self.first:
            raise KeyError(microbatch)
        infos = tuple(map(copy, self.first))
        super().__setitem__(microbatch, infos)
        return infos

    def __setitem__(self, microbatch: int, infos: tuple[Any, ...]) -> None:
        for info in infos:
            # torch 2.15 has no buffer here yet. Stage 0's input from the user never has one.
            if isinstance(getattr(info, "buffer", None), Tensor):
                info.buffer = info.placeholder = _make_like(info.buffer, "meta")
        if not microbatch:
            self.first = tuple(map(copy, infos))
        super().__setitem__(microbatch, infos)


def _of_metas(metas: Iterable[Any]) -> Shapes:
    """Shapes and dtypes of torch's metadata, of DTensors those of the whole tensor."""
    return tuple((tuple(getattr(each, "global_shape", each.shape)), str(each.dtype)[6:]) for each in metas)


def _strides(shape: Sequence[int], like: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor with its dimensions in the order of a tensor `like` that."""
    order = memory_order(tuple(like), tuple(strides)) or tuple(range(len(shape)))
    empty = torch.empty([shape[dim] for dim in order], device="meta")
    return empty.permute([order.index(dim) for dim in range(len(order))]).stride()


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
