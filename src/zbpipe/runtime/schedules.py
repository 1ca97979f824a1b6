"""zbpipe's schedules as classes that torch's pipelining runs, and the function that builds one by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from zbpipe import registry
from zbpipe.costs import CostModel
from zbpipe.ir import OpKind, Placement, Schedule
from zbpipe.lowered import blocked_queues, mixed_up_messages, parse, validate_lowered
from zbpipe.runtime import _torch, agreement, failures
from zbpipe.runtime import stages as split
from zbpipe.runtime.losses import defer_in_loss
from zbpipe.runtime.products import WeightGradients
from zbpipe.runtime.stages import SplitBackward
from zbpipe.validate import require_valid


class RegisteredSchedule(_torch.ScheduleRuntime):
    """A schedule from zbpipe's registry on torch's schedule runtime. Subclasses say which one.

    Torch lowers the schedule's list of compute actions to sends and receives and executes it.

    Args:
        stages: all stages of this rank, those that `zbpipe.stage_indices` names.
        n_microbatches: any number from 1 on.
        loss_fn: `(output, target) -> loss`; without it `step` runs forwards only.
        split_backward: "deferred" makes I one ordinary backward and W a drain of GEMMs (see
            `zbpipe.runtime.deferred`); a stage without a layer that can do so is told in the log, or refused with
            "strict". "autograd" is torch's own split, for comparison.
        defer_loss: a loss that runs backwards of its own during F, as TorchTitan's chunked loss does with the LM head,
            leaves their weight gradients to W, too. It then keeps the gradients of all logits of a microbatch until W.
        costs: for the schedules that fit themselves to measured times, ZB1P and ZB2P.
        defer_pp_recv: whether receives wait until shortly before they are needed, as they should on AMD's GPUs; by
            default there only. zbpipe's way to do so (`_torch.receive_late`) is right for all schedules, V-shaped ones
            as well, and works with every torch.
        options: the remaining arguments of torch's multi-stage schedules, as far as the installed torch has them:
            `scale_grads`, `args_chunk_spec`, `kwargs_chunk_spec`, `output_merge_spec`, `max_active_stages`,
            `unshard_lookahead`, `defer_reduce_grad_wait`, `max_outstanding_sends` and so on. Without the last one,
            sent tensors are freed as soon as they were surely received.

    Raises:
        ValueError: stages that do not fit the schedule, an option that the installed torch lacks, or a stage whose
            backward cannot be split.
    """

    schedule_name: ClassVar[str]

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *args: Any,
        split_backward: SplitBackward = "deferred",
        defer_loss: bool = False,
        costs: CostModel | None = None,
        defer_pp_recv: bool | None = None,
        **options: Any,
    ) -> None:
        traits = registry.lookup(self.schedule_name)
        require_options(traits.name, options)
        _require_microbatches(traits.name, n_microbatches, loss_fn)
        stages = _in_order(stages, traits.name)
        per_rank = _stages_per_rank(traits, stages)
        placement = traits.place(stages[0].group_size, per_rank)
        _require_placement(stages, traits.name, placement)
        schedule = registry.generate(
            traits.name, placement.num_ranks, n_microbatches, stages_per_rank=per_rank, costs=costs
        )
        gradients = WeightGradients()
        if defer_loss and loss_fn is not None and split_backward != "autograd":
            loss_fn = defer_in_loss(loss_fn, gradients)
        super().__init__(stages, n_microbatches, loss_fn, *args, **options)  # type: ignore[no-untyped-call]
        self._receives_late = _torch.ON_ROCM if defer_pp_recv is None else defer_pp_recv
        self._frees_sends_early = options.get("max_outstanding_sends") is None
        self._placement = placement
        self.adopt(schedule)
        if any(op.kind is OpKind.I for ops in schedule for op in ops):
            split.split_backward(self._stages, split_backward, gradients)

    def adopt(self, schedule: Schedule) -> None:
        """Run `schedule` from the next step on, with the stages as they are. All ranks have to, between two steps.

        That they all have is checked when that step begins.

        Raises:
            ValueError: it has another placement or another number of microbatches, or could not run.
        """
        _require_runnable(schedule, self._placement, self._n_microbatches)
        _torch.lower(self, schedule)
        if self._receives_late:
            _torch.receive_late(self)
        if self._frees_sends_early:
            _torch.free_sends_early(self)
        _require_sound_messages(self, schedule.name)
        self.schedule = schedule
        self._is_agreed = False

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        with failures.named(self, self.schedule.name):
            if not self._is_agreed:
                stage = self._stages[0]
                agreement.require_same(self, self.schedule.name, stage.group, stage.device)
                self._is_agreed = True
            super()._step_microbatches(*args, **kwargs)


class ScheduleZBH1(RegisteredSchedule):
    """ZB-H1, one stage a rank; see `zbpipe.algorithms.zbh1`."""

    schedule_name = "ZBH1"


class ScheduleZBH2(RegisteredSchedule):
    """ZB-H2, one stage a rank; see `zbpipe.algorithms.zbh2`."""

    schedule_name = "ZBH2"


class ScheduleZB1P(RegisteredSchedule):
    """ZB-1p, one stage a rank; see `zbpipe.algorithms.zb1p`."""

    schedule_name = "ZB1P"


class ScheduleZB2P(RegisteredSchedule):
    """ZB-2p, one stage a rank; see `zbpipe.algorithms.zb2p`."""

    schedule_name = "ZB2P"


class ScheduleZBV(RegisteredSchedule):
    """ZB-V, two stages a rank in a V; see `zbpipe.algorithms.zbv`."""

    schedule_name = "ZBV"


class ScheduleVHalf(RegisteredSchedule):
    """V-Half, two stages a rank in a V; see `zbpipe.algorithms.v_half`."""

    schedule_name = "VHalf"


class ScheduleVMin(RegisteredSchedule):
    """V-Min, two stages a rank in a V; see `zbpipe.algorithms.v_min`."""

    schedule_name = "VMin"


def schedule_class(name: str) -> type[_torch.PipelineSchedule]:
    """The class that runs the schedule called `name`: torch's own under torch's names, else one of zbpipe's.

    Raises:
        ValueError: no such schedule; the message lists the names and the nearest one.
    """
    traits = registry.lookup(name)
    if traits.source == "torch":
        return _torch.torch_class(traits.name)
    return _registered_class(traits.name)


@cache
def _registered_class(name: str) -> type[RegisteredSchedule]:
    for known in RegisteredSchedule.__subclasses__():
        if known.schedule_name == name:
            return known
    class_name = "ScheduleFromFile" if name.endswith(".csv") else f"Schedule{name}"
    return type(class_name, (RegisteredSchedule,), {"schedule_name": name, "__module__": __name__})


def build_pipeline_schedule(
    schedule: str,
    stages: PipelineStage | Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Tensor] | None = None,
    **options: Any,
) -> _torch.PipelineSchedule:
    """The schedule called `schedule` on the given stages, ready for `step`.

    Args:
        schedule: a name in any case, zbpipe's or torch's; torch's names give torch's own classes.
        stages: this rank's stages, those that `zbpipe.stage_indices` names; one stage may stand alone.
        n_microbatches: into how many microbatches a batch is split.
        loss_fn: `(output, target) -> loss`.
        options: what the class takes besides, such as `scale_grads`, or `split_backward` for zbpipe's schedules.

    Raises:
        ValueError: an unknown name, an option that the schedule does not take, or stages that do not fit it.
    """
    traits = registry.lookup(schedule)
    runtime = schedule_class(traits.name)
    if issubclass(runtime, RegisteredSchedule):
        return runtime(stages, n_microbatches, loss_fn, **options)
    require_options(traits.name, options)
    _require_microbatches(traits.name, n_microbatches, loss_fn)
    ordered = _in_order(stages, traits.name)
    _require_placement(ordered, traits.name, traits.place(ordered[0].group_size, _stages_per_rank(traits, ordered)))
    build: Callable[..., _torch.PipelineSchedule] = runtime
    on_rank = ordered[0] if issubclass(runtime, PipelineScheduleSingle) else ordered
    built = build(on_rank, n_microbatches=n_microbatches, loss_fn=loss_fn, **options)
    _require_matching_messages(built, traits.name, options)
    require_splittable(built, traits.name)
    return built


def require_options(name: str, options: Iterable[str]) -> None:
    """Refuse options that the schedule called `name` does not take, because it or the installed torch has none such.

    Raises:
        ValueError: the message lists those that it takes.
    """
    runtime = schedule_class(name)
    known = set(inspect.signature(runtime.__init__).parameters) - {"self", "stage", "stages", "args", "options"}
    if issubclass(runtime, RegisteredSchedule):
        known |= _torch.SCHEDULE_OPTIONS
    for option in options:
        if option not in known:
            allowed = ", ".join(sorted(known - {"n_microbatches", "loss_fn"}))
            raise ValueError(f"{name} on this torch has no option {option!r}; it takes: {allowed}")


def require_splittable(schedule: _torch.PipelineSchedule, name: str) -> None:
    """Refuse one of torch's own schedules with I and W on compiled stages.

    Raises:
        ValueError: it would fail at the first W, or with `donated_buffer=False` give wrong gradients.
    """
    if isinstance(schedule, _torch.ScheduleRuntime) and _torch.has_split_backward(schedule):
        split.require_not_compiled(schedule._stages, f"torch's own {name}")


def _stages_per_rank(traits: registry.Traits, stages: Sequence[PipelineStage]) -> int | None:
    """As many as were built where the schedule leaves it open, else the schedule's own number."""
    return len(stages) if traits.any_stages_per_rank else None


