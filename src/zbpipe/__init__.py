"""zbpipe: zero-bubble pipeline schedules for torch.distributed.pipelining and TorchTitan.

Importing this package does not import torch; the names that need it are loaded when they are first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from zbpipe.costs import CostModel, Link
from zbpipe.ir import Op, OpKind, Placement, Schedule
from zbpipe.layers import Layer, LayerCosts
from zbpipe.registry import generate, register, stage_indices
from zbpipe.simulate import Timeline, simulate
from zbpipe.validate import Finding, validate

if TYPE_CHECKING:
    from zbpipe.planner.layers import LayerPlan, plan_layers
    from zbpipe.planner.plan import Plan, plan
    from zbpipe.runtime.failures import PipelineError
    from zbpipe.runtime.products import GROUPED_MM, LINEAR, WeightProduct
    from zbpipe.runtime.schedules import (
        ScheduleVHalf,
        ScheduleVMin,
        ScheduleZB1P,
        ScheduleZB2P,
        ScheduleZBH1,
        ScheduleZBH2,
        ScheduleZBV,
        build_pipeline_schedule,
    )

__version__ = version("zbpipe")

__all__ = [
    "GROUPED_MM",
    "LINEAR",
    "CostModel",
    "Finding",
    "Layer",
    "LayerCosts",
    "LayerPlan",
    "Link",
    "Op",
    "OpKind",
    "PipelineError",
    "Placement",
    "Plan",
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
    "generate",
    "plan",
    "plan_layers",
    "register",
    "simulate",
    "stage_indices",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in ("LayerPlan", "Plan", "plan", "plan_layers"):  # the search is not needed for anything else
        module = "layers" if name in ("LayerPlan", "plan_layers") else "plan"
        return getattr(import_module(f"zbpipe.planner.{module}"), name)
    if name == "PipelineError":
        return import_module("zbpipe.runtime.failures").PipelineError
    if name in __all__:  # public, but not imported above: it needs torch
        module = "products" if name in ("GROUPED_MM", "LINEAR", "WeightProduct") else "schedules"
        return getattr(import_module(f"zbpipe.runtime.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
