"""Checks of all input: arguments, options, stages, orders and batches. A ValueError names the value and a valid one."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs.model import Receives
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime._torch.shapes import Shapes, describe_inputs, write
from zbpipe.runtime.split.stage import SplitBackward, find_split
from zbpipe.schedule import registry
from zbpipe.schedule.ir import OpKind, Placement, Schedule, require_whole
from zbpipe.simulator.actions import Rows
from zbpipe.simulator.offloading import Offload
from zbpipe.simulator.validation import find_blocked_queues, require_valid, validate_lowered

logger = logging.getLogger(__name__)

Spell = Callable[[str], str]
"""Converts an option's name to the user's spelling of it."""

LISTS = ("arg_mbs", "kwarg_mbs", "target_mbs")
"""Arguments of torch's `step` with a value for each microbatch."""
_WAY_OUT = (
    "give every step a batch of the same size, a multiple of n_microbatches (for a DataLoader, drop_last=True), or give"
    " step(microbatches=) on all ranks"
)


def require_schedule(what: str, schedule: object) -> None:
    if not isinstance(schedule, pipelining.PipelineSchedule):
        raise ValueError(
            f"{what} takes a schedule on its stages, from zbpipe.build_pipeline_schedule, got {schedule!r}"
        )


def require_known(who: str, options: Iterable[str], known: set[str]) -> None:
    """Refuse the first of `options` that is not `known`. The message lists the known ones, and names the nearest."""
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}? It" if near else "it"
            raise ValueError(f"{who} has no option {option!r}; {hint} takes: {', '.join(sorted(known))}")


def require_above_0(name: str, number: object) -> None:
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if number is not None and not (is_number and number > 0):  # type: ignore[operator]
        raise ValueError(f"{name} has to be a number above 0, or None for the default, got {name}={number!r}")


def require_callable(**functions: object) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(f"{name} has to be a function, got {function!r}")


def require_group(group: object) -> None:
    """Refuse anything but a process group, or None for all ranks of the job."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group has to be a process group of torch.distributed, or None for all ranks, got {group!r}")


def require_path(name: str, path: Any) -> None:
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{name} has to be the path of a file, got {path!r}")


def require_yes_or_no(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} has to be True or False, got {value!r}")


def require_writable(file: str | Path) -> None:
    """Refuse an unwritable file before the job runs. Creates the folder if it is missing."""
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opening in append mode does not change an existing file.
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink(missing_ok=True)  # another rank may try the same file
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror}; name another file") from None


def require_options(name: str, options: Iterable[str], build: Callable[..., Any], more: Iterable[str] = ()) -> None:
    """Refuse options that the schedule lacks with the installed torch: neither arguments of `build` nor in `more`."""
    no_options = {"self", "stage", "stages", "n_microbatches", "loss_fn", "args", "options"}
    known = set(inspect.signature(build).parameters) - no_options | set(more) - no_options
    require_known(f"{name} on this torch", options, known)


def require_microbatches(name: str, n_microbatches: int, loss_fn: Callable[..., Tensor] | None) -> int:
    """The number of microbatches as an int. Refuses anything else, such as a loss_fn."""
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"{name} needs a loss_fn that can be called as loss_fn(output, target), got {loss_fn!r}")
    (n_microbatches,) = require_whole(1, n_microbatches=n_microbatches)
    return n_microbatches


def place_stages(
    stages: PipelineStage | Sequence[PipelineStage], algorithm: registry.Algorithm
) -> tuple[list[PipelineStage], Placement]:
    """A rank's stages in ascending order, and the placement of all stages, if all ranks have as many."""
    name, given = algorithm.name, cast(Any, () if stages is None else stages)
    listed = list(given) if isinstance(given, Iterable) else [given]
    if not listed:
        raise ValueError(f"{name} got no stages; zbpipe.stage_indices({name!r}, rank=..., num_ranks=...) names them")
    for stage in listed:
        if not isinstance(stage, pipelining.Stage):
            raise ValueError(
                f"{name} runs stages, got {type(stage).__name__}: wrap each part of the model in a"
                " torch.distributed.pipelining.PipelineStage"
            )
    # torch's first step passes shapes from stage to stage in this order.
    ordered = sorted(listed, key=lambda stage: stage.stage_index)
    groups = [(stage.group_rank, stage.group_size) for stage in ordered]
    if len(set(groups)) > 1:
        raise ValueError(f"{name}: all stages of a rank have to be in one process group, got (rank, size) {groups}")
    rank, group_size = groups[0]
    placement = algorithm.place(group_size, len(ordered) if algorithm.any_stages_per_rank else None)
    expected = placement.stages_on(rank)
    found = tuple(stage.stage_index for stage in ordered)
    totals = {stage.num_stages for stage in ordered}
    if found != expected or totals != {placement.num_stages}:
        loop = Placement.loop(group_size, len(found))
        is_loop = found == loop.stages_on(rank) and totals == {loop.num_stages}
        raise ValueError(
            f"{name} on {group_size} pipeline ranks has {placement.num_stages} stages in all, and rank {rank} holds"
            f" the stages {list(expected)}; got the stages {list(found)} built with num_stages={sorted(totals)}."
            f" Build those that zbpipe.stage_indices({name!r}, rank={rank}, num_ranks={group_size}) names"
            f"{', or take ZBLoop, which runs yours' if is_loop else ''}"
        )
    return ordered, placement


