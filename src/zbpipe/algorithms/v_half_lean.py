"""VHalf made lean: half of 1F1B's activations under any checkpointing, deferred gradients included.

Use it for models that do not fit with ZBVLean. V-Half (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362,
section 4.2) holds half of 1F1B's activations without checkpointing. Here W is deferred only as far as that half has
room. Otherwise I and W run as one op B.
"""

from zbpipe.algorithms._lean import find_within_share
from zbpipe.algorithms.v_half import v_half
from zbpipe.costs.model import CostModel
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Schedule
from zbpipe.schedule.registry import register


@register(
    "VHalfLean",
    placement="v",
    stages_per_rank=2,
    summary="the shortest step found in half of 1F1B's activations, with deferred gradients among them",
    by_checkpointing=True,
)
def v_half_lean(
    ranks: int, microbatches: int, costs: CostModel | None = None, transport: Transport | None = None
) -> Schedule:
    """The best of lean forms of VHalf and of a short search within (p + 2) // 2 of 1F1B's p activations.

    Working memory adds to that. If VHalf with whole backwards needs more, its need is the limit. Costs default to
    typical ones under selective checkpointing.

    >>> print(v_half_lean(2, 2))
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2B0 1I0 1W0 2I1 1I1 2W1 1W1
    """
    return find_within_share("VHalfLean", v_half(ranks, microbatches), (ranks + 2) // 2 / ranks, costs, transport)
