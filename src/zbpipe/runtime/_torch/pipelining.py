"""torch.distributed.pipelining: its schedules, stages and actions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelining_schedules
from torch.distributed.pipelining import stage as pipelining_stage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    ScheduleZBVZeroBubble,
    _Action,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from zbpipe.runtime._torch import fsdp_overlap
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.autograd import tree_map_only
from zbpipe.runtime._torch.buffers import (
    WAIT_KINDS,
    WAITS_FOR_SENDS,
    ReceivesOnDemand,
    release_receives,
    wait_for_sends,
)
from zbpipe.runtime._torch.fsdp import is_fsdp
from zbpipe.runtime._torch.hooks import HookOrder, Routed, hook
from zbpipe.runtime._torch.place import Place, Receives
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.actions import Action, Rows

PipelineSchedule = _PipelineSchedule

ScheduleRuntime = _PipelineScheduleRuntime
"""torch's schedule that takes a list of computations, adds sends, receives and unshards, and runs it."""

Stage = _PipelineStageBase

_NO_OPTIONS = {"self", "stages", "n_microbatches", "defer_pp_recv"}
SCHEDULE_OPTIONS = frozenset(inspect.signature(ScheduleZBVZeroBubble.__init__).parameters) - _NO_OPTIONS
"""Keyword arguments of the installed torch's multi-stage schedules. zbpipe places the receives itself."""

TAKES_MICROBATCHES = hasattr(_PipelineSchedule, "_get_microbatch_inputs")
"""Whether torch's `step` also takes lists of microbatches (from 2.14 on)."""

_SETS_UP_ANEW = hasattr(_PipelineSchedule, "_initialize_pp_stages")
"""Whether torch (from 2.13 on) sets up messages again between training and evaluation."""


class OwnRuntime(_PipelineScheduleRuntime):
    """Base class of zbpipe's schedules: torch's runtime, with public names for the private methods to override."""

    def __init__(self, stages: Sequence[_PipelineStageBase], *args: Any, **kwargs: Any) -> None:
        for stage in stages:
            own(stage)
        super().__init__(stages, *args, **kwargs)  # type: ignore[no-untyped-call]
        self.own_stages = cast(list[OwnStage], self._stages)
        self._has_backward = True  # `step` is a training step even without a loss_fn; torch would treat it as `eval`
        self.place = Place()
        self.fwd_recv_ops, self.bwd_recv_ops = Receives(self.place), Receives(self.place)
        if not WAITS_FOR_SENDS:
            wait_for_sends(self)

    def finish_optimizer_step(self) -> None:
        """Wait until an earlier optimizer step is complete."""

    def initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Infer shapes by torch's run of the stages, before the first step and between training and evaluation."""
        if _SETS_UP_ANEW and self._stages_forward_initialized:
            for stage in self.own_stages:
                stage.forget_receives()
        super()._initialize_stages(*args, **kwargs)

    def run_microbatches(self, args: Any, kwargs: Any, targets: Any, *more: Any, **more_by_name: Any) -> None:
        """Run one step on already split microbatches."""
        for stage in self.own_stages:
            stage.is_reduced = getattr(self, "_finalize_gradients", True)  # an argument of steps from torch 2.15 on
        with ExitStack() as around:
            around.enter_context(self.place.follow(self))
            for stage in self.own_stages:
                if stage.reshards:
                    around.enter_context(fsdp_overlap.resharding(stage.submod))
            super()._step_microbatches(args, kwargs, targets, *more, **more_by_name)
        for stage in self.own_stages:
            stage.finish_reduction()

    def _assert_unsharded(self, stage: Any) -> None:
        action = self.place.action
        if action and action.computation_type is _ComputationType.FORWARD and stage.overlaps_fsdp:
            stage.gathering = self.unshard_ops.pop(stage.stage_index, ())
            if stage.gathering:
                self.unsharded_stages.add(stage.stage_index)
        super()._assert_unsharded(stage)

    def load_table(self, file: str) -> None:
        """Run the computations of a CSV file from the next step on."""

    def _load_csv(self, filename: str, format: str = "compute_only") -> None:
        self.load_table(filename)

    def _dump_csv(self, filename: str, format: str = "compute_comms") -> None:
        # torch before 2.15 would read a wait for a send as a W. Without such actions it waits for all sends at the end.
        lists = self.pipeline_order_with_comms
        known = {rank: [each for each in row if isinstance(each[1], _ComputationType)] for rank, row in lists.items()}
        with replaced(self, pipeline_order_with_comms=known):
            super()._dump_csv(filename, cast(Any, format))

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        self.initialize_stages(*args, **kwargs)

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        self.run_microbatches(arg_mbs, kwarg_mbs, target_mbs, *args, **kwargs)