def _require_microbatches(name: str, n_microbatches: int, loss_fn: Callable[..., Tensor] | None) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"{name} needs a loss_fn that can be called as loss_fn(output, target), got {loss_fn!r}")
    if not isinstance(n_microbatches, int) or isinstance(n_microbatches, bool) or n_microbatches < 1:
        raise ValueError(
            f"{name} needs a whole number of microbatches from 1 on, got n_microbatches={n_microbatches!r}"
        )


def _in_order(stages: PipelineStage | Sequence[PipelineStage], name: str) -> list[PipelineStage]:
    """Ascending, as torch's first step needs them, which passes shapes from stage to stage in the order of the list."""
    listed = [stages] if isinstance(stages, _torch.Stage) else list(stages or ())
    if not listed:
        raise ValueError(f"{name} got no stages; zbpipe.stage_indices({name!r}, rank=..., num_ranks=...) names them")
    for stage in listed:
        if not isinstance(stage, _torch.Stage):
            raise ValueError(
                f"{name} runs stages, got {type(stage).__name__}: wrap each part of the model in a"
                " torch.distributed.pipelining.PipelineStage"
            )
    return sorted(listed, key=lambda stage: stage.stage_index)


def _require_placement(stages: Sequence[PipelineStage], name: str, placement: Placement) -> None:
    rank, group_size = stages[0].group_rank, stages[0].group_size
    if any((stage.group_rank, stage.group_size) != (rank, group_size) for stage in stages):
        groups = [(stage.group_rank, stage.group_size) for stage in stages]
        raise ValueError(f"{name}: all stages of a rank belong to one process group, got (rank, size) {groups}")
    expected = placement.stages_on(rank)
    found = tuple(stage.stage_index for stage in stages)
    totals = {stage.num_stages for stage in stages}
    if found != expected or totals != {placement.num_stages}:
        raise ValueError(
            f"{name} on {group_size} pipeline ranks has {placement.num_stages} stages in all, and rank {rank} holds"
            f" the stages {list(expected)}; got the stages {list(found)} built with num_stages={sorted(totals)}."
            f" Build those that zbpipe.stage_indices({name!r}, rank={rank}, num_ranks={group_size}) names"
        )


