"""Adapts NeMo AutoModel, which places stages with its own functions, and reads the loss from one rank.

All private names of AutoModel are in this file, written for 0.7.0. Nothing here imports AutoModel. `adapt` replaces
functions in its modules for zbpipe's schedules; for torch's schedules they are restored.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zbpipe.runtime.measure.profiler import find_placement
from zbpipe.schedule.registry import Algorithm, stages_for

KNOWN = "0.7.0"

_FUNCTIONAL = "nemo_automodel.components.distributed.pipelining.functional"
_BUFFER_POOL = "nemo_automodel.components.distributed.pipelining.recv_buffer_pool"
_RECIPES = "nemo_automodel.recipes.base_recipe"

_TAKES = {
    "calculate_virtual_stages": ("num_layers", "layers_per_stage", "pp_size"),
    "stage_ids_this_rank": ("pp_rank", "pp_size", "num_stages"),
}
"""Replaced functions of AutoModel, with their arguments in order."""

_originals: list[tuple[Any, str, Any]] = []
"""Owner, name and original value of each replaced function."""


def adapt(algorithm: Algorithm) -> None:
    """Make AutoModel, if this process has imported it, place the stages of `algorithm`, and find the loss there.

    ValueError if this version lacks these functions, or reuses receive buffers as 1F1B allows.
    """
    restore()
    functional = sys.modules.get(_FUNCTIONAL)
    if functional is None:
        return
    _require_known(functional, algorithm)
    _require_all_buffers(algorithm)
    _replace(functional, "calculate_virtual_stages", partial(_count_stages, algorithm))
    _replace(functional, "stage_ids_this_rank", partial(_stages_on_rank, algorithm))
    recipe = getattr(sys.modules.get(_RECIPES), "BaseRecipe", None)
    if recipe is not None and hasattr(recipe, "_dp_allreduce"):
        _replace(recipe, "_dp_allreduce", _send_to_all_ranks(recipe._dp_allreduce))


def restore() -> None:
    while _originals:
        setattr(*_originals.pop())


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _require_known(functional: Any, algorithm: Algorithm) -> None:
    for name, arguments in _TAKES.items():
        function = getattr(functional, name, None)
        if function is None or tuple(inspect.signature(function).parameters)[: len(arguments)] != arguments:
            found = getattr(sys.modules["nemo_automodel"], "__version__", "of an unknown version")
            raise ValueError(
                f"zbpipe cannot place the stages of {algorithm.name} in NeMo AutoModel {found}, which has no"
                f" {name}({', '.join(arguments)}, ...) in {_FUNCTIONAL}; it knows NeMo AutoModel {KNOWN}. Install"
                f" nemo-automodel=={KNOWN}, or use one of torch's schedules"
            )


def _require_all_buffers(algorithm: Algorithm) -> None:
    if getattr(sys.modules.get(_BUFFER_POOL), "_INSTALLED", False):
        raise ValueError(
            "pp_recv_buffer_pool makes NeMo AutoModel receive into as few buffers as 1F1B needs, which may be too few"
            f" for {algorithm.name}: omit it from distributed.pipeline"
        )


def _count_stages(
    algorithm: Algorithm,
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    *unused: Any,
    **also_unused: Any,
) -> tuple[int, int]:
    """The number of stages: in total, and on each rank. Takes AutoModel's arguments."""
    if layers_per_stage is not None:
        cut = f"layers_per_stage={layers_per_stage} cuts the model's {num_layers} layers into"
        each = algorithm.stages_of_cut(pp_size, math.ceil(num_layers / layers_per_stage), cut)
    else:
        each = stages_for(num_layers, pp_size)[0] if algorithm.chooses_stages else algorithm.stages_per_rank
    return each * pp_size, each


def _stages_on_rank(
    algorithm: Algorithm, pp_rank: int, pp_size: int, num_stages: int, style: str = "loop"
) -> tuple[int, ...]:
    each = algorithm.stages_of_cut(pp_size, num_stages, "module_fqns_per_model_part lists")
    return algorithm.place(pp_size, each).stages_on(pp_rank)


def _send_to_all_ranks(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Send the loss to all ranks: recipes report the last rank's reduced loss, but a wave has it on the first rank."""

    @wraps(reduce)
    def reduce_and_send(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        reduced = reduce(self, *args, **kwargs)
        if not getattr(self, "pp_enabled", False):
            return reduced
        group = self.device_mesh["pp"].get_group()
        owner = find_placement(self.pp.info.stages[0]).rank_of[-1]
        loss = reduced.to(self.dist_env.device)
        dist.broadcast(loss, src=dist.get_global_rank(group, owner), group=group)
        return loss.to(reduced.device)

    return reduce_and_send
