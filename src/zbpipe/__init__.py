"""zbpipe: zero-bubble pipeline schedules for torch.distributed.pipelining and TorchTitan.

Names that need torch are loaded at first use, so importing this package does not import torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from zbpipe import algorithms  # noqa: F401 -- registers them
from zbpipe.algorithms.generate import generate
from zbpipe.costs import CostModel
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import register, stage_indices
from zbpipe.schedule.user_code import NEEDS_TORCH
from zbpipe.simulator import simulate, validate

if TYPE_CHECKING:
    from zbpipe.costs.file import load_costs
    from zbpipe.estimation.estimate import estimate
    from zbpipe.frameworks.installation import install
    from zbpipe.frameworks.whole_model.pipeline import pipeline
    from zbpipe.planner.packing import pack
    from zbpipe.planner.plan import plan
    from zbpipe.planner.result import Plan

    # `zbpipe.runtime.build` makes these classes by calls, so type checkers get their bases.
    from zbpipe.runtime.adaptive import AdaptiveSchedule as ScheduleZB
    from zbpipe.runtime.adaptive import AdaptiveSchedule as ScheduleZBLoop
    from zbpipe.runtime.build import build_pipeline_schedule, from_first_rank
    from zbpipe.runtime.measure.profiler import Profiler
    from zbpipe.runtime.optimizer.step import OptimizerStep
    from zbpipe.runtime.ranks.failures import PipelineError
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleDualPipeVSplit
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleInterleavedZeroBubbleSplit
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleVHalf
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleVMin
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZB1P
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZB2P
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZBH1
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZBH2
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZBV
    from zbpipe.runtime.verify import GradientCheck, check_gradients

try:
    __version__ = version("zbpipe")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

_LATER = {
    "costs.file": ("load_costs",),
    "estimation.estimate": ("estimate",),
    "frameworks.installation": ("install",),
    "frameworks.whole_model.pipeline": ("pipeline",),
    "planner.packing": ("pack",),
    "planner.plan": ("plan",),
    "planner.result": ("Plan",),
    "runtime.build": (
        *("build_pipeline_schedule", "from_first_rank"),
        *("ScheduleDualPipeVSplit", "ScheduleInterleavedZeroBubbleSplit"),
        *("ScheduleVHalf", "ScheduleVMin", "ScheduleZB1P", "ScheduleZB2P"),
        *("ScheduleZB", "ScheduleZBH1", "ScheduleZBH2", "ScheduleZBLoop"),
        "ScheduleZBV",
    ),
    "runtime.measure.profiler": ("Profiler",),
    "runtime.optimizer.step": ("OptimizerStep",),
    "runtime.ranks.failures": ("PipelineError",),
    "runtime.verify": ("GradientCheck", "check_gradients"),
}
"""Names loaded at first use, by module."""

__all__ = [
    "CostModel",
    "GradientCheck",
    "Op",
    "OpKind",
    "OptimizerStep",
    "PipelineError",
    "Placement",
    "Plan",
    "Profiler",
    "Schedule",
    "ScheduleDualPipeVSplit",
    "ScheduleInterleavedZeroBubbleSplit",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZB",
    "ScheduleZB1P",
    "ScheduleZB2P",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBLoop",
    "ScheduleZBV",
    "build_pipeline_schedule",
    "check_gradients",
    "estimate",
    "from_first_rank",
    "generate",
    "install",
    "load_costs",
    "pack",
    "pipeline",
    "plan",
    "register",
    "simulate",
    "stage_indices",
    "validate",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            try:
                return getattr(import_module(f"zbpipe.{module}"), name)
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise ModuleNotFoundError(f"zbpipe.{name} {NEEDS_TORCH}", name="torch") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
