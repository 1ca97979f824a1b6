"""The private names of torch that zbpipe stands on, all in this one file.

Written for torch 2.15.0 and 2.13.0. What differs between versions is asked of the installed torch, not of its version
number.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.torch import get_overridable_functions
from torch._guards import CompileContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor import config as inductor_config
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed._composable.replicate import DDP
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as pipelining_stage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    _Action,
    _batch_p2p,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.parallel import DistributedDataParallel

from zbpipe.actions import Action, Rows, other_end, parse
from zbpipe.ir import Op, OpKind, Schedule, inputs
from zbpipe.transport import Transport

PipelineSchedule = _PipelineSchedule
"""What all of torch's schedules are."""

ScheduleRuntime = _PipelineScheduleRuntime
"""The `PipelineScheduleMulti` that lowers a list of compute actions to sends, receives and unshards, and runs it."""

Stage = _PipelineStageBase
"""What all of torch's stages are, `PipelineStage` among them."""

SCHEDULE_OPTIONS = frozenset(inspect.signature(ScheduleZBVZeroBubble.__init__).parameters) - {
    "self",
    "stages",
    "n_microbatches",
}
"""The keyword arguments that the installed torch's multi-stage schedules take."""


ON_ROCM = torch.version.hip is not None
"""Whether this torch was built for AMD's GPUs."""


def device_of(stage: _PipelineStageBase) -> torch.device:
    """Where it computes; torch's stages take a name as well, and keep it as it is."""
    return torch.device(stage.device)


def usual_transport(stage: _PipelineStageBase) -> Transport:
    """What messages between `stage` and others wait for, as far as it is known.

    NCCL has one queue for all messages of a process group; torch from 2.15 on can give each edge of the pipeline a
    group. On AMD's GPUs streams may share queues of the hardware, so the worst case is assumed.
    """
    if device_of(stage).type == "cpu":
        return Transport.IDEAL
    if ON_ROCM:
        return Transport.SHARED
    return Transport.QUEUE_PER_PEER if getattr(stage, "p2p_per_edge", False) else Transport.ONE_QUEUE


def torch_class(name: str) -> type[_PipelineSchedule]:
    """torch's own class under torch's name for it."""
    return cast(type[_PipelineSchedule], get_schedule_class(name))


def lower(runtime: _PipelineScheduleRuntime, schedule: Schedule) -> None:
    """Hand `schedule` to torch: it checks the order once more, adds the communication and keeps both lists."""
    runtime.pipeline_order = {rank: [_action(op) for op in ops] for rank, ops in enumerate(schedule)}
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)


Lists = tuple[dict[int, list[_Action | None]], dict[int, list[_Action]]]
"""What all ranks run: computations alone, and lowered."""


def lists_of(runtime: _PipelineScheduleRuntime) -> Lists:
    """What `runtime` runs."""
    return runtime.pipeline_order, runtime.pipeline_order_with_comms


def use_lists(runtime: _PipelineScheduleRuntime, lists: Lists) -> None:
    """Have `runtime` run what it once was lowered to, from the next step on."""
    runtime.pipeline_order, runtime.pipeline_order_with_comms = lists


def rows_of(runtime: _PipelineScheduleRuntime) -> Rows:
    """All ranks' actions with the communication that torch added; overlapped ones one after the other."""
    return parse(lowered_table(runtime))


def use_rows(runtime: _PipelineScheduleRuntime, rows: Rows) -> None:
    """Have `runtime` run the actions that it was lowered to in another order.

    Args:
        runtime: lowered from a list without overlapped actions.
        rows: a permutation of `rows_of(runtime)`.
    """
    for rank, row in runtime.pipeline_order_with_comms.items():
        actions = {str(action): action for action in row}
        runtime.pipeline_order_with_comms[rank] = [actions[str(action)] for action in rows[rank]]


def lowered_table(runtime: _PipelineScheduleRuntime) -> str:
    """All ranks' actions with the communication that torch added, as torch's CSV."""
    return "\n".join(",".join(map(str, row)) for _, row in sorted(runtime.pipeline_order_with_comms.items()))


