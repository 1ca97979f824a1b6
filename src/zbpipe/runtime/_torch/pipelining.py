"""torch.distributed.pipelining: its schedules, stages and actions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelining_schedules
from torch.distributed.pipelining import stage as pipelining_stage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    _Action,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from zbpipe.runtime._torch import autograd, fsdp2
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.fsdp2 import is_fsdp
from zbpipe.runtime._torch.messages import WAIT_KINDS, WAITS_FOR_SENDS, keep_sends
from zbpipe.runtime._torch.position import Position, Receives, Row
from zbpipe.runtime._torch.stage_work import OwnWork, own
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.actions import Action, Rows
from zbpipe.simulator.simulation import RunAhead
from zbpipe.simulator.time_graph import Overlap

PipelineSchedule = _PipelineSchedule

ScheduleRuntime = _PipelineScheduleRuntime
"""torch's schedule class that adds sends, receives and unshards to a list of computations, and runs it."""

Stage = _PipelineStageBase

_NO_OPTIONS = {"self", "stages", "n_microbatches", "defer_pp_recv"}
SCHEDULE_OPTIONS = frozenset(inspect.signature(ScheduleZBVZeroBubble.__init__).parameters) - _NO_OPTIONS
"""Keyword arguments of the installed torch's multi-stage schedules. zbpipe places the receives."""

STEP_OPTIONS = frozenset(inspect.signature(_PipelineScheduleRuntime.step).parameters) - {"self", "args", "kwargs"}
"""Keyword arguments of the installed torch's `step` besides the model's."""

TAKES_MICROBATCHES = hasattr(_PipelineSchedule, "_get_microbatch_inputs")
"""Whether torch's `step` also takes lists of microbatches (from 2.14 on)."""

_SETS_UP_ANEW = hasattr(_PipelineSchedule, "_initialize_pp_stages")
"""Whether torch (from 2.13 on) sets up messages again between training and evaluation."""


