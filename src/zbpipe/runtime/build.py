"""Schedules by name on given stages, ready for `step`, and as classes to use instead of torch's own.

    schedule = zbpipe.ScheduleZBV(stages, n_microbatches=8, loss_fn=loss_fn)

Each class is a `RegisteredSchedule` with its arguments. ZB and ZBLoop adapt to the activation checkpointing (see
`AdaptiveSchedule`). `zbpipe.algorithms` has their definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from zbpipe.planner.result import Plan
from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.adaptive import AdaptiveSchedule, AutoSchedule
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split import stage as split
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import Algorithm, resolve

Made = TypeVar("Made", bound=Schedule | Plan)


def class_of(schedule: str | Algorithm) -> type[RegisteredSchedule]:
    """The class for a schedule of zbpipe or another package, always the same for a name."""
    algorithm = resolve(schedule)
    return _find_class(algorithm) if algorithm.table is None else _make_class(algorithm)


@cache
def _find_class(algorithm: Algorithm) -> type[RegisteredSchedule]:
    return AutoSchedule if algorithm is AutoSchedule.algorithm else _make_class(algorithm)


def _make_class(algorithm: Algorithm) -> type[RegisteredSchedule]:
    base = AdaptiveSchedule if algorithm.by_checkpointing else RegisteredSchedule
    name = algorithm.class_name
    example = f"    schedule = zbpipe.{name}(stages, n_microbatches=8, loss_fn=loss_fn)"
    doc = f"{algorithm.summary}\n\n{example}\n\nIts arguments are those of `{base.__name__}`."
    return type(name, (base,), {"algorithm": algorithm, "__module__": __name__, "__doc__": doc})


def build_pipeline_schedule(
    schedule: str | Schedule | Plan | Algorithm,
    stages: PipelineStage | Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Tensor] | None = None,
    **options: Any,
) -> pipelining.PipelineSchedule:
    """The schedule called `schedule`, or the schedule itself, on the given stages, ready for `step`.

    A pipeline of one rank with both stages of a V:

    >>> import torch, torch.distributed as dist, zbpipe
    >>> cpu = torch.device("cpu")
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> indices = zbpipe.stage_indices("ZBV", rank=0, num_ranks=1)
    >>> stages = [PipelineStage(torch.nn.Linear(8, 8), index, 2, cpu) for index in indices]
    >>> schedule = zbpipe.build_pipeline_schedule("ZBV", stages, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    >>> output = schedule.step(torch.ones(4, 8), target=torch.ones(4, 8))
    >>> stages[0].submod.weight.grad.shape
    torch.Size([8, 8])
    >>> dist.destroy_process_group()

    In a job, torchrun starts the ranks, and `rank` and `num_ranks` belong to the pipeline's process group. The first
    stage's rank passes the input to `step`, and the last stage's rank the target.

    Args:
        schedule: zbpipe's name or torch's, in any case. torch's names give torch's own classes. Or a `Schedule` or
            `Plan`, the same on all ranks (`zbpipe.from_first_rank`), for zbpipe's own class. The costs of a plan place
            its receives.
        stages: this rank's stages, which `zbpipe.stage_indices` names. A single stage needs no list.
        n_microbatches: the number of microbatches into which a batch is split.
        loss_fn: `(output, target) -> loss`.
        options: further arguments of the class, such as `scale_grads`, or `split_backward` for zbpipe's schedules; see
            `zbpipe.runtime.schedules.RegisteredSchedule`.

    Raises:
        ValueError: an unknown name, an option that the schedule does not take, or stages that do not fit it.
    """
    algorithm = resolve(schedule)
    if isinstance(schedule, Plan):
        options = {"costs": schedule.timeline.costs, **options}
    if algorithm.source == "zbpipe":
        return class_of(algorithm)(stages, n_microbatches, loss_fn, **options)
    runtime = pipelining.torch_class(algorithm.name)
    checks.require_options(algorithm.name, options, runtime.__init__)
    n_microbatches = checks.require_microbatches(algorithm.name, n_microbatches, loss_fn)
    ordered, _ = checks.place_stages(stages, algorithm)
    build: Callable[..., pipelining.PipelineSchedule] = runtime
    on_rank = ordered[0] if issubclass(runtime, PipelineScheduleSingle) else ordered
    built = build(on_rank, n_microbatches=n_microbatches, loss_fn=loss_fn, **options)
    checks.require_matching_messages(built, algorithm.name, options)
    require_splittable(built, algorithm.name)
    checks.require_scaled_once(built, algorithm.name)
    return built


def from_first_rank(
    make: Callable[[], Made], group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Made:
    """The first rank's result of `make` on all ranks, without a shared file: one rank plans.

        schedule = zbpipe.from_first_rank(lambda: zbpipe.plan(num_ranks, 16, costs))
        indices = zbpipe.stage_indices(schedule, rank=rank, num_ranks=num_ranks)

    All ranks of the group have to call it.

    >>> import torch.distributed as dist, zbpipe
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> zbpipe.from_first_rank(lambda: zbpipe.generate("ZBV", 4, 8)).num_ranks
    4
    >>> dist.destroy_process_group()

    Args:
        make: called only on the first rank of the group.
        group: ranks that get the result. Default: all ranks of the job.
        device: device through which the backend sends. Default: the CPU, or with NCCL the current GPU.

    Raises:
        ValueError: on all ranks, if `make` fails or returns anything but a Schedule or a Plan.
    """
    made: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            made = [make()]
            if not isinstance(made[0], (Schedule, Plan)):
                made = [f"it made {made[0]!r}, not a zbpipe.Schedule or a zbpipe.Plan"]
        except Exception as error:  # the other ranks wait for an answer
            made = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(made, group=group, group_src=0, device=device)
    if isinstance(made[0], str):
        raise ValueError(f"the first rank has no schedule for the others: {made[0]}")
    found: Made = made[0]
    return found


def require_options(algorithm: Algorithm, options: Iterable[str]) -> None:
    if algorithm.source == "torch":
        checks.require_options(algorithm.name, options, pipelining.torch_class(algorithm.name).__init__)
    else:
        checks.require_options(algorithm.name, options, class_of(algorithm).__init__, pipelining.SCHEDULE_OPTIONS)


def require_splittable(schedule: pipelining.PipelineSchedule, name: str) -> None:
    """Refuse one of torch's own schedules with I and W on compiled stages."""
    if isinstance(schedule, pipelining.ScheduleRuntime) and pipelining.has_split_backward(schedule):
        split.require_not_compiled(pipelining.stages_of(schedule), f"torch's own {name}")


ScheduleZB = class_of("ZB")
ScheduleZBLoop = class_of("ZBLoop")
ScheduleZBH1 = class_of("ZBH1")
ScheduleZBH2 = class_of("ZBH2")
ScheduleZB1P = class_of("ZB1P")
ScheduleZB2P = class_of("ZB2P")
ScheduleZBV = class_of("ZBV")
ScheduleVHalf = class_of("VHalf")
ScheduleVMin = class_of("VMin")
ScheduleDualPipeVSplit = class_of("DualPipeVSplit")
ScheduleInterleavedZeroBubbleSplit = class_of("InterleavedZeroBubbleSplit")