Around = Callable[[str, int, int, Callable[[], Any]], Any]
"""Takes kind, stage and microbatch of a computation and the computation itself, and returns its result."""


def stages_of(schedule: _PipelineSchedule) -> list[_PipelineStageBase]:
    """The stages of this rank; torch's schedules for one stage a rank keep it under another name."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else cast(Any, schedule)._stages


def wrap_compute(schedule: _PipelineSchedule, around: Around) -> Callable[[], None]:
    """Run every computation of this rank through `around`, the loss as one more F of the last stage.

    Waiting for messages stays outside. Returns what undoes it; before and after, nothing is in the way.
    """
    with ExitStack() as wrapped:
        for stage in stages_of(schedule):
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                compute = partial(_compute_around, around, name, stage.stage_index, getattr(stage, name))
                wrapped.enter_context(replaced(stage, **{name: compute}))
        loss = partial(_loss_around, around, schedule._maybe_compute_loss)
        wrapped.enter_context(replaced(schedule, _maybe_compute_loss=loss))
        return wrapped.pop_all().close


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within, `owner` has these attributes of its own; afterwards it is as it was."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - before.keys():
            del vars(owner)[name]
        vars(owner).update(before)


def _compute_around(
    around: Around, name: str, stage: int, compute: Callable[..., Any], chunk: int, *args: Any, **kwargs: Any
) -> Any:
    kind = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(name)
    kind = kind or ("B" if kwargs.get("full_backward", True) else "I")
    return around(kind, stage, chunk, lambda: compute(chunk, *args, **kwargs))


def _loss_around(around: Around, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    stage, _, _, chunk, *_ = args
    if not stage.is_last:
        return compute(*args, **kwargs)
    return around("F", stage.stage_index, chunk, lambda: compute(*args, **kwargs))


Call = Callable[..., Any]


def wrap_calls(schedule: _PipelineSchedule, forward: Call, loss: Call, backward: Call) -> Callable[[], None]:
    """Run what the computations of this rank call inside through these, which get the call and then its arguments.

    Args:
        schedule: any of torch's.
        forward: of a stage's module: `(call, *args, **kwargs)`, with the inputs as the module sees them.
        loss: `(call, output, target, **kwargs)`.
        backward: `(call, kind, tensors, last_backward=...)`, where `tensors` has the "output_grads" (None on the
            last stage) and its "input_values"; their gradients are the first part of what it returns.

    Returns what undoes it.
    """
    with ExitStack() as wrapped:
        for stage in stages_of(schedule):
            wrapped.enter_context(
                replaced(
                    stage,
                    forward_maybe_with_nosync=partial(forward, stage.forward_maybe_with_nosync),
                    backward_maybe_with_nosync=partial(backward, stage.backward_maybe_with_nosync),
                )
            )
        if schedule._loss_fn is not None:
            wrapped.enter_context(replaced(schedule, _loss_fn=partial(loss, schedule._loss_fn)))
        return wrapped.pop_all().close


def run_forward(stage: _PipelineStageBase, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output of the stage's module, in the context that torch's forward of that microbatch would give it."""
    if not getattr(stage, "_forward_contexts", None):  # torch before 2.15 has none
        return stage.forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
    known = cast(Any, pipelining_stage)
    info = known.PipelineStageInfo(stage_index=stage.stage_index, microbatch_index=microbatch)
    return cast(Any, stage)._call_with_forward_context(info, stage.forward_maybe_with_nosync, *args, **kwargs)


def run_backward(
    stage: _PipelineStageBase, outputs: Any, output_grads: Any, inputs: Sequence[Any]
) -> Sequence[Tensor | None]:
    """A full backward of the stage's module, as torch runs it; the gradients of the inputs, or None.

    Args:
        stage: with FSDP2 it keeps its gradients unreduced.
        outputs: of the module, or the loss.
        output_grads: a tuple as long as the outputs; None for the loss.
        inputs: that lead to the outputs.
    """
    if output_grads is not None:
        outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    tensors = {"stage_output": outputs, "output_grads": output_grads, "input_values": inputs}
    gradients, _ = stage.backward_maybe_with_nosync("full", tensors)
    return cast(Sequence[Tensor | None], gradients)