def require_matching_messages(runtime: pipelining.PipelineSchedule, name: str, options: dict[str, Any]) -> None:
    """Refuse torch's late receives in its multi-stage schedules."""
    # On a V, messages of F and I go in the same direction between two ranks, so a rank can receive one as the other
    # (torch 2.15). In other placements a rank can wait for a message that its peer sends only after it has received
    # one.
    if options.get("defer_pp_recv") and isinstance(runtime, pipelining.ScheduleRuntime):
        raise ValueError(
            f"defer_pp_recv=True makes torch receive the messages of {name} in another order than they are sent, or so"
            " late that ranks wait for each other: omit the option, or use one of zbpipe's schedules with"
            " receives='late'"
        )


def require_step(
    runtime: pipelining.ScheduleRuntime, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, *, is_first: bool
) -> None:
    """Refuse a step that all ranks can refuse alike: without a loss, an empty batch, a target that does not split into
    equal microbatches, and in the first step parameters that cannot be trained."""
    # torch before 2.14 would take lists of microbatches as keyword inputs, and split them.
    lists = sorted(kwargs.keys() & set(LISTS))
    if lists and not pipelining.TAKES_MICROBATCHES:
        raise ValueError(
            f"{', '.join(lists)}: microbatches as lists need torch 2.14 or newer, and this is {torch.__version__}:"
            " call step(input, target=target), which splits both"
        )
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor) and each.dim() and not each.size(0):
            raise ValueError(f"the batch is empty, with an input of shape {tuple(each.shape)}: {_WAY_OUT}")
    if pipelining.trains(runtime):
        _require_training(runtime, is_first)
    if target is not None and not isinstance(target, Tensor):
        raise ValueError(
            f"a target of type {type(target).__name__} cannot be split into microbatches: give a tensor, or from torch"
            " 2.14 on one target of any type for each microbatch: step(target_mbs=[...], arg_mbs=[...])"
        )
    n_microbatches = pipelining.num_microbatches(runtime)
    if isinstance(target, Tensor) and (not target.dim() or not target.size(0) or target.size(0) % n_microbatches):
        raise ValueError(
            f"a target of shape {tuple(target.shape)} cannot be split into {n_microbatches} equal microbatches:"
            f" {_WAY_OUT}"
        )


