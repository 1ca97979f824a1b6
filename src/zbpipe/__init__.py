"""zbpipe: zero-bubble pipeline schedules for torch.distributed.pipelining and TorchTitan.

Importing this package does not import torch; the names that need it are loaded when they are first used.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from zbpipe.costs import CostModel, Link
from zbpipe.ir import Op, OpKind, Placement, Schedule
from zbpipe.job_costs import JobCosts
from zbpipe.layer_costs import Layer, LayerCosts
from zbpipe.registry import generate, register, stage_indices
from zbpipe.simulation import simulate
from zbpipe.timeline import Timeline
from zbpipe.validation import Finding, validate

if TYPE_CHECKING:
    from zbpipe.costs_file import dump_costs, load_costs
    from zbpipe.frameworks.installation import install, uninstall
    from zbpipe.planner.plan import plan
    from zbpipe.planner.result import Plan
    from zbpipe.runtime.auto import AutoSchedule
    from zbpipe.runtime.build import build_pipeline_schedule
    from zbpipe.runtime.failures import PipelineError
    from zbpipe.runtime.gradient_check import GradientCheck, GradientReport, check_gradients
    from zbpipe.runtime.measure.profiler import Profiler
    from zbpipe.runtime.schedules import (
        ScheduleVHalf,
        ScheduleVMin,
        ScheduleZB1P,
        ScheduleZB2P,
        ScheduleZBH1,
        ScheduleZBH2,
        ScheduleZBV,
    )
    from zbpipe.runtime.split.products import GROUPED_MM, LINEAR, WeightProduct

try:
    __version__ = version("zbpipe")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "GROUPED_MM",
    "LINEAR",
    "AutoSchedule",
    "CostModel",
    "Finding",
    "GradientCheck",
    "GradientReport",
    "JobCosts",
    "Layer",
    "LayerCosts",
    "Link",
    "Op",
    "OpKind",
    "PipelineError",
    "Placement",
    "Plan",
    "Profiler",
    "Schedule",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZB1P",
    "ScheduleZB2P",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBV",
    "Timeline",
    "WeightProduct",
    "build_pipeline_schedule",
    "check_gradients",
    "dump_costs",
    "generate",
    "install",
    "load_costs",
    "plan",
    "register",
    "simulate",
    "stage_indices",
    "uninstall",
    "validate",
]


_LATER = {
    "costs_file": ("dump_costs", "load_costs"),
    "frameworks.installation": ("install", "uninstall"),
    "planner.plan": ("plan",),
    "planner.result": ("Plan",),
    "runtime.auto": ("AutoSchedule",),
    "runtime.build": ("build_pipeline_schedule",),
    "runtime.failures": ("PipelineError",),
    "runtime.gradient_check": ("GradientCheck", "GradientReport", "check_gradients"),
    "runtime.split.products": ("GROUPED_MM", "LINEAR", "WeightProduct"),
    "runtime.measure.profiler": ("Profiler",),
}
"""What is loaded when it is first used, by module: it needs torch, or most users do not need it."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = next((module for module, names in _LATER.items() if name in names), "runtime.schedules")
        return getattr(import_module(f"zbpipe.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