def loss_of(schedule: _PipelineSchedule, output: Any, target: Any, loss_kwargs: Mapping[str, Any] | None) -> Tensor:
    """Of one microbatch, as torch computes it."""
    return cast(Tensor, schedule._compute_loss(output, target, loss_kwargs))  # type: ignore[no-untyped-call]


def zeros_for(stage: _PipelineStageBase) -> tuple[Tensor, ...] | None:
    """Inputs that look like those that `stage` will receive; None where torch (before 2.13) does not know them so."""
    metas = getattr(getattr(stage, "_stage_meta", None), "inputs", None)
    if metas is None or not isinstance(stage, PipelineStage):
        return None
    inputs = tuple(stage._to_tensor(meta) for meta in metas)
    with torch.no_grad():
        for each in inputs:
            each.zero_()
    return inputs


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Within, all parts of `module` in FSDP2 have their whole weights, as between torch's UNSHARD and RESHARD."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def has_split_backward(runtime: _PipelineScheduleRuntime) -> bool:
    """Whether any rank runs the actions I and W."""
    actions = (action for row in runtime.pipeline_order.values() for action in row)
    return any(action and action.computation_type is _ComputationType.BACKWARD_WEIGHT for action in actions)


def to_other_ranks(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """The sends and receives whose peer is not this very process."""
    return [operation for operation in operations if operation.peer != dist.get_rank()]


def timeout_of(stage: _PipelineStageBase) -> float | None:
    """Seconds after which a message of `stage` fails, as it is set now; None where the backend does not tell."""
    try:
        backend = (stage.group or dist.group.WORLD)._get_backend(stage.device)  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None


def has_communicators() -> bool:
    """Whether this process is in a group of NCCL's kind (RCCL goes by its name): one that a peer's end can hang."""
    return dist.is_initialized() and "ccl" in dist.get_backend_config()


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on `device` goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def default_store() -> Any:
    """The key-value store in which the ranks of the job met; None before they did."""
    return _get_default_store() if dist.is_initialized() else None


def place_of(error: BaseException, runtime: _PipelineScheduleRuntime) -> str:
    """At which step of its schedule, as torch numbers them from 0, and at which action `error` came out of `runtime`.

    With the message it waited for, if it was waiting for one. No other trace of this leaves torch's executor.
    """
    return _place([frame for frame, _ in traceback.walk_tb(error.__traceback__)], runtime)


def place_now(thread: int, runtime: _PipelineScheduleRuntime) -> str | None:
    """The same for a step that another thread, by its ident, runs just now; None if that thread is gone."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else _place([frame for frame, _ in traceback.walk_stack(frame)][::-1], runtime)


def _place(frames: list[FrameType], runtime: _PipelineScheduleRuntime) -> str:
    executor = next((n for n, frame in enumerate(frames) if frame.f_code is _EXECUTOR), len(frames) - 1)
    found = frames[executor].f_locals
    if "time_step" not in found:
        return "before step 0"
    waits = any(frame.f_code is _wait_batch_p2p.__code__ for frame in frames[executor:])
    action, total = found["action"], len(runtime.pipeline_order_with_comms[runtime.rank])
    if waits and frames[executor + 1].f_code is _wait_batch_p2p.__code__:
        return f"after step {total - 1}, waiting for its last sends"
    message = _message_with_rank(action, runtime) if waits or action.computation_type.value in _MESSAGES else ""
    return f"step {found['time_step']} of {total}, {action}{message}"


def explained(error: BaseException, runtime: _PipelineScheduleRuntime) -> str | None:
    """What is behind an `error` that came out of `runtime`, where torch's own words do not say what to do."""
    if "use_reentrant=True" in str(error):
        return (
            "torch infers what stages hand on by torch.autograd.grad, which a checkpoint with use_reentrant=True does"
            " not allow: set use_reentrant=False, or tell the shapes by PipelineStage(..., input_args=...,"
            " output_args=...)"
        )
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    action = next((frame.f_locals.get("action") for frame in frames if frame.f_code is _EXECUTOR), None)
    sending = next((frame.f_locals["p2p_ops"] for frame in frames if frame.f_code is _batch_p2p.__code__), ())
    index = next((n for n, operation in enumerate(sending) if not operation.tensor.is_contiguous()), None)
    kind, stage, _ = _key(action) if action else ("", 0, None)
    if index is None or kind not in ("SEND_F", "RECV_F") or "contiguous" not in str(error):
        return None
    return (
        f"output {index} of stage {stage - (kind == 'RECV_F')} is not contiguous, and only contiguous tensors can be"
        " sent: call .contiguous() on it in the stage's forward"
    )


_EXECUTOR = _PipelineScheduleRuntime._step_microbatches.__code__
_MESSAGES = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")


def _key(action: _Action) -> tuple[str, int, int | None]:
    """What it does, its stage and its microbatch."""
    return action.computation_type.value, action.stage_index, action.microbatch_index


def _message_with_rank(action: _Action, runtime: _PipelineScheduleRuntime) -> str:
    """What `action` waits for, or to whom it sends."""
    kind, stage, microbatch = _key(action)
    kind = kind.removeprefix("WAIT_")
    if kind in _MESSAGES:
        way = "to" if kind.startswith("SEND") else "from"
        return f" {way} rank {_rank_of(other_end(Action(stage, kind, microbatch or 0)).stage, runtime)}"
    *_, feeders = inputs(Op(stage, OpKind(kind), microbatch or 0), runtime._num_stages)
    ops = {str(op) for row in runtime.pipeline_order.values() for op in row}
    source = feeders[0].stage
    awaited = next((str(op) for op in feeders if str(op) in ops), f"stage {source}")
    return f", waiting for {awaited} from rank {_rank_of(source, runtime)}"


def _rank_of(stage: int, runtime: _PipelineScheduleRuntime) -> int:
    """In the job, not in the pipeline."""
    group = runtime._stages[0].group
    rank = runtime.stage_index_to_group_rank[stage]
    return rank if group is None else dist.get_global_rank(group, rank)


@contextmanager
def gradients_put_aside(stages: Sequence[_PipelineStageBase]) -> Iterator[None]:
    """Within, no parameter of `stages` has a gradient; afterwards each has the one from before again."""
    gradients = [(parameter, parameter.grad) for stage in stages for parameter in stage.submod.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def profiler_is_on() -> bool:
    """Whether torch's profiler looks at this process now."""
    return bool(torch._C._autograd._profiler_enabled())


def receives_late(schedule: _PipelineSchedule) -> bool:
    """Whether torch itself was asked to do so."""
    return bool(getattr(schedule, "_defer_pp_recv", False))


def num_microbatches(schedule: _PipelineSchedule) -> int:
    """Of one step."""
    return schedule._n_microbatches


def input_shapes(runtime: _PipelineScheduleRuntime) -> list[torch.Size] | None:
    """Of one microbatch of stage 0, on its rank: those for which all messages are set up; None before they are.

    torch sets them up in the first step, and anew where training and eval take turns. Then it sends whatever the stages
    give: of a smaller tensor gloo fills a part of the receiver's, without a word; a larger one ends its process.
    """
    trained, trains = runtime._stages_backward_initialized, runtime._has_backward
    first: Any = runtime._stages[0]
    # torch 2.11 keeps them on the stage itself.
    inputs = first._stage_meta.inputs if hasattr(first, "_stage_meta") else first.inputs_meta
    if not runtime._stages_forward_initialized or trained != trains or inputs is None:
        return None
    return [meta.shape for meta in inputs]


def what_it_runs(schedule: _PipelineSchedule) -> str:
    """Equal on two ranks that run the same table over as many microbatches, whatever its name."""
    table = lowered_table(schedule) if isinstance(schedule, _PipelineScheduleRuntime) else type(schedule).__name__
    return repr((table, schedule._n_microbatches, schedule.scale_grads))


def _action(op: Op) -> _Action | None:
    return _Action(op.stage, _ComputationType(op.kind.value), op.microbatch)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called on it."""
    return is_optimized(module) or module._compiled_call_impl is not None


def is_optimized(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` gives, which shows the attributes of the module inside as its own."""
    return isinstance(module, OptimizedModule)


def runs_in_cuda_graphs(module: nn.Module) -> bool:
    """Whether what `torch.compile` made of this very module will be captured, and replayed in the same memory.

    By its mode or its options, by the configuration of Inductor as it is now, or by its backend.
    """
    if not is_compiled(module):
        return False
    backend = _backend_of(module)
    options = getattr(backend, "config", None)  # Inductor's, as far as the user gave some
    if options is None:
        return getattr(backend, "compiler_name", "") == "cudagraphs"
    return bool(options.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def _backend_of(module: nn.Module) -> Any:
    """What compiles the graphs of a compiled module."""
    context = getattr(module, "dynamo_ctx", None)
    if not is_optimized(module):
        compiled, _ = diverted_calls(module) or (module._compiled_call_impl, None)
        context = inspect.getclosurevars(cast(Call, compiled)).nonlocals.get("self")
    backend = getattr(context, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def divert_compiled_call(module: nn.Module, region: Callable[..., Any]) -> None:
    """Have a compiled module's calls run as `region(compiled, eager, *args, **kwargs)`."""
    if isinstance(module, OptimizedModule):
        module.forward = partial(region, module.forward, module._orig_mod)
    else:
        module._compiled_call_impl = partial(region, module._compiled_call_impl, module._call_impl)


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which the compiler leaves alone."""
    return cast(Callable[..., Any], torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def compiled_call(module: nn.Module) -> Any:
    """What runs when a compiled module is called."""
    call = getattr(module, _call_name(module))
    return call.func if isinstance(call, partial) else call


def diverted_calls(module: nn.Module) -> tuple[Call, Call] | None:
    """What the region of `divert_compiled_call` chooses from: (compiled, eager). None if `module` was not diverted."""
    call = getattr(module, _call_name(module)) if is_compiled(module) else None
    return call.args if isinstance(call, partial) else None


def with_calls(module: nn.Module, compiled: Call, eager: Call) -> AbstractContextManager[None]:
    """Within, the region of a diverted module chooses from these."""
    name = _call_name(module)
    return replaced(module, **{name: partial(getattr(module, name).func, compiled, eager)})


def without_region(module: nn.Module, call: Call) -> AbstractContextManager[None]:
    """Within, a diverted module's calls run as `call`."""
    return replaced(module, **{_call_name(module): call})


def _call_name(module: nn.Module) -> str:
    return "forward" if isinstance(module, OptimizedModule) else "_compiled_call_impl"


def has_hooks(weight: Tensor) -> bool:
    """Whether hooks want to see the gradient of `weight`: `register_hook`, `register_post_accumulate_grad_hook`."""
    return bool(weight._backward_hooks) or bool(weight._post_accumulate_grad_hooks)


def has_hooks_on_node(weight: Tensor) -> bool:
    """Whether hooks sit on the node by which autograd adds to `weight.grad`.

    Nothing lists them. But all hooks of a node share a dictionary, and one more hook's handle knows it.
    """
    node = get_gradient_edge(weight).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *gradients: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def will_run(node: Node) -> bool | None:
    """Within a backward, whether it goes on to `node`: `torch.autograd.grad` goes to what it was asked for only.

    None if it was asked for the gradient that arrives there, which then nobody else may take.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def is_in_backward() -> bool:
    """Whether autograd runs what runs now."""
    return bool(torch._C._current_graph_task_id() != -1)


any_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is on, for whatever device."""


def is_transformed() -> bool:
    """Whether `torch.func`, forward-mode AD or the tracer of TorchScript looks at what runs now."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def place_in_memory(tensor: Tensor) -> tuple[int | None, int]:
    """Which memory it lies in, and how many tensors it makes there: a view keeps the tensor that it is a view of.

    None where the memory is not for us to see, as for results of collectives under way.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    storage = tensor.untyped_storage()._cdata if type(tensor) is Tensor else None
    return storage, 1 if tensor._base is None else 2


Memory = tuple[ReferenceType[torch.UntypedStorage], ...]
"""Where some tensors lie. Equal only as long as that memory is not free: an address alone is soon used again."""


def memory_of(tensors: Iterable[Tensor]) -> Memory:
    """Of all of them, in their order."""
    return tuple(ref(_local(each).untyped_storage()) for each in tensors)


def num_holders(storage: int) -> int:
    """How many tensors lie in the memory that `place_in_memory` named."""
    return int(torch._C._storage_Use_Count(storage)) - _ASKING


def _count_asking() -> int:
    alone = torch.empty(1)
    return int(torch._C._storage_Use_Count(alone.untyped_storage()._cdata)) - 1


_ASKING = _count_asking()
"""`place_in_memory` leaves a Python object behind, which counts."""


def received(stage: _PipelineStageBase, microbatch: int) -> list[Tensor]:
    """What came from other stages for a microbatch, which torch keeps after its backward, too."""
    infos = (*stage.args_recv_info.get(microbatch, ()), *stage.grad_recv_info.get(microbatch, ()))
    buffers = (getattr(info, "buffer", None) for info in infos)
    return [buffer for buffer in buffers if isinstance(buffer, Tensor)]


def slot_permit() -> Callable[[], str]:
    """A question that a layer asks while it is being compiled, and whose answer becomes a constant of the graph.

    "take": use the slots, and leave none behind. "borrow": use them; nothing can be changed here, in a checkpointed
    part of the graph. "no": another use has them, or nothing tells how often this part runs.
    """
    last_trace: Any = None
    was_borrowed = is_in_parts = False

    def ask() -> str:
        nonlocal last_trace, was_borrowed, is_in_parts
        trace = CompileContext.current_trace_id()
        if trace == last_trace:
            return "no"
        last_trace = trace
        output = InstructionTranslator.current_tx().output
        # What borrows leaves the slots to what runs after it, so that must not be a graph that uses them, too.
        is_part = output.root_tx.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
        if output.current_tracer.parent is None:
            is_in_parts |= is_part
            return "no" if is_part and was_borrowed else "take"
        if is_part or is_in_parts or not _is_in_checkpoints_only(output.current_tracer):
            return "no"
        was_borrowed = True
        return "borrow"

    # A function, because the compiler takes two functions with the same code for equal, and so reuses a block's graph
    # for the next block.
    return cast(Callable[[], str], torch.compiler.assume_constant_result(ask))  # type: ignore[no-untyped-call]


def _is_in_checkpoints_only(tracer: Any) -> bool:
    """Whether what is being traced stands in no other operator than activation checkpointing: a loop runs often."""
    while tracer.parent is not None:
        if tracer.source_target is not tag_activation_checkpoint:
            return False
        tracer = tracer.parent
    return True


def reduces_in_hooks(module: nn.Module) -> bool:
    """Whether DistributedDataParallel, or the composable `replicate` around it, reduces the gradients."""
    return isinstance(module, (DistributedDataParallel, DDP))


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard`, or the `replicate` that stands on it, was called on this very module."""
    return isinstance(module, FSDPModule)


def owes_reduction(module: nn.Module) -> bool:
    """Whether FSDP2 is to reduce gradients of `module` or its parts, and has some that it has not reduced."""
    groups = (group for part in filter(is_fsdp, module.modules()) for group in _fsdp_groups(part) if group.reduce_grads)
    parameters = (each for group in groups for each in group.fsdp_params if hasattr(each, "_unsharded_param"))
    beside = "unsharded_accumulated_grad"
    return any(each._unsharded_param.grad is not None or getattr(each, beside, None) is not None for each in parameters)


def has_own_backward(stage: Stage) -> str:
    """The name of what a framework has put in the place of the stage's backward; empty for torch's own."""
    own = vars(stage).get("backward_maybe_with_nosync")
    return getattr(own, "__qualname__", repr(own)) if own else ""


def end_backward(stage: Stage, is_last: bool) -> None:
    """Have a framework's backward do what it does after a W: there is nothing left to compute for it."""
    stage.backward_maybe_with_nosync("weight", {"stage_output": (), "param_groups": []}, last_backward=is_last)


def settle_gradients(module: nn.Module) -> None:
    """Let FSDP2 take over what was added to the `.grad` of unsharded parameters outside of a backward.

    Older ones (torch 2.13) do so at the end of a backward only, and keep the sum, in the dtype in which they will
    reduce, beside `.grad`.
    """
    if _SUMS_BESIDE_GRAD:
        for parameter in _fsdp_parameters(module):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def sums_beside_grad(module: nn.Module) -> dict[int, Tensor]:
    """The sums of `settle_gradients`, by the ids of the weights; W adds to them without going through `.grad`."""
    if not _SUMS_BESIDE_GRAD:
        return {}
    sums = ((each._unsharded_param, each.unsharded_accumulated_grad) for each in _kept_beside_grad(module))
    return {id(weight): total for weight, total in sums if total is not None}


_SUMS_BESIDE_GRAD = hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed")


def _fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    """FSDP2's own view of those parameters in `module` that were unsharded before."""
    for part in filter(is_fsdp, module.modules()):
        for group in _fsdp_groups(part):
            yield from (each for each in group.fsdp_params if hasattr(each, "_unsharded_param"))


def _fsdp_groups(part: nn.Module) -> Iterable[Any]:
    state: Any = part._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return cast(Iterable[Any], state._fsdp_param_groups)
    # torch 2.11 has at most one.
    return filter(None, [state._fsdp_param_group])


REDUCED = " (reduced)"


class Accumulated(NamedTuple):
    """What backwards have added up for one parameter."""

    name: str
    """Of the parameter, and `REDUCED` after it for the part that data-parallel ranks have reduced already."""
    parameter: Tensor
    gradient: Tensor


def accumulated(module: nn.Module) -> Iterator[Accumulated]:
    """The gradients so far, wherever they are kept: FSDP2 has them before and after it reduced them."""
    views = {id(own): each for each in _fsdp_parameters(module) for own in (each.sharded_param, each._unsharded_param)}
    beside = {id(each._unsharded_param): each.unsharded_accumulated_grad for each in _kept_beside_grad(module)}
    for name, parameter in module.named_parameters():
        fsdp = views.get(id(parameter))
        leaves = {name: parameter}
        if fsdp is not None:
            leaves = {name: fsdp._unsharded_param, name + REDUCED: fsdp.sharded_param}
        for place, leaf in leaves.items():
            parts = [each for each in (leaf.grad, beside.get(id(leaf))) if each is not None]
            if parts:
                yield Accumulated(place, leaf, sum(parts[1:], parts[0]))


def _kept_beside_grad(module: nn.Module) -> Iterator[Any]:
    return _fsdp_parameters(module) if _SUMS_BESIDE_GRAD else iter(())


@contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Within, the parameters have no gradients, and no hooks that run when one was added to `.grad`.

    Afterwards they have the very same tensors and hooks again, and nothing of what was added.
    """
    unsharded = [each for fsdp in _fsdp_parameters(module) for each in (fsdp.sharded_param, fsdp._unsharded_param)]
    parameters = list({id(each): each for each in (*module.parameters(), *unsharded)}.values())
    kept = [(each, each.grad, dict(each._post_accumulate_grad_hooks or {})) for each in parameters]
    beside = [(each, each.unsharded_accumulated_grad) for each in _kept_beside_grad(module)]
    for parameter in parameters:
        parameter.grad = None
        if hooks_after_accumulation(parameter):  # autograd holds on to this very dictionary
            parameter._post_accumulate_grad_hooks.clear()
    for fsdp, _ in beside:
        fsdp.unsharded_accumulated_grad = None
    try:
        yield
    finally:
        for parameter, gradient, hooks in kept:
            parameter.grad = gradient
            if hooks:
                parameter._post_accumulate_grad_hooks.update(hooks)
        for fsdp, gradient in beside:
            fsdp.unsharded_accumulated_grad = gradient


def hooks_after_accumulation(weight: Tensor) -> bool:
    """Whether hooks of `register_post_accumulate_grad_hook` change or use `.grad` as soon as something was added."""
    return bool(weight._post_accumulate_grad_hooks)


def versions_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Within, autograd does not see that `tensors` are written to; the caller puts their values back."""
    counted = tuple(each for each in tensors if not each.is_inference())
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(counted)


# They keep nothing of the forward, so autograd can go through them once more, and they cost next to nothing.
_REPEATABLE = {
    "AliasBackward0",
    "PermuteBackward0",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
    "_ToTorchTensorBackward",
    "_UnsafeViewBackward0",
}


def leaf_behind(tensor: Tensor) -> Tensor | None:
    """The leaf that `tensor` is a cast, a transpose or a local part of, if it is nothing more than that."""
    return _leaf_before(get_gradient_edge(tensor).node)


def _leaf_before(node: Node | None) -> Tensor | None:
    while node is not None and node.name() in _REPEATABLE:
        node = node.next_functions[0][0]
    return cast(Tensor | None, getattr(node, "variable", None))


def permutation_of_leaf(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of the leaf behind `tensor`, in the order in which `tensor` has them; None for other views."""
    order = list(range(tensor.dim()))
    steps: list[Node] = []
    node = tensor.grad_fn
    while node is not None and node.name() in _REPEATABLE:
        steps.append(node)
        node = node.next_functions[0][0]
    for step in reversed(steps):
        kind, saved = step.name(), cast(Any, step)
        if kind == "TBackward0":
            order.reverse()
        elif kind == "TransposeBackward0":
            # Negative ones are saved as unsigned numbers.
            first, second = (_signed(saved._saved_dim0), _signed(saved._saved_dim1))
            order[first], order[second] = order[second], order[first]
        elif kind == "PermuteBackward0":
            order = [order[_signed(dim)] for dim in saved._saved_dims]
        elif kind != "ToCopyBackward0":
            return None
    return tuple(order)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def let_compiler_dispatch(function: Callable[..., Any]) -> None:
    """Have the compiler ask `__torch_function__` of what `function` is called with, as torch itself does.

    It does so for the public functions, and `torch._grouped_mm` is none.
    """
    get_overridable_functions().add(function)


def surely_same_shape(one: Tensor, other: Tensor) -> bool:
    """Also while it is compiled, where a number of rows may come out of the data: that is not surely the same."""
    return one.dim() == other.dim() and all(
        guard_or_false(size == wanted) for size, wanted in zip(one.shape, other.shape, strict=True)
    )


_PRODUCTS = {
    "AddbmmBackward0",
    "AddmmBackward0",
    "AddmvBackward0",
    "BaddbmmBackward0",
    "BmmBackward0",
    "ConvolutionBackward0",
    "GroupedMmBackward0",
    "LinearBackward0",
    "MkldnnRnnLayerBackward0",
    "MmBackward0",
    "MvBackward0",
}


def parameters_in_products(outputs: Iterable[Any]) -> frozenset[int]:
    """The ids of all parameters that were multiplied on the way to `outputs`, or given to a Function of the user's."""
    waiting = [each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None]
    seen: set[Node] = set(waiting)
    found: set[int] = set()
    while waiting:
        node = waiting.pop()
        before = [each for each, _ in node.next_functions if each is not None]
        if node.name() in _PRODUCTS or isinstance(cast(object, node), BackwardCFunction):
            factors = (_leaf_before(each) for each in before)
            found |= {id(factor) for factor in factors if factor is not None and factor.dim() > 1}
        new = [each for each in before if each not in seen]
        seen.update(new)
        waiting += new
    return frozenset(found)


def edge_to_leaf(tensor: Tensor) -> GradientEdge | None:
    """Where a gradient of `tensor` can enter autograd's graph once more, later, on its way to a leaf without hooks."""
    leaf = leaf_behind(tensor)
    return None if leaf is None or has_hooks(leaf) else get_gradient_edge(tensor)


grouped_mm = torch._grouped_mm
"""Groups of rows, each times its own weight: (x, weight, offs=...). TorchTitan's experts call it by this name."""


def grad_dtype(weight: Tensor, gradient: Tensor) -> torch.dtype:
    """The dtype in which autograd would keep `gradient` of `weight`.

    FSDP2 asks for wider gradients through `grad_dtype`, None meaning "as they come"; torch before 2.13 has no such
    attribute and wants the weight's own dtype.
    """
    return cast(torch.dtype, getattr(weight, "grad_dtype", weight.dtype) or gradient.dtype)


def set_available_device_type(device_type: str) -> None:
    """Make `device_type` torch's answer to the question which accelerator this machine has."""
    torch._utils._get_available_device_type = lambda: device_type