def read_size(given: Any) -> int | tuple[int, ...] | None:
    """`microbatches=` of a step: their number, or the number of tokens of each."""
    if not isinstance(given, (list, tuple)):
        return None if given is None else require_whole(1, microbatches=given)[0]
    for number, tokens in enumerate(given):
        if type(tokens) is not int or tokens < 1:
            raise ValueError(f"microbatches={[*given]}: microbatch {number} needs at least one token, got {tokens!r}")
    if not given:
        raise ValueError("microbatches=[] has no microbatch: give the number of tokens of each")
    return tuple(given)


def _require_training(runtime: pipelining.ScheduleRuntime, is_first: bool) -> None:
    if pipelining.loss_fn_of(runtime) is None:
        raise ValueError(
            "a training step needs a loss_fn on every rank, and this schedule was built without one: give it loss_fn,"
            " or call eval, which runs forwards only"
        )
    if pipelining.needs_autograd(runtime) and not torch.is_grad_enabled():
        how = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ValueError(f"a training step computes gradients, but it is called under torch.{how}(): call eval there")
    for stage in pipelining.stages_of(runtime) if is_first else ():
        for name, parameter in stage.submod.named_parameters():
            if parameter.requires_grad and parameter.is_inference():
                raise ValueError(
                    f"{name} of stage {stage.stage_index} was made under torch.inference_mode(), so it cannot be"
                    " trained: build the model outside of it"
                )


def require_inputs(runtime: pipelining.ScheduleRuntime, inputs: Any, keyword_inputs: Any, targets: Any) -> None:
    """Refuse a step with missing or empty microbatches."""
    n_microbatches = pipelining.num_microbatches(runtime)
    for each, what in ((inputs, "inputs"), (keyword_inputs, "keyword inputs"), (targets, "targets")):
        if each is not None and len(each) != n_microbatches:
            raise ValueError(f"a step has {n_microbatches} microbatches, but the {what} give {len(each)}: {_WAY_OUT}")
    stages = pipelining.stages_of(runtime)
    if stages[0].is_first and not any(inputs or ()) and not any(keyword_inputs or ()):
        raise ValueError("stage 0 is on this rank, and the step got no input for it: call step(input, ...) here")
    if stages[-1].is_last and pipelining.loss_fn_of(runtime) is not None and targets is None:
        raise ValueError(
            "the last stage is on this rank, and the step got no target for its loss: call step(..., target=...) here"
        )
    for number, microbatch in enumerate(inputs or () if stages[0].is_first else ()):
        for each in microbatch:
            if isinstance(each, Tensor) and each.dim() and not each.numel():
                raise ValueError(
                    f"microbatch {number} is empty, with an input of shape {tuple(each.shape)}: leave it out, and give"
                    " step(microbatches=) on all ranks"
                )


def require_usual_shapes(runtime: pipelining.ScheduleRuntime, inputs: Any, usual: Shapes | None) -> None:
    """Refuse microbatches with different shapes, or with other than the `usual` ones, in steps without
    `microbatches=`."""
    stage = pipelining.stages_of(runtime)[0]
    if not stage.is_first or not inputs:
        return
    of_first = describe_inputs(inputs[0])
    for number, microbatch in enumerate(inputs):
        if (found := describe_inputs(microbatch)) != of_first:
            raise ValueError(
                f"microbatch {number} has inputs of the shapes {write(found)}, but microbatch 0 has"
                f" {write(of_first)}: {_WAY_OUT}"
            )
    if stage.group_size > 1 and usual and of_first and of_first != usual:
        raise ValueError(
            f"the microbatches have inputs of the shapes {write(of_first)}, but the messages between ranks are set up"
            f" for those of the first step, {write(usual)}: {_WAY_OUT}"
        )


def require_weighed_loss(runtime: pipelining.ScheduleRuntime, inputs: Iterable[Shapes]) -> None:
    """Refuse a mean over microbatches with different shapes."""
    first, other = [*dict.fromkeys(inputs), None][:2]
    if runtime.scale_grads and pipelining.trains(runtime) and first and other:
        raise ValueError(
            f"the microbatches have inputs of the shapes {write(first)} and {write(other)}, and scale_grads weighs all"
            " of them alike: build the schedule with scale_grads=False, and let loss_fn return a sum over tokens,"
            " divided by the number of tokens of the whole step"
        )


