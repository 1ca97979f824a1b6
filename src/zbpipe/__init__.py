"""zbpipe: zero-bubble pipeline schedules for torch.distributed.pipelining and TorchTitan.

Importing this package does not import torch; the names that need it are loaded when they are first used.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from zbpipe import algorithms  # noqa: F401 -- registers them
from zbpipe.algorithms.generate import generate
from zbpipe.costs.job import JobCosts
from zbpipe.costs.layers import Layer, LayerCosts
from zbpipe.costs.model import CostModel, Link
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.painter import set_painter as _set_painter
from zbpipe.schedule.registry import register, stage_indices
from zbpipe.simulator.offloading import offload
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import Finding, validate

if TYPE_CHECKING:
    from zbpipe.costs.file import dump_costs, load_costs
    from zbpipe.estimation.estimate import estimate
    from zbpipe.estimation.layers_file import load_layers
    from zbpipe.estimation.result import Estimate
    from zbpipe.estimation.workload import Workload
    from zbpipe.frameworks.installation import install, uninstall
    from zbpipe.planner.plan import plan
    from zbpipe.planner.result import Plan
    from zbpipe.runtime.auto import AutoSchedule
    from zbpipe.runtime.build import build_pipeline_schedule, from_first_rank

    # `zbpipe.runtime.classes` makes these classes by calls, so type checkers get their bases.
    from zbpipe.runtime.lean import LeanSchedule as ScheduleVHalfLean
    from zbpipe.runtime.lean import LeanSchedule as ScheduleVMinLean
    from zbpipe.runtime.lean import LeanSchedule as ScheduleZBH1Lean
    from zbpipe.runtime.lean import LeanSchedule as ScheduleZBVLean
    from zbpipe.runtime.measure.profiler import Profiler
    from zbpipe.runtime.optimizer.step import OptimizerStep
    from zbpipe.runtime.ranks.failures import PipelineError
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleVHalf
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleVMin
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZB1P
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZB2P
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZBH1
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZBH2
    from zbpipe.runtime.schedules import RegisteredSchedule as ScheduleZBV
    from zbpipe.runtime.split.products import GROUPED_MM, LINEAR, WeightProduct
    from zbpipe.runtime.verify.gradient_check import GradientCheck
    from zbpipe.runtime.verify.gradient_report import GradientReport
    from zbpipe.runtime.verify.one_process import check_gradients
    from zbpipe.simulator.memory import peak_bytes

_set_painter(lambda: import_module("zbpipe.views.pictures"))

try:
    __version__ = version("zbpipe")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "GROUPED_MM",
    "LINEAR",
    "AutoSchedule",
    "CostModel",
    "Estimate",
    "Finding",
    "GradientCheck",
    "GradientReport",
    "JobCosts",
    "Layer",
    "LayerCosts",
    "Link",
    "Op",
    "OpKind",
    "OptimizerStep",
    "PipelineError",
    "Placement",
    "Plan",
    "Profiler",
    "Schedule",
    "ScheduleVHalf",
    "ScheduleVHalfLean",
    "ScheduleVMin",
    "ScheduleVMinLean",
    "ScheduleZB1P",
    "ScheduleZB2P",
    "ScheduleZBH1",
    "ScheduleZBH1Lean",
    "ScheduleZBH2",
    "ScheduleZBV",
    "ScheduleZBVLean",
    "Timeline",
    "WeightProduct",
    "Workload",
    "build_pipeline_schedule",
    "check_gradients",
    "dump_costs",
    "estimate",
    "from_first_rank",
    "generate",
    "install",
    "load_costs",
    "load_layers",
    "offload",
    "peak_bytes",
    "plan",
    "register",
    "simulate",
    "stage_indices",
    "uninstall",
    "validate",
]


_LATER = {
    "costs_file": ("dump_costs", "load_costs"),
    "estimation.estimate": ("estimate",),
    "estimation.layers_file": ("load_layers",),
    "estimation.result": ("Estimate",),
    "estimation.workload": ("Workload",),
    "frameworks.installation": ("install", "uninstall"),
    "memory": ("peak_bytes",),
    "planner.plan": ("plan",),
    "planner.result": ("Plan",),
    "runtime.auto": ("AutoSchedule",),
    "runtime.build": ("build_pipeline_schedule", "from_first_rank"),
    "runtime.failures": ("PipelineError",),
    "runtime.gradient_check": ("GradientCheck",),
    "runtime.gradient_report": ("GradientReport",),
    "runtime.check_gradients": ("check_gradients",),
    "runtime.optimizer.step": ("OptimizerStep",),
    "runtime.split.products": ("GROUPED_MM", "LINEAR", "WeightProduct"),
    "runtime.measure.profiler": ("Profiler",),
}
"""What is loaded when it is first used, by module: it needs torch, or most users do not need it."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = next((module for module, names in _LATER.items() if name in names), "runtime.classes")
        return getattr(import_module(f"zbpipe.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
