"""What is refused before a schedule is built: options, stages and orders that torch could not run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe import registry
from zbpipe.ir import OpKind, Placement, Schedule
from zbpipe.lowered import blocked_queues, mixed_up_messages, parse, validate_lowered
from zbpipe.runtime import _torch
from zbpipe.runtime.stages import is_split
from zbpipe.validate import require_valid


def require_options(name: str, options: Iterable[str], build: Callable[..., Any], more: Iterable[str] = ()) -> None:
    """Refuse options that a schedule does not take, because it or the installed torch has none such.

    Args:
        name: of the schedule, for the message.
        options: their names.
        build: the constructor, whose own arguments are known.
        more: names that it takes besides.

    Raises:
        ValueError: the message lists those that it takes.
    """
    arguments = set(inspect.signature(build).parameters) - {"self", "stage", "stages", "args", "options"}
    known = arguments | set(more)
    for option in options:
        if option not in known:
            allowed = ", ".join(sorted(known - {"n_microbatches", "loss_fn"}))
            raise ValueError(f"{name} on this torch has no option {option!r}; it takes: {allowed}")


def stages_per_rank(traits: registry.Traits, stages: Sequence[PipelineStage]) -> int | None:
    """As many as were built where the schedule leaves it open, else the schedule's own number."""
    return len(stages) if traits.any_stages_per_rank else None


def require_microbatches(name: str, n_microbatches: int, loss_fn: Callable[..., Tensor] | None) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"{name} needs a loss_fn that can be called as loss_fn(output, target), got {loss_fn!r}")
    if not isinstance(n_microbatches, int) or isinstance(n_microbatches, bool) or n_microbatches < 1:
        raise ValueError(
            f"{name} needs a whole number of microbatches from 1 on, got n_microbatches={n_microbatches!r}"
        )


def in_order(stages: PipelineStage | Sequence[PipelineStage], name: str) -> list[PipelineStage]:
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


def require_placement(stages: Sequence[PipelineStage], name: str, placement: Placement) -> None:
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


def require_matching_messages(runtime: _torch.PipelineSchedule, name: str, options: dict[str, Any]) -> None:
    """Late receives can change places with others from the same rank: on a V, F and I go the same way (torch 2.15)."""
    if not options.get("defer_pp_recv") or not isinstance(runtime, _torch.ScheduleRuntime):
        return
    mixed_up = mixed_up_messages(parse(_torch.lowered_table(runtime)))
    if mixed_up:
        raise ValueError(
            f"defer_pp_recv=True makes torch receive the messages of {name} in another order than they are sent, which"
            f" gives wrong gradients ({mixed_up[0]}): leave the option out"
        )


def require_scaled_once(runtime: _torch.PipelineSchedule, name: str) -> None:
    """torch divides the gradients of each stage by the number of microbatches, those that two stages share twice."""
    stages = _torch.stages_of(runtime)
    if not runtime.scale_grads or all(map(is_split, stages)):
        return
    owners: dict[int, int] = {}
    for stage in stages:
        for parameter_name, parameter in stage.submod.named_parameters():
            owner = owners.setdefault(id(parameter), stage.stage_index)
            if owner != stage.stage_index:
                raise ValueError(
                    f"stages {owner} and {stage.stage_index} share {parameter_name}, whose gradient {name} would divide"
                    " by the number of microbatches once for each: build it with scale_grads=False and divide the"
                    " loss, or use a schedule of zbpipe's with its own split, which divides once"
                )


def require_sound_messages(runtime: _torch.ScheduleRuntime, name: str) -> None:
    rows = parse(_torch.lowered_table(runtime))
    findings = validate_lowered(rows) or blocked_queues(rows)
    if findings:
        raise ValueError(
            f"schedule {name} with its messages would not run: {findings[0]}. Leave max_outstanding_sends out if it is"
            " set; otherwise this is a fault of zbpipe's"
        )


def require_runnable(schedule: Schedule, placement: Placement, n_microbatches: int) -> None:
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
