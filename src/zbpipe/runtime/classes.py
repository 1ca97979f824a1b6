"""zbpipe's schedules as classes on torch's executor: use them where you use torch's own.

    schedule = zbpipe.ScheduleZBV(stages, n_microbatches=8, loss_fn=loss_fn)

Each is a `RegisteredSchedule` and takes its arguments. The lean schedules adapt to the activation checkpointing (see
`LeanSchedule`). `zbpipe.algorithms` has their definitions.
"""

from __future__ import annotations

from functools import cache

from zbpipe.runtime.adaptive import AutoSchedule, LeanSchedule
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.schedule.registry import Algorithm, resolve


def class_of(schedule: str | Algorithm) -> type[RegisteredSchedule]:
    """The class that runs a schedule of zbpipe or another package. A name always has the same class."""
    algorithm = resolve(schedule)
    return _find_class(algorithm) if algorithm.table is None else _make_class(algorithm)


@cache
def _find_class(algorithm: Algorithm) -> type[RegisteredSchedule]:
    return AutoSchedule if algorithm is AutoSchedule.algorithm else _make_class(algorithm)


def _make_class(algorithm: Algorithm) -> type[RegisteredSchedule]:
    base = LeanSchedule if algorithm.by_checkpointing else RegisteredSchedule
    name = algorithm.class_name
    example = f"    schedule = zbpipe.{name}(stages, n_microbatches=8, loss_fn=loss_fn)"
    doc = f"{algorithm.summary}\n\n{example}\n\nIts arguments are those of `{base.__name__}`."
    return type(name, (base,), {"algorithm": algorithm, "__module__": __name__, "__doc__": doc})


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
ScheduleZBH1Lean = class_of("ZBH1Lean")
ScheduleZBVLean = class_of("ZBVLean")
ScheduleVHalfLean = class_of("VHalfLean")
ScheduleVMinLean = class_of("VMinLean")
