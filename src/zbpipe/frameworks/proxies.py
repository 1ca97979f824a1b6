"""The proxy classes that frameworks get for the names of schedules.

All frameworks on torch's schedules treat a class alike. They give a rank one stage if it is a `PipelineScheduleSingle`,
and two or more otherwise. They place the stages in a V if it is `ScheduleZBVZeroBubble`. Then they call it. A proxy
class looks like a class of torch. Calling it builds the schedule with zbpipe's options.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any, cast

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
)

from zbpipe.frameworks import job_schedule
from zbpipe.frameworks.options import Options
from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.schedule.ir import Placement
from zbpipe.schedule.registry import Algorithm


class Proxy(ABCMeta):
    """Proxy classes of a schedule. A proxy equals torch's class with the same placement."""

    algorithm: Algorithm
    options: Options

    def __call__(cls, *args: Any, **kwargs: Any) -> pipelining.PipelineSchedule:
        """Build the schedule instead of an object of this class. The arguments are those of torch's class."""
        torchs = cls.__bases__[0]
        names = list(inspect.signature(torchs).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        stages = checks.sort_stages(given.pop(names[0], ()), cls.algorithm.name)
        n_microbatches, loss_fn = given.pop("n_microbatches", None), given.pop("loss_fn", None)
        job_schedule.require_size(cls.algorithm, cls.options, stages[0].group_size, n_microbatches, None, str)
        built = job_schedule.build(cls.algorithm, stages, n_microbatches, loss_fn, cls.options, **given)
        job_schedule.attach(built, cls.options)
        return built

    def __eq__(cls, other: object) -> bool:
        is_abstract = other in (PipelineScheduleSingle, PipelineScheduleMulti)
        return cls is other or (other is cls.__bases__[0] and not is_abstract)

    def __hash__(cls) -> int:
        return hash(cls.__bases__[0])


def proxy_of(algorithm: Algorithm, options: Options) -> type[pipelining.PipelineSchedule]:
    """The class that frameworks get for a schedule, with `options` in addition to the framework's arguments."""
    base = pipelining.torch_class(algorithm.name) if algorithm.source == "torch" else _nearest(algorithm)
    content = {"algorithm": algorithm, "options": options, "__module__": __name__}
    proxy = Proxy(algorithm.class_name, (base,), content)
    return cast(type[pipelining.PipelineSchedule], proxy)


def is_placed_by_frameworks(algorithm: Algorithm, placement: Placement) -> bool:
    """Whether frameworks that get the proxy class place the stages as the schedule does."""
    ranks = placement.num_ranks
    if _nearest(algorithm) is ScheduleZBVZeroBubble:
        return placement == Placement.v(ranks, 2)
    return placement == Placement.loop(ranks, max(placement.num_stages // ranks, 1))


def _nearest(algorithm: Algorithm) -> type[pipelining.PipelineSchedule]:
    """The torch class for which frameworks place the stages as the schedule does, if there is one."""
    if algorithm.stages_per_rank == 1:
        return PipelineScheduleSingle
    table = algorithm.table
    is_v = algorithm.placement == "v" or (table and table.placement == Placement.v(table.placement.num_ranks))
    return ScheduleZBVZeroBubble if is_v and algorithm.stages_per_rank == 2 else PipelineScheduleMulti
