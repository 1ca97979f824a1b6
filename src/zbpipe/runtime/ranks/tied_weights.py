"""A warning for tied weights that the pipeline separates: embedding and head on different ranks.

On one rank, a tied weight is one tensor, which is correct. On two ranks, each copy gets only its own part of the
gradient, so the copies drift apart. No single rank can see that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpipe.runtime._torch import autograd, pipelining
from zbpipe.runtime._torch.attributes import plain_attribute
from zbpipe.runtime._torch.tensor_data import HIDDEN, fingerprint, own_part
from zbpipe.schedule.ir import Placement

_NOT_KEPT = "training will not keep them equal, since each rank adds only its own gradients"
_WAY_OUT = (
    "use a V schedule (ZBV, VHalf, VMin), which puts both on rank 0, and tie them there, or untie them, or sum their"
    " gradients in your job"
)

logger = logging.getLogger(__name__)


_Weights = dict[tuple[object, ...], tuple[str, bool]]
"""A matrix's name within its stage, and whether it trains, by shape, dtype and fingerprint."""


class _Description(NamedTuple):
    embeddings: _Weights
    """Weights of stage 0."""
    heads: _Weights
    """Weights of the last stage that could be tied to them."""
    is_tied: bool
    """Whether a config in one of these two stages declares tied weights, as Hugging Face's do."""


def warn_if_parted(stages: Sequence[pipelining.Stage], placement: Placement) -> None:
    """Warn the ranks with the first and the last stage if they have a tied weight. All ranks have to call this."""
    # Sharded weights (FSDP, tensor parallelism) are compared shard by shard.
    group, first, last = stages[0].group, placement.rank_of[0], placement.rank_of[-1]
    if first == last or dist.get_backend(group) == "fake" or plain_attribute(stages[0].submod, "sums_tied_gradients"):
        return
    mine = _Description(
        _find_weights(stages[0].submod, (nn.Embedding,)) if stages[0].is_first else {},
        _find_weights(stages[-1].submod, (nn.Embedding, nn.Linear)) if stages[-1].is_last else {},
        any(
            plain_attribute(plain_attribute(part, "config"), "tie_word_embeddings") is True
            for stage in stages
            if stage.is_first or stage.is_last
            for part in stage.submod.modules()
        ),
    )
    descriptions = [mine] * placement.num_ranks
    dist.all_gather_object(descriptions, mine, group=group)
    if stages[0].group_rank not in (first, last):
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    where = f"stage 0 (rank {ranks[first]})", f"stage {placement.num_stages - 1} (rank {ranks[last]})"
    if finding := _find_tied(descriptions[first], descriptions[last], *where):
        logger.warning("%s; %s: %s", finding, _NOT_KEPT, _WAY_OUT)


def _find_tied(first: _Description, last: _Description, of_0: str, of_last: str) -> str | None:
    for identity, (embedding, trains) in first.embeddings.items():
        head, head_trains = last.heads.get(identity, ("", False))
        if head and (trains or head_trains):
            return f"{embedding!r} of {of_0} and {head!r} of {of_last} are equal, as tied weights are"
    if first.is_tied or last.is_tied:
        return (
            f"the model's config says tie_word_embeddings, but the embedding of {of_0} and the head of {of_last} are"
            " two weights"
        )
    return None


def _find_weights(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> _Weights:
    found: _Weights = {}
    for name, layer in module.named_modules():
        # Not `layer.weight`, which runs a parametrization.
        weight = autograd.own_parameters(layer).get("weight") if isinstance(layer, kinds) else None
        if weight is not None and (identity := _identify(weight)) is not None:
            found[identity] = f"{name}.weight".lstrip("."), weight.requires_grad
    return found


@torch.no_grad()
def _identify(weight: Tensor) -> tuple[object, ...] | None:
    """Shape, dtype and fingerprint of a weight. None if it has no values, or equal ones, as after an initialization."""
    local = own_part(weight).detach()
    if local.is_meta or local.numel() == 0 or local.dim() != 2:
        return None
    own, of_equal = (int(fingerprint(each)) for each in (local, local[:1, :1].expand_as(local)))
    return None if own in (of_equal, HIDDEN) else (tuple(local.shape), local.dtype, own)