def require_scaled_once(runtime: pipelining.PipelineSchedule, name: str) -> None:
    """Refuse a parameter that two stages share, because torch would scale its gradient once per stage."""
    stages = pipelining.stages_of(runtime)
    if not runtime.scale_grads or all(map(find_split, stages)):
        return
    owners: dict[int, int] = {}
    for stage in stages:
        for parameter_name, parameter in stage.submod.named_parameters():
            owner = owners.setdefault(id(parameter), stage.stage_index)
            if owner != stage.stage_index:
                raise ValueError(
                    f"stages {owner} and {stage.stage_index} share {parameter_name}, whose gradient {name} would divide"
                    " by the number of microbatches once for each: build it with scale_grads=False and divide the"
                    " loss, or use one of zbpipe's schedules with zbpipe's split, which divides once"
                )


def require_sound_messages(rows: Rows, schedule: Schedule) -> None:
    """Refuse a schedule with sends and receives that do not match, or deadlock."""
    findings = validate_lowered(rows) or find_blocked_queues(rows)
    if findings:
        raise ValueError(
            f"schedule {schedule.name} with its messages would not run: {findings[0]}. Omit max_outstanding_sends if it"
            " is set; otherwise this is a bug of zbpipe: please report it"
        )


def read_receives(receives: Receives | str | None, options: Mapping[str, Any]) -> Receives | None:
    """The user's choice of when to post receives; None leaves it to zbpipe."""
    # With `max_outstanding_sends` torch places waits between its own early receives, so that option implies these.
    if receives is not None:
        return Receives.parse(receives)
    return None if options.get("max_outstanding_sends") is None else Receives.EARLY


def require_one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, known))}")


def require_same_placement(schedule: Schedule, placement: Placement) -> None:
    """Refuse to adopt a schedule for stages in another placement."""
    if schedule.placement != placement:
        raise ValueError(
            f"schedule {schedule.name} puts its stages on the ranks {schedule.placement.rank_of}, but they are on"
            f" {placement.rank_of}: adopt one with this placement, or build a new schedule on new stages"
        )


def require_inferred_shapes(runtime: pipelining.OwnRuntime) -> None:
    """Refuse microbatches of other shapes if torch cannot infer them."""
    if not pipelining.can_infer_shapes(runtime):
        raise ValueError(
            "the microbatches have other shapes than in earlier steps, and the stages were built for fixed shapes"
            " (input_args and output_args of PipelineStage, a traced model, or torch before 2.13): give all steps the"
            " same shapes, or omit these arguments"
        )


def require_offload(what: Offload | None, split_backward: SplitBackward, spell: Spell = str) -> None:
    """Refuse to offload deferred gradients of torch's own split, which keeps them in autograd's graph."""
    if split_backward == "autograd" and what not in (None, Offload.ACTIVATIONS):
        raise ValueError(
            f"{spell('offload')} {what} takes deferred gradients, and only zbpipe's split frees them: omit"
            f" {spell('split_backward')} autograd, or use {spell('offload')} activations"
        )


def require_pairs(schedule: Schedule, stages: Sequence[pipelining.Stage]) -> None:
    if OpKind.OI in schedule.kinds and not all(map(find_split, stages)):
        raise ValueError(
            f"schedule {schedule.name} offloads deferred gradients, and only zbpipe's split frees them: keep"
            " split_backward='deferred', or use offload='activations'"
        )


def require_runnable(schedule: Schedule) -> None:
    require_valid(schedule)
    last = schedule.placement.num_stages - 1
    forwards = [op.microbatch for op in schedule.ops[schedule.placement.rank_of[last]] if op[:2] == (last, OpKind.F)]
    if forwards != sorted(forwards):
        raise ValueError(
            f"schedule {schedule.name} runs the last stage's forwards in the order {forwards}; torch numbers the losses"
            " in that order, so it has to be ascending"
        )