class OwnStage(ReceivesOnDemand):
    """A stage that receives on demand, frees the loss's graph, sends nothing to its own rank, and supports evaluation.

    Mixed in before the class of an existing stage.
    """

    is_reduced = True
    """Whether the running step reduces FSDP2's gradients, or leaves that to a later one."""
    fsdp_mode: fsdp_overlap.FsdpMode = "overlap"
    gathering: Sequence[Any] = ()
    """FSDP2's modules that the running F waits for, each when it needs it."""
    is_reducing = False
    """Whether the last W or B of this step has started FSDP2's reductions."""
    _scale = 1
    """Divisor of the reduced gradients."""
    frozen: tuple[tuple[dict[str, Any], str], ...] = ()
    """Parameters, by dictionary and name, that were frozen when torch set up its messages."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(*args, **kwargs)
        self.finish_gathering()
        if self.has_backward and not self.is_last:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            for number, (given, meta) in enumerate(zip(outputs, self.metas("outputs"), strict=False)):
                if isinstance(given, Tensor) and given.requires_grad and not meta.requires_grad:
                    raise ValueError(
                        f"output {number} of stage {self.stage_index} needs a gradient, but the messages between stages"
                        " were set up for one without: if output_args and input_args are given, give tensors that"
                        " require gradients; if parameters were unfrozen, build the schedule anew on all ranks"
                    )
        return output

    def forget_step(self) -> None:
        """Reset the stage to its state before a step that does not count."""
        self.finish_gathering()
        self.clear_runtime_states()
        for left in (self.bwd_cache, self.backward_state, self.dw_runner):
            left.clear()
        release_receives(self)

    def clear_runtime_states(self) -> None:
        self.is_reducing = False
        super().clear_runtime_states()

    @property
    def overlaps_fsdp(self) -> bool:
        """Whether FSDP2 gathers beside the first F."""
        return self.fsdp_mode != "torch" and fsdp_overlap.IS_KNOWN and is_fsdp(self.submod)

    @property
    def reshards(self) -> bool:
        """Whether FSDP2 gathers a module for each F and each backward, and frees it after it."""
        return self.fsdp_mode == "reshard" and self.overlaps_fsdp

    def finish_gathering(self) -> None:
        """Wait for the modules that no F has waited for."""
        for each in self.gathering:
            each.wait()
        self.gathering = ()

    @property
    def reduces_early(self) -> bool:
        """Whether FSDP2 starts to reduce gradients in the last W or B."""
        # A framework may set its own backward after the schedule was built.
        return self.overlaps_fsdp and self.is_reduced and not has_own_backward(self) and not has_own_reduction(self)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full" or not (last_backward and self.reduces_early):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        # torch forbids FSDP2's hooks to reduce in any backward, and waits at the end of each.
        self.is_reducing = True
        tensors = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        with fsdp_overlap.reducing_backward(self.submod):
            return stage_backward(*tensors), None

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.is_last and self.has_backward:
            _scalar(loss)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # torch's schedule keeps every loss until the end of the step, and the loss's graph would keep the stage's
        # input. (The I of torch's own split leaves the graph for W.)
        if full_backward and loss is not None and not loss._is_view():
            loss.detach_()

    @property
    def is_unfrozen(self) -> bool:
        """Whether the stage trains a parameter that was frozen when torch set up its messages."""
        return any((parameter := own.get(name)) is not None and parameter.requires_grad for own, name in self.frozen)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        owners = [part._parameters for part in self.submod.modules()]
        self.frozen = tuple(
            (own, name) for own in owners for name, each in own.items() if each is not None and not each.requires_grad
        )
        if loss_fn := kwargs.get("loss_fn"):
            kwargs["loss_fn"] = lambda *args, **kwargs: _scalar(loss_fn(*args, **kwargs))
        return super()._prepare_backward_infra(*args, **kwargs)  # type: ignore[safe-super, unused-ignore]

    def _to_tensor(self, arg: Any) -> Any:
        """The value from which torch infers shapes. Targets of single microbatches may have any type."""
        as_tensor = super()._to_tensor  # type: ignore[misc, unused-ignore]
        if isinstance(arg, Tensor):
            return as_tensor(arg)
        if hasattr(arg, "to_tensor"):
            with torch.no_grad():
                return as_tensor(arg).zero_()  # as integers, what is left in memory is no valid index
        return tree_map_only(Tensor, as_tensor, arg)

    # torch's list of actions is the same in evaluation, which must not scale gradients of earlier steps.

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # The other stages of the rank may still have to compute, and the end of the reduction can wait for them.
        if self.is_reducing:
            self._scale = grad_scale_factor
        elif self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)  # type: ignore[no-untyped-call, unused-ignore]

    # torch 2.15 calls these two in place of `perform_reduce_grad`.

    def start_gradient_reduction(self) -> None:
        if not self.is_reducing:
            cast(Any, super()).start_gradient_reduction()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        if self.is_reducing:
            self._scale = grad_scale_factor
        else:
            cast(Any, super()).wait_for_gradient_reduction(grad_scale_factor)

    def finish_reduction(self) -> None:
        """Wait for a reduction that the stage's last W or B has started, at the end of the step."""
        if not self.is_reducing:
            return
        self.is_reducing = False
        fsdp_overlap.finish(self.submod)
        if self._scale != 1:
            self.scale_grads(self._scale)

    def scale_grads(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().scale_grads(grad_scale_factor)

    # It also passes gradients between stages of one rank, which do not exist in evaluation.

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        if not self.has_backward:
            return ()
        return cast(tuple[Tensor | None, ...], super().get_local_bwd_output(mb_index))  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Before torch 2.14 a pipeline begins with a message to every neighbour. gloo cannot send one to the same
        rank."""
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc, unused-ignore]
        return [operation for operation in operations if operation.peer != dist.get_rank()]


class StageOfKnownShapes(PipelineStage):
    """A stage with `input_args` and `output_args` in a process group whose other ranks are fake. It receives zeros."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _fill_with_zeros(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _fill_with_zeros(super().get_bwd_recv_ops(bwd_chunk_id))

    # torch 2.13 asks all ranks whether their shapes are known; later versions ask no fake ones.

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones(1)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones(1)


def _fill_with_zeros(receives: list[dist.P2POp]) -> list[dist.P2POp]:
    with torch.no_grad():
        for each in receives:
            each.tensor.zero_()
    return receives


def _scalar(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise ValueError(
        f"loss_fn returned {found}, but training needs a tensor with a single number: return the loss alone, as"
        " loss.mean() or loss.sum(), and keep other values in a list of your own (loss_fn is called once a microbatch,"
        " and once before the first step)"
    )


def own(stage: _PipelineStageBase) -> None:
    """Give `stage` the methods of `OwnStage`, unless it has them."""
    if not isinstance(stage, OwnStage):
        # The stage is the caller's object, so this changes its class instead of wrapping it, as fully_shard does.
        stage.__class__ = _own_class(type(stage))
        cast(OwnStage, stage).receive_on_demand()


@cache
def _own_class(stage_class: type[_PipelineStageBase]) -> type[_PipelineStageBase]:
    return type(stage_class.__name__, (OwnStage, stage_class), {"__module__": __name__})


def device_of(stage: _PipelineStageBase) -> torch.device:
    """The device of a stage, which torch may keep as a name."""
    return torch.device(stage.device)


def torch_class(name: str) -> type[_PipelineSchedule]:
    """torch's class for a torch schedule name."""
    return cast(type[_PipelineSchedule], get_schedule_class(name))


def lower(runtime: _PipelineScheduleRuntime, schedule: Schedule) -> None:
    """Load `schedule` into torch, which checks the order, adds the communication and keeps both lists."""
    runtime.pipeline_order = {rank: [_action(*op) for op in ops] for rank, ops in enumerate(schedule)}
    with replaced(pipelining_schedules, _add_unshard_reshard=_gather):
        runtime._prepare_schedule_with_comms(runtime.pipeline_order)


def _gather(row: list[_Action | None], max_active_stages: int = 3, **more: Any) -> list[_Action]:
    """Torch's actions for `row`, in time that is not quadratic in its length."""
    # torch looks ahead until it has seen the maximum number of active stages, or to the end of the row if the rank has
    # fewer.
    own = len({action.stage_index for action in row if action})
    more = {name: min(number, own) for name, number in more.items()}
    return _add_unshard_reshard(row, min(max_active_stages, own), **more)


Lists = tuple[dict[int, list[_Action | None]], dict[int, list[_Action]]]
"""The actions of all ranks: computations alone, and with communication."""


def use_lists(runtime: _PipelineScheduleRuntime, lists: Lists) -> None:
    """Make `runtime` run these lists, which an earlier `lower` made, from the next step on."""
    runtime.pipeline_order, runtime.pipeline_order_with_comms = lists


def rows_of(runtime: _PipelineScheduleRuntime) -> Rows:
    """All ranks' actions with torch's communication. Overlapped actions become two consecutive ones."""
    return tuple(
        tuple(_find_action(part) for action in row for part in action.sub_actions or (action,))
        for _, row in sorted(runtime.pipeline_order_with_comms.items())
    )


def use_rows(runtime: _PipelineScheduleRuntime, rows: Rows) -> None:
    """Make `runtime` run its `rows_of`, without overlapped actions, in another order, or with waits for sends."""
    runtime.pipeline_order_with_comms = dict(enumerate(map(actions_of, rows)))


def actions_of(row: Iterable[Action]) -> list[_Action]:
    """torch's actions, with waits for sends also where torch (before 2.15) has none."""
    return [_action(*each) for each in row]


def write_lowered(runtime: _PipelineScheduleRuntime) -> str:
    """All ranks' actions with the communication that torch added, as torch's CSV."""
    return "\n".join(",".join(map(str, row)) for _, row in sorted(runtime.pipeline_order_with_comms.items()))


@contextmanager
def saved_from_scaling(runtime: _PipelineScheduleRuntime, kept: Sequence[Tensor]) -> Iterator[None]:
    """Context of a step that multiplies `kept` gradients by the number of microbatches, by which the step's end divides
    all."""
    # Just before the step adds to them, so that a step that fails earlier does not change them. A separate copy would
    # double their memory. Dividing the loss instead would miss the gradients of a loss with its own backwards, and
    # round differently from torch's schedules.
    left = list(kept)
    last = runtime._num_stages - 1

    def save_first(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        if left and (kind != "F" or stage == last):
            with torch.no_grad():
                for each in left:
                    each.mul_(runtime._n_microbatches)
            left.clear()
        return compute()

    with hook(runtime, HookOrder.SCALE, save_first) if kept else nullcontext():
        yield


def run_forward(stage: _PipelineStageBase, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the stage's module in the context of torch's forward of that microbatch; returns the output."""
    if not getattr(stage, "_forward_contexts", None):  # torch before 2.15 has none
        return stage.forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
    known = cast(Any, pipelining_stage)
    info = known.PipelineStageInfo(stage_index=stage.stage_index, microbatch_index=microbatch)
    return cast(Any, stage)._call_with_forward_context(info, stage.forward_maybe_with_nosync, *args, **kwargs)


def run_backward(
    stage: _PipelineStageBase, outputs: Any, output_grads: Any, inputs: Sequence[Any]
) -> Sequence[Tensor | None]:
    """Run a full backward of the stage's module as torch does; returns the inputs' gradients (or None)."""
    # It begins with the module's outputs and their gradients, or with the loss and None. FSDP2 does not reduce.
    if output_grads is not None:
        outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    tensors = {"stage_output": outputs, "output_grads": output_grads, "input_values": inputs}
    gradients, _ = stage.backward_maybe_with_nosync("full", tensors)
    return cast(Sequence[Tensor | None], gradients)


def loss_of(schedule: _PipelineSchedule, output: Any, target: Any, loss_kwargs: Mapping[str, Any] | None) -> Tensor:
    """The loss of one microbatch, as torch computes it."""
    # torch before 2.13 passes the loss no arguments by name.
    further = () if loss_kwargs is None else (loss_kwargs,)
    return cast(Tensor, cast(Any, schedule)._compute_loss(output, target, *further))


def zeros_for(stage: _PipelineStageBase) -> tuple[Tensor, ...] | None:
    """Zeros in the shapes of the inputs of `stage`; None if torch (before 2.13) does not know the shapes."""
    metas = getattr(getattr(stage, "_stage_meta", None), "inputs", None)
    if metas is None or not isinstance(stage, PipelineStage):
        return None
    return tuple(stage._to_tensor(meta) for meta in metas)


def has_split_backward(runtime: _PipelineScheduleRuntime) -> bool:
    """Whether any rank runs the actions I and W."""
    actions = (action for row in runtime.pipeline_order.values() for action in row)
    return any(action and action.computation_type is _ComputationType.BACKWARD_WEIGHT for action in actions)


def timeout_of(stage: _PipelineStageBase) -> float | None:
    """The present message timeout of `stage` in seconds; None if the backend does not report it."""
    try:
        backend = (stage.group or dist.group.WORLD)._get_backend(device_of(stage))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """The key-value store of the job's process group; None if there is no group."""
    return _get_default_store() if dist.is_initialized() else None


def has_store() -> bool:
    """Whether the job's key-value store ends with this process. torchrun's store outlives it."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, dist.TCPStore) and dist.get_rank() == 0 and dist.get_world_size() > 1 and not has_agent


def receives_late(schedule: _PipelineSchedule) -> bool:
    """Whether torch itself was asked to post receives late."""
    return bool(getattr(schedule, "_defer_pp_recv", False))


def num_microbatches(schedule: _PipelineSchedule) -> int:
    """The number of microbatches in a step."""
    return schedule._n_microbatches


def use_microbatches(schedule: _PipelineScheduleRuntime, number: int) -> None:
    """Run this number of microbatches in the next step. Its lists have to be for the same number."""
    schedule._n_microbatches = number
    for stage in schedule._stages:
        if stage.chunks is not None:
            stage.chunks = number


def is_set_up(schedule: _PipelineScheduleRuntime) -> bool:
    """Whether the messages of the next step, training or evaluation, are set up."""
    return schedule._stages_forward_initialized and schedule._stages_backward_initialized == schedule._has_backward


Shapes = tuple[bool, bool, list[dict[str, Any]]]
"""torch's setup for microbatches of some shapes: whether forward and backward are set up, and each stage's part."""

_OF_SHAPES = ("frozen", "_stage_meta", "args_recv_info", "grad_recv_info", "act_send_info", "grad_send_info")


def shapes_of(schedule: _PipelineScheduleRuntime) -> Shapes:
    """The setup for the shapes of the last step."""
    stages = [{name: getattr(stage, name) for name in _OF_SHAPES} for stage in schedule._stages]
    return schedule._stages_forward_initialized, schedule._stages_backward_initialized, stages


def use_shapes(schedule: _PipelineScheduleRuntime, shapes: Shapes) -> None:
    """Restore a setup returned by `shapes_of`."""
    schedule._stages_forward_initialized, schedule._stages_backward_initialized, stages = shapes
    for stage, known in zip(schedule._stages, stages, strict=True):
        vars(stage).update(known)


@contextmanager
def keeping_buffers(stage: _PipelineStageBase) -> Iterator[None]:
    """Context of torch's inference of shapes that restores the buffers of `stage`.

    torch restores them from 2.14 on, but not those that a forward replaces.
    """
    is_done_by_torch = hasattr(stage, "_pre_metadata_inference_backup")
    buffers = () if is_done_by_torch else stage.submod.buffers()
    kept = [(each, each.clone()) for each in buffers if not each.is_inference()]
    owners = [(part._buffers, part._buffers.copy()) for part in stage.submod.modules()]
    try:
        yield
    finally:
        for owner, own in owners:
            owner.update(own)
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def forget_shapes(schedule: OwnRuntime) -> None:
    """Make torch infer all shapes in the next step, as in the first one."""
    schedule._stages_forward_initialized = schedule._stages_backward_initialized = False
    for stage in schedule.own_stages:
        stage.forget_shapes()


def can_infer_shapes(schedule: OwnRuntime) -> bool:
    """Whether torch (from 2.13 on) has inferred the shapes of all stages on all ranks; otherwise the user gave them."""
    return all(stage.infers_shapes for stage in schedule.own_stages)


def trains(schedule: _PipelineSchedule) -> bool:
    """Whether the present or next step has backwards, unlike `eval`."""
    return bool(cast(Any, schedule)._has_backward)


def needs_autograd(schedule: _PipelineSchedule) -> bool:
    """Whether autograd runs the backwards, which is the default."""
    return bool(getattr(schedule, "_backward_requires_autograd", True))


def loss_fn_of(schedule: _PipelineSchedule) -> Callable[..., Any] | None:
    """The loss function passed to the schedule, perhaps wrapped."""
    return schedule._loss_fn


def input_shapes(runtime: _PipelineScheduleRuntime) -> list[torch.Size] | None:
    """The shapes of stage 0's microbatches, on its rank, for which torch has set up all messages; None before that."""
    # After the setup torch does not check shapes. With gloo a smaller tensor silently fills a part of the receiver's,
    # and a larger one ends the process.
    first: Any = runtime._stages[0]
    # torch 2.11 keeps them on the stage itself.
    inputs = first._stage_meta.inputs if hasattr(first, "_stage_meta") else first.inputs_meta
    if not is_set_up(runtime) or inputs is None:
        return None
    return [meta.shape for meta in inputs]


def what_it_runs(schedule: _PipelineSchedule) -> str:
    """A text that is equal on two ranks that run the same table on the same number of microbatches."""
    table = write_lowered(schedule) if isinstance(schedule, _PipelineScheduleRuntime) else type(schedule).__name__
    return repr((table, schedule._n_microbatches, schedule.scale_grads))


_TYPES: dict[str, _ComputationType] = {**WAIT_KINDS, **{each.value: each for each in _ComputationType}}
"""Computation types by their names in torch's tables."""


def _action(stage: int, kind: str, microbatch: int) -> _Action:
    return _Action(stage, _TYPES[kind], None if microbatch < 0 else microbatch)


def _find_action(action: _Action) -> Action:
    stage, kind, microbatch, *_ = action
    return Action(stage, kind._value_, -1 if microbatch is None else microbatch)  # `value` doubles the time


def has_own_backward(stage: Stage) -> str:
    """Name of the framework's function that replaces the stage's backward; empty for torch's own."""
    own: Any = vars(stage).get("backward_maybe_with_nosync")
    if isinstance(own, Routed):
        (own,) = own.args
    is_torchs = own is None or own == type(stage).backward_maybe_with_nosync.__get__(stage)
    return "" if is_torchs else getattr(own, "__qualname__", repr(own))


def has_own_reduction(stage: Stage) -> bool:
    """Whether a framework or a user replaces what torch does in REDUCE_GRAD."""
    own = "perform_reduce_grad"
    owners = (each for each in type(stage).__mro__ if own in vars(each) and not issubclass(each, OwnStage))
    return own in vars(stage) or next(owners) is not _PipelineStageBase


def overlaps_fsdp(schedule: _PipelineSchedule) -> bool:
    """Whether FSDP2's collectives run beside computations in a training step, if there are any."""
    return isinstance(schedule, OwnRuntime) and all(
        stage.reduces_early for stage in schedule.own_stages if is_fsdp(stage.submod)
    )


def end_backward(stage: Stage, is_last: bool) -> None:
    """Call a framework's backward after a W, for the work that follows a W."""
    stage.backward_maybe_with_nosync("weight", {"stage_output": (), "param_groups": []}, last_backward=is_last)