class OwnRuntime(_PipelineScheduleRuntime):
    """Base class of zbpipe's schedules: torch's runtime, with public names for the private methods to override."""

    optimizer_step: Any = None
    """The `zbpipe.OptimizerStep` that validates this schedule's gradients."""

    def __init__(
        self,
        stages: Sequence[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        for stage in stages:
            own(stage)
        loss_fn = loss_fn and _require_scalars(loss_fn, stages[-1])
        super().__init__(stages, n_microbatches, loss_fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        self._has_backward = True  # `step` trains even without a loss_fn, which torch would treat as `eval`
        self.position = Position()
        self.fwd_recv_ops, self.bwd_recv_ops = Receives(self.position), Receives(self.position)
        if not WAITS_FOR_SENDS:
            keep_sends(self)

    @property
    def works(self) -> list[OwnWork]:
        return [own(stage) for stage in self._stages]

    def finish_optimizer_step(self) -> None:
        if self.optimizer_step is not None:
            self.optimizer_step.finish()

    def initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Infer shapes with torch, before the first step and between training and evaluation."""
        if not _set_up_last(self):
            self._stages_forward_initialized = self._stages_backward_initialized = False
        for work in self.works:
            if _SETS_UP_ANEW or not self._stages_forward_initialized:
                work.messages.forget_receives()
            if self._has_backward:
                work.messages.begin_setup()
        super()._initialize_stages(*args, **kwargs)
        for work in self.works:
            work.messages.set_up_by = id(self)

    def run_microbatches(self, args: Any, kwargs: Any, targets: Any, *more: Any, **more_by_name: Any) -> None:
        works = self.works
        row = self.pipeline_order[self.rank]
        with ExitStack() as around:
            around.enter_context(self.position.follow(self))
            if not autograd.profiler_is_on():
                around.enter_context(_without_ranges())
            for work in works:
                index, b, w = work.stage.stage_index, _ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT
                work.whole = frozenset(each[2] for each in row if each and each[:2] == (index, b))
                adding = [each for each in row if each and each[:2] in ((index, b), (index, w))]
                work.left = dict.fromkeys(cast(int, each[2]) for each in adding)
                work.is_reduced = getattr(self, "_finalize_gradients", True)  # an argument of steps from torch 2.15 on
                if work.reshards:
                    around.enter_context(fsdp2.resharding(work.stage.submod))
            super()._step_microbatches(args, kwargs, targets, *more, **more_by_name)
        for work in works:
            work.finish_reduction()

    def merge_outputs(self, outputs: list[Any]) -> Any:
        """What `step` returns of the last stage's outputs of all microbatches."""
        return super()._merge_outputs(outputs)

    def _assert_unsharded(self, stage: Any) -> None:
        action, work = self.position.action, own(stage)
        if action and action.computation_type is _ComputationType.FORWARD and work.overlaps_fsdp:
            work.gathering = self.unshard_ops.pop(stage.stage_index, ())
            if work.gathering:
                self.unsharded_stages.add(stage.stage_index)
        super()._assert_unsharded(stage)

    def load_table(self, file: str) -> None:
        """Run the computations of a CSV file from the next step on."""

    def _load_csv(self, filename: str, format: str = "compute_only") -> None:
        self.load_table(filename)

    def _dump_csv(self, filename: str, format: str = "compute_comms") -> None:
        # torch before 2.15 would read a wait for a send as a W. Without waits it waits for all sends at the end.
        lists = self.pipeline_order_with_comms
        known = {rank: [each for each in row if isinstance(each[1], _ComputationType)] for rank, row in lists.items()}
        with replaced(self, pipeline_order_with_comms=known):
            super()._dump_csv(filename, cast(Any, format))

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        self.initialize_stages(*args, **kwargs)

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return self.merge_outputs(output_chunks)

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        self.run_microbatches(arg_mbs, kwarg_mbs, target_mbs, *args, **kwargs)


def _without_ranges() -> AbstractContextManager[None]:
    """Context in which torch's executor opens no profiler's range for each action: a tenth of the host's time."""
    known = vars(pipelining_schedules)  # another version of torch may name them otherwise
    names = {"record_function", "_get_profiler_function_name"} & known.keys()
    if any(known[name] is _open_nothing for name in names):  # of another rank, in a thread of this process
        return nullcontext()
    return replaced(pipelining_schedules, **dict.fromkeys(names, _open_nothing))


def _open_nothing(what: object) -> AbstractContextManager[None]:
    return _NOTHING


_NOTHING = nullcontext()


def with_whole_backwards(runtime: OwnRuntime) -> AbstractContextManager[None]:
    """Context of runs in which this rank runs a B for each I, and no W. All ranks then send the same messages."""
    kinds = _ComputationType

    def change(row: list[Any]) -> list[Any]:
        left = [each for each in row if each is None or each[1] is not kinds.BACKWARD_WEIGHT]
        i, b = kinds.BACKWARD_INPUT, kinds.FULL_BACKWARD
        return [each._replace(computation_type=b) if each and each[1] is i else each for each in left]

    lists = {name: getattr(runtime, name) for name in ("pipeline_order", "pipeline_order_with_comms")}
    return replaced(runtime, **{name: {**of, runtime.rank: change(of[runtime.rank])} for name, of in lists.items()})


class _StepIsVoidError(Exception):
    """The actions that ran ahead do not count."""


def run_ahead(runtime: OwnRuntime, cut: RunAhead, verdict: Callable[[], bool], run: Callable[[], None]) -> bool:
    """Run a step whose first actions run ahead of `verdict`. Returns whether the step counts. If not, all pending
    messages have arrived, and the stages are as before the step; only buffers and random states that forwards change
    are not. `run` runs torch's executor on the cut lists."""
    lists, rank = runtime.pipeline_order_with_comms, runtime.rank
    before, after, drain = (actions_of(rows[rank]) for rows in (cut.before, cut.after, cut.drain))

    def walk() -> Iterator[_Action]:
        yield from before
        if verdict():
            yield from after
            return
        yield from drain
        # The executor's loop does not expect an error from its list, so it neither logs it nor reports a failure.
        raise _StepIsVoidError

    runtime.pipeline_order_with_comms = {**lists, rank: Row([*before, *after], walk)}
    try:
        run()
    except _StepIsVoidError:
        _forget_step(runtime)
        return False
    finally:
        runtime.pipeline_order_with_comms = lists
    return True


def _forget_step(runtime: OwnRuntime) -> None:
    for received in runtime.fwd_recv_ops.values():
        _wait_batch_p2p(received)  # type: ignore[no-untyped-call, unused-ignore]
    runtime.fwd_recv_ops.clear()
    for work in runtime.works:
        stage = work.stage
        work.gathering = runtime.unshard_ops.pop(stage.stage_index, ())
        work.finish_gathering()
        fsdp2.free_all(stage.submod)  # the gathered weights belong to the void step
        runtime.unsharded_stages.discard(stage.stage_index)
        stage.clear_runtime_states()
        for left in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            left.clear()
        work.messages.release_receives()


def _require_scalars(loss_fn: Callable[..., Any], last: _PipelineStageBase) -> Callable[..., Any]:
    @wraps(loss_fn)
    def compute(*args: Any, **kwargs: Any) -> Any:
        loss = loss_fn(*args, **kwargs)
        if not last.has_backward or (isinstance(loss, Tensor) and loss.numel() == 1):
            return loss
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"loss_fn returned {found}, but training needs a tensor with a single number: return the loss alone, as"
            " loss.mean() or loss.sum(), and keep other values in a list of your own (loss_fn is called once a"
            " microbatch, and once before the first step)"
        )

    return compute


def stages_of(schedule: _PipelineSchedule) -> list[_PipelineStageBase]:
    """The stages of this rank. torch's single-stage schedules keep it under another name."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else cast(Any, schedule)._stages


def device_of(stage: _PipelineStageBase) -> torch.device:
    """The device of a stage. torch may keep its name."""
    return torch.device(stage.device)


def device_of_rank(schedule: _PipelineSchedule) -> torch.device:
    return device_of(stages_of(schedule)[0])


def torch_class(name: str) -> type[_PipelineSchedule]:
    return cast(type[_PipelineSchedule], get_schedule_class(name))


def lower(runtime: _PipelineScheduleRuntime, schedule: Schedule) -> None:
    """Load `schedule` into torch, which checks the order, adds the communication and keeps both lists."""
    runtime.pipeline_order = {rank: [_action(*op) for op in ops] for rank, ops in enumerate(schedule)}
    with replaced(pipelining_schedules, _add_unshard_reshard=_gather):
        runtime._prepare_schedule_with_comms(runtime.pipeline_order)


def _gather(row: list[_Action | None], max_active_stages: int = 3, **more: Any) -> list[_Action]:
    """Torch's actions for `row`, in time that is not quadratic in its length."""
    # torch looks ahead until it has seen the maximum number of active stages, or to the row's end if the rank has
    # fewer.
    own = len({action.stage_index for action in row if action})
    more = {name: min(number, own) for name, number in more.items()}
    return _add_unshard_reshard(row, min(max_active_stages, own), **more)


Lists = tuple[dict[int, list[_Action | None]], dict[int, list[_Action]]]
"""The actions of all ranks: computations only, and with communication."""


def rows_of(runtime: _PipelineScheduleRuntime) -> Rows:
    """All ranks' actions with torch's communication. Overlapped actions become two consecutive ones."""
    return tuple(
        tuple(_find_action(part) for action in row for part in action.sub_actions or (action,))
        for _, row in sorted(runtime.pipeline_order_with_comms.items())
    )


def actions_of(row: Iterable[Action]) -> list[_Action]:
    """torch's actions. Waits for sends are included also where torch (before 2.15) has none."""
    return [_action(*each) for each in row]


def write_lowered(runtime: _PipelineScheduleRuntime) -> str:
    return "\n".join(",".join(map(str, row)) for _, row in sorted(runtime.pipeline_order_with_comms.items()))


def run_forward(stage: _PipelineStageBase, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output of the stage's module, run in the context of torch's forward of that microbatch."""
    if not getattr(stage, "_forward_contexts", None):  # torch before 2.15 has none
        return stage.forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
    known = cast(Any, pipelining_stage)
    info = known.PipelineStageInfo(stage_index=stage.stage_index, microbatch_index=microbatch)
    return cast(Any, stage)._call_with_forward_context(info, stage.forward_maybe_with_nosync, *args, **kwargs)


def run_backward(
    stage: _PipelineStageBase, outputs: Any, output_grads: Any, inputs: Sequence[Any]
) -> Sequence[Tensor | None]:
    """Run a full backward of the stage's module as torch does. Returns the inputs' gradients (or None)."""
    # It begins with the outputs and their gradients, or with the loss and None. FSDP2 does not reduce.
    if output_grads is not None:
        outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    tensors = {"stage_output": outputs, "output_grads": output_grads, "input_values": inputs}
    gradients, _ = stage.backward_maybe_with_nosync("full", tensors)
    return cast(Sequence[Tensor | None], gradients)


def loss_of(schedule: _PipelineSchedule, output: Any, target: Any, loss_kwargs: Mapping[str, Any] | None) -> Tensor:
    # torch before 2.13 passes no keyword arguments to the loss.
    further = () if loss_kwargs is None else (loss_kwargs,)
    return cast(Tensor, cast(Any, schedule)._compute_loss(output, target, *further))


def zeros_for(stage: _PipelineStageBase) -> tuple[Tensor, ...] | None:
    """Zeros in the shapes of the inputs of `stage`; None if torch (before 2.13) does not know these."""
    metas = getattr(getattr(stage, "_stage_meta", None), "inputs", None)
    if metas is None or not isinstance(stage, PipelineStage):
        return None
    return tuple(stage._to_tensor(meta) for meta in metas)


def has_split_backward(runtime: _PipelineScheduleRuntime) -> bool:
    actions = (action for row in runtime.pipeline_order.values() for action in row)
    return any(action and action.computation_type is _ComputationType.BACKWARD_WEIGHT for action in actions)


def timeout_of(stage: _PipelineStageBase) -> float | None:
    """The message timeout of `stage` in seconds; None if the backend does not report it."""
    try:
        backend = (stage.group or dist.group.WORLD)._get_backend(device_of(stage))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """The key-value store of the job's process group; None if there is no group."""
    return _get_default_store() if dist.is_initialized() else None


def has_store() -> bool:
    """Whether the job's key-value store ends with this process, unlike torchrun's."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, dist.TCPStore) and dist.get_rank() == 0 and dist.get_world_size() > 1 and not has_agent


_UNUSED_TAG = 1_000_003


def interrupt() -> None:
    """Close this process's gloo connections, so that all waits for them raise, on both sides. NCCL's stay: aborted
    kernels end as if their messages had arrived, and the host would continue with whatever is in the buffers."""
    for group in list(_world.pg_map):
        if "gloo" not in dist.get_backend_config(group) or dist.get_world_size(group) == 1:
            continue
        other = next(rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank())
        with suppress(RuntimeError):
            # gloo has no abort. But when one wait times out, gloo closes all connections of its group.
            receive: Any = dist.irecv(torch.empty(1), other, group, tag=_UNUSED_TAG)
            receive.wait(timedelta(milliseconds=1))


def receives_late(schedule: _PipelineSchedule) -> bool:
    return bool(getattr(schedule, "_defer_pp_recv", False))


def num_microbatches(schedule: _PipelineSchedule) -> int:
    return schedule._n_microbatches


def use_microbatches(schedule: _PipelineScheduleRuntime, number: int) -> None:
    """Run this number of microbatches in the next step. The lists have to be for the same number."""
    schedule._n_microbatches = number
    for stage in schedule._stages:
        if stage.chunks is not None:
            stage.chunks = number


def is_set_up(schedule: OwnRuntime) -> bool:
    trains = schedule._stages_backward_initialized
    return schedule._stages_forward_initialized and trains == schedule._has_backward and _set_up_last(schedule)


def _set_up_last(schedule: OwnRuntime) -> bool:
    """Whether no other schedule on the same stages has set up their messages since."""
    return all(work.messages.set_up_by == id(schedule) for work in schedule.works)


def infer_through_checkpoints(stage: _PipelineStageBase) -> AbstractContextManager[None]:
    """Context in which torch can infer outputs of a `stage` with `use_reentrant=True` checkpoints."""
    # torch (from 2.13 on) infers by `torch.autograd.grad`, which these checkpoints refuse.
    infer = getattr(stage, "_compute_input_grads", None)
    if infer is None:
        return nullcontext()
    return replaced(stage, _compute_input_grads=partial(_infer_input_gradients, stage.submod, infer))


def _infer_input_gradients(
    module: nn.Module,
    infer: Callable[..., tuple[Tensor | None, ...]],
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    *output_gradients: Any,
) -> tuple[Tensor | None, ...]:
    if all(node.name() != "CheckpointFunctionBackward" for node in autograd.sort_nodes(autograd.find_nodes(outputs))):
        return infer(outputs, inputs, *output_gradients)
    with fsdp2.without_gradients(module):
        torch.autograd.backward(outputs, *output_gradients)
    tensors = [each if isinstance(each, Tensor) and each.is_leaf else None for each in inputs]
    return tuple(None if each is None else each.grad for each in tensors)


def can_infer_shapes(schedule: OwnRuntime) -> bool:
    """Whether torch (from 2.13 on) has inferred all shapes on all ranks. Otherwise the user gave them."""
    return all(work.messages.infers_shapes for work in schedule.works)


def trains(schedule: _PipelineSchedule) -> bool:
    """Whether the present or next step has backwards, unlike `eval`."""
    return bool(cast(Any, schedule)._has_backward)


def needs_autograd(schedule: _PipelineSchedule) -> bool:
    """Whether autograd runs the backwards, torch's default."""
    return bool(getattr(schedule, "_backward_requires_autograd", True))


def loss_fn_of(schedule: _PipelineSchedule) -> Callable[..., Any] | None:
    return schedule._loss_fn


def what_it_runs(schedule: _PipelineSchedule) -> str:
    """A text that is equal on two ranks with the same table and number of microbatches."""
    table = write_lowered(schedule) if isinstance(schedule, _PipelineScheduleRuntime) else type(schedule).__name__
    return repr((table, schedule._n_microbatches, schedule.scale_grads))


_TYPES: dict[str, _ComputationType] = {**WAIT_KINDS, **{each.value: each for each in _ComputationType}}


def _action(stage: int, kind: str, microbatch: int) -> _Action:
    return _Action(stage, _TYPES[kind], None if microbatch < 0 else microbatch)


def _find_action(action: _Action) -> Action:
    stage, kind, microbatch, *_ = action
    return Action(stage, kind._value_, -1 if microbatch is None else microbatch)  # `value` doubles the time


def overlaps_fsdp(schedule: _PipelineSchedule) -> Overlap:
    """Whether FSDP2's collectives run during computations in a training step, if there are any."""
    if not isinstance(schedule, OwnRuntime):
        return "gathers" if isinstance(schedule, PipelineScheduleSingle) else False
    return all(work.reduces_early for work in schedule.works if is_fsdp(work.stage.submod))
