"""What NeMo AutoModel needs besides: it computes stages in functions of its own, and looks for the loss on one rank.

The private names of AutoModel, all in this one file. Written for 0.7.0. Nothing here imports it: what it has imported
itself by the time that it asks for a schedule is changed, and changed back for torch's schedules.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zbpipe.registry import Traits

_FUNCTIONAL = "nemo_automodel.components.distributed.pipelining.functional"
_RECIPE = "nemo_automodel.recipes.llm.train_ft"
_RECIPE_CLASS = "TrainFinetuneRecipeForNextTokenPrediction"

_originals: list[tuple[Any, str, Any]] = []
"""Owner, name and value of what was replaced."""


def adapt(traits: Traits) -> None:
    """Have AutoModel, if it is in this process, cut and place stages as `traits` says, and find the loss there."""
    restore()
    if functional := sys.modules.get(_FUNCTIONAL):
        _replace(functional, "calculate_virtual_stages", _Stages(traits).how_many)
        _replace(functional, "stage_ids_this_rank", _Stages(traits).on_rank)
    if recipe := getattr(sys.modules.get(_RECIPE, SimpleNamespace()), _RECIPE_CLASS, None):
        _replace(recipe, "_broadcast_from_last_pp_stage", _broadcast_from_last_stage(traits))


def restore() -> None:
    """Undo `adapt`."""
    while _originals:
        setattr(*_originals.pop())


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


class _Stages:
    """In the place of AutoModel's functions, with their arguments."""

    def __init__(self, traits: Traits) -> None:
        self._traits = traits

    def how_many(
        self, num_layers: int, layers_per_stage: int | None, pp_size: int, *unused: Any, **also_unused: Any
    ) -> tuple[int, int]:
        """In all, and on each rank.

        Raises:
            ValueError: `layers_per_stage` cuts the model into another number of stages than the schedule has.
        """
        traits = self._traits
        cut = None if layers_per_stage is None else math.ceil(num_layers / layers_per_stage)
        chosen = cut // pp_size if cut and cut % pp_size == 0 and traits.any_stages_per_rank else None
        num_stages = traits.place(pp_size, chosen).num_stages
        if cut is not None and cut != num_stages:
            raise ValueError(
                f"layers_per_stage={layers_per_stage} cuts the model's {num_layers} layers into {cut} stages, but"
                f" {traits.name} on {pp_size} ranks has {num_stages}: leave the field out"
            )
        return num_stages, num_stages // pp_size

    def on_rank(self, pp_rank: int, pp_size: int, num_stages: int, style: str = "loop") -> tuple[int, ...]:
        """Which ones.

        Raises:
            ValueError: the model was cut into another number of stages than the schedule has.
        """
        chosen = num_stages // pp_size if self._traits.any_stages_per_rank else None
        placement = self._traits.place(pp_size, chosen)
        if num_stages != placement.num_stages:
            raise ValueError(
                f"{self._traits.name} on {pp_size} ranks has {placement.num_stages} stages, but"
                f" module_fqns_per_model_part lists {num_stages}"
            )
        return placement.stages_on(pp_rank)


def _broadcast_from_last_stage(traits: Traits) -> Any:
    """AutoModel takes the loss from the last rank of a pipeline; a V has it on the first."""

    def broadcast(self: Any, tensor: Tensor) -> Tensor:
        group = self.device_mesh["pp"].get_group()
        owner = traits.place(dist.get_world_size(group)).rank_of[-1]
        dist.broadcast(tensor, src=dist.get_global_rank(group, owner), group=group)
        return tensor

    return broadcast
