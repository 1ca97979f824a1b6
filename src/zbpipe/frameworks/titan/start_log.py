"""Lines of a job's log before the first step: the schedule, the cut of the model, memory and messages.

The schedule itself logs a line on FSDP. Imports no torchtitan.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from zbpipe.costs.job import memory_of_1f1b, resolve_limits
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import usual_costs
from zbpipe.estimation.cut import Choice, describe
from zbpipe.frameworks.titan.layer_split import LayerSplit
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.schedule.ir import Placement, count_noun
from zbpipe.simulator.simulation import simulate

_SPREAD = 0.1
"""Relative excess of a rank's work over the average that causes a warning."""
_ROUNDING = 1e-6

logger = logging.getLogger(__name__)


def log_pipeline(schedule: RegisteredSchedule, chosen: Choice, split: LayerSplit, tensor: int) -> None:
    """Log what all ranks run, on the first one. `tensor` is the degree of tensor parallelism."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    placement, number = schedule.placement, schedule.schedule.num_microbatches
    words = chosen.words or describe(placement)
    if 2 * placement.num_ranks <= number < placement.num_stages:
        words += f". That is enough: {placement.num_ranks} ranks need 2 each, also with {placement.num_stages} stages"
    size = schedule.algorithm.name, count_noun(number, "microbatch")
    logger.info("Using zbpipe's pipeline schedule %s with %s: %s", *size, words)
    costs = schedule.lists.costs or usual_costs(placement, split.checkpointing, tensor, split.work(placement))
    _log_cut(placement, split, costs)
    logger.info("Memory of the worst rank, predicted %s", _describe_memory(schedule, split, tensor, costs))
    logger.info("Messages: %s receives, for the transport %r", schedule.receives, str(schedule.transport))


def _log_cut(placement: Placement, split: LayerSplit, costs: CostModel) -> None:
    of_stages = list(map(sum, zip(costs.f, costs.i, costs.w, strict=True)))
    of_ranks = placement.sum_by_rank(of_stages)
    unit = sum(of_ranks)
    words = f"{split.describe(placement)}. Work by rank: {', '.join(f'{each / unit:.1%}' for each in of_ranks)}"
    excess = max(of_ranks) / unit * len(of_ranks) - 1
    if excess > _SPREAD:
        slowest = of_ranks.index(max(of_ranks))
        words += f"; all wait for rank {slowest}, with {excess:.0%} more than average: try other stages per rank, or"
        words += " another cut"
    level = logging.WARNING if excess > _SPREAD else logging.INFO
    logger.log(level, "Layers by stage %s. parallelism.module_fqns_per_model_part replaces this cut", words)


def _describe_memory(schedule: RegisteredSchedule, split: LayerSplit, tensor: int, costs: CostModel) -> str:
    """The prediction's conditions, the peak of activations, deferred gradients and working memory, and the limit."""
    lists, placement, number = schedule.lists, schedule.placement, schedule.schedule.num_microbatches
    peak = max(simulate(schedule.schedule, costs).peak_memory)
    if costs.in_bytes:
        words = f"from measured costs: {peak / 2**30:.3g} GiB"
    else:
        usual = memory_of_1f1b(lambda loop: usual_costs(loop, split.checkpointing, tensor), placement.num_ranks, number)
        degree = f" and tensor parallelism over {tensor} ranks" if tensor > 1 else ""
        words = f"{split.checkpointing.words}{degree}: {peak / usual:.2f}x of 1F1B's"
    if lists.limit is not None:
        return f"{words}; limit {lists.limit.written}"
    if not schedule.algorithm.by_checkpointing:
        return words
    if peak <= max(resolve_limits(None, placement, costs, number)) * (1 + _ROUNDING):
        return f"{words}; limit 1x, the default"
    return f"{words}; limit: that of Interleaved1F1B, whose step would be shorter than a step in 1F1B's memory"