def _require_matching_messages(runtime: _torch.PipelineSchedule, name: str, options: dict[str, Any]) -> None:
    """Late receives can change places with others from the same rank: on a V, F and I go the same way (torch 2.15)."""
    if not options.get("defer_pp_recv") or not isinstance(runtime, _torch.ScheduleRuntime):
        return
    mixed_up = mixed_up_messages(parse(_torch.lowered_table(runtime)))
    if mixed_up:
        raise ValueError(
            f"defer_pp_recv=True makes torch receive the messages of {name} in another order than they are sent, which"
            f" gives wrong gradients ({mixed_up[0]}): leave the option out"
        )


def _require_sound_messages(runtime: _torch.ScheduleRuntime, name: str) -> None:
    rows = parse(_torch.lowered_table(runtime))
    findings = validate_lowered(rows) or blocked_queues(rows)
    if findings:
        raise ValueError(
            f"schedule {name} with its messages would not run: {findings[0]}. Leave max_outstanding_sends out if it is"
            " set; otherwise this is a fault of zbpipe's"
        )


def _require_runnable(schedule: Schedule, placement: Placement, n_microbatches: int) -> None:
    """Refuse what torch could not run, before anything is launched."""
    if schedule.placement != placement:
        raise ValueError(
            f"schedule {schedule.name} puts its stages on the ranks {schedule.placement.rank_of}, but it is registered"
            f" with a placement that puts them on {placement.rank_of}"
        )
    if schedule.num_microbatches != n_microbatches:
        raise ValueError(
            f"schedule {schedule.name} is for {schedule.num_microbatches} microbatches, but a step has {n_microbatches}"
        )
    require_valid(schedule)
    last = placement.num_stages - 1
    forwards = [op.microbatch for op in schedule.ops[placement.rank_of[last]] if op[:2] == (last, OpKind.F)]
    if forwards != sorted(forwards):
        raise ValueError(
            f"schedule {schedule.name} runs the last stage's forwards in the order {forwards}; torch numbers the losses"
            " in that order, so it has to be ascending"
        )
