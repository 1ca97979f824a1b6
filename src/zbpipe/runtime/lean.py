"""The lean schedules as classes on torch's executor: they adapt to the job's activation checkpointing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs.memory_limit import MemoryLimit, MemoryLimitLike
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import Checkpointing, usual_costs
from zbpipe.runtime import checks
from zbpipe.runtime._torch import checkpoints, hooks, pipelining
from zbpipe.runtime._torch.attributes import plain_attribute
from zbpipe.runtime.ranks import agreement
from zbpipe.runtime.schedules import RegisteredSchedule

logger = logging.getLogger(__name__)


class LeanSchedule(RegisteredSchedule):
    """A schedule that defers W only where memory permits. The amount depends on the checkpointing.

        schedule = zbpipe.ScheduleZBVLean(stages, n_microbatches=8, loss_fn=loss_fn)

    It takes the arguments of all zbpipe schedules, and

    Args:
        stages: all stages of this rank, already wrapped for checkpointing.
        checkpointing: "none", "selective" or "full", the same on all ranks. By default detected in the modules (see
            `checkpointing_of`). Before the first step all ranks agree on the detected one that keeps least.
        costs: measured costs, the same on all ranks, instead of typical costs for the checkpointing.

    Raises:
        ValueError: as for every schedule, or an unknown checkpointing.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *args: Any,
        checkpointing: Checkpointing | str | None = None,
        costs: CostModel | None = None,
        memory_limit: MemoryLimitLike | None = None,
        **options: Any,
    ) -> None:
        limit = MemoryLimit.parse(memory_limit, costs_are_known=costs is not None)
        found = None if checkpointing is None else Checkpointing.parse(checkpointing)
        is_sure = costs is not None or found is not None
        if costs is None:
            stages, placement = checks.place_stages(stages, self.algorithm)
            found = found or checkpointing_of(stages)
            costs = usual_costs(placement, found)
        super().__init__(stages, n_microbatches, loss_fn, *args, costs=costs, memory_limit=limit, **options)
        self.checkpointing = found
        """Checkpointing for which the schedule is made; None with measured costs."""
        self._unsure = None if is_sure else self.schedule
        """A schedule that other ranks may not have made."""

    def settle(self) -> None:
        """Agree on the checkpointing with all ranks, because a rank may have nothing but an embedding."""
        unsure = self._unsure
        if unsure is None or unsure is not self.for_microbatches(self.sizes.usual) or self.checkpointing is None:
            return
        stage, name = hooks.stages_of(self)[0], self.algorithm.name
        question = f"{name} with {pipelining.num_microbatches(self)} microbatches, checkpointing: "
        words = agreement.gather_answers(question, self.checkpointing, stage.group, stage.device)
        agreed = max(map(Checkpointing.parse, words), key=list(Checkpointing).index)
        logger.info("%s is made for %s activation checkpointing, as the modules show", name, agreed)
        self.make_for(agreed)  # only now: a rank that refuses this step asks again in the next one

    def make_for(self, checkpointing: Checkpointing, tensor: int = 1) -> None:
        """Remake the schedule for the checkpointing of all ranks, unless it is made for measured costs.

        `tensor` is the degree of tensor parallelism.
        """
        self._unsure = None
        if self.checkpointing is not None and (self.checkpointing is not checkpointing or tensor > 1):
            self.checkpointing = checkpointing
            self.remake(usual_costs(self.placement, checkpointing, tensor))


def checkpointing_of(stages: Sequence[PipelineStage]) -> Checkpointing:
    """The activation checkpointing of these stages, from torch's `checkpoint_wrapper` around their layers.

    It is selective with a `context_fn`, as in TorchTitan, or if layers of the same class are not wrapped. Otherwise it
    is full. Models of the transformers library declare it (`gradient_checkpointing`). Other calls of
    `torch.utils.checkpoint` in a forward are not detected: pass `checkpointing=`.
    """
    modules = [module for stage in stages for module in stage.submod.modules()]
    parts = [part for stage in stages for part in checkpoints.find_checkpointed(stage.submod)]
    if not parts:
        says_so = any(plain_attribute(module, "gradient_checkpointing") is True for module in modules)
        return Checkpointing.FULL if says_so else Checkpointing.NONE
    inside = {id(module) for wrapped, _ in parts for module in wrapped.modules()}
    classes = {type(wrapped) for wrapped, _ in parts}
    some_are_not = any(type(module) in classes and id(module) not in inside for module in modules)
    keeps_some = any(keeps for _, keeps in parts)
    return Checkpointing.SELECTIVE if keeps_some or some_are_not else Checkpointing.FULL
