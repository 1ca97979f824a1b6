"""Embedding and head that are meant to be one weight, on different ranks: each would get its own half of the gradient.

Where first and last stage are on one rank, a shared parameter is one tensor and nothing has to be done. Across ranks
each has its copy. They begin equal, and nothing keeps them so. No process can see that alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbpipe.ir import Placement
from zbpipe.runtime import _torch

_SAMPLES = 32
"""Rows, and columns, of a weight that are looked at: no two weights are equal there by chance."""
_NOT_KEPT = "training will not keep them equal, since each rank adds only its own gradients"
_WAY_OUT = (
    "use a V schedule (ZBV, VHalf, VMin), which puts both on rank 0, and tie them there, or untie them, or sum their"
    " gradients in your job"
)

logger = logging.getLogger(__name__)


class _Weight(NamedTuple):
    """What a rank tells of a matrix."""

    name: str
    """Within its stage."""
    trains: bool
    digest: bytes
    """Of shape, dtype and some values."""


class _Told(NamedTuple):
    """What a rank tells of its part of the model."""

    embeddings: tuple[_Weight, ...]
    """Those of stage 0."""
    heads: tuple[_Weight, ...]
    """What could be tied to them, in the last stage."""
    is_tied: bool
    """Whether one of these two stages has a config that says so, as Hugging Face's do."""


def warn_if_parted(stages: Sequence[_torch.Stage], placement: Placement) -> None:
    """Warn on the ranks with first and last stage if a weight of both looks tied; all ranks have to call this.

    Args:
        stages: of this rank. Weights that FSDP or tensor parallelism shard are compared shard by shard.
        placement: of all stages.
    """
    group, first, last = stages[0].group, placement.rank_of[0], placement.rank_of[-1]
    if first == last or dist.get_backend(group) == "fake":
        return
    mine = _Told(
        tuple(_weights(stages[0].submod, (nn.Embedding,))) if stages[0].is_first else (),
        tuple(_weights(stages[-1].submod, (nn.Embedding, nn.Linear))) if stages[-1].is_last else (),
        any(_says_tied(stage.submod) for stage in stages if stage.is_first or stage.is_last),
    )
    told = [mine] * placement.num_ranks
    dist.all_gather_object(told, mine, group=group)
    if stages[0].group_rank not in (first, last):
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    where = f"stage 0 (rank {ranks[first]})", f"stage {placement.num_stages - 1} (rank {ranks[last]})"
    if finding := _finding(told[first], told[last], *where):
        logger.warning("%s; %s: %s", finding, _NOT_KEPT, _WAY_OUT)


def _finding(first: _Told, last: _Told, of_0: str, of_last: str) -> str | None:
    for embedding in first.embeddings:
        for head in last.heads:
            if embedding.digest == head.digest and (embedding.trains or head.trains):
                return f"{embedding.name!r} of {of_0} and {head.name!r} of {of_last} are equal, as tied weights are"
    if first.is_tied or last.is_tied:
        return (
            f"the model's config says tie_word_embeddings, but the embedding of {of_0} and the head of {of_last} are"
            " two weights"
        )
    return None


def _weights(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[_Weight]:
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(layer, kinds) and isinstance(weight, Tensor):
            digest = _digest(weight)
            if digest is not None:
                yield _Weight(f"{name}.weight".lstrip("."), weight.requires_grad, digest)


@torch.no_grad()
def _digest(weight: Tensor) -> bytes | None:
    """None for one that tells nothing: without values, or with all of them equal, as after an initialization."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if local.is_meta or local.numel() == 0 or local.dim() != 2:
        return None
    rows, columns = (max(1, size // _SAMPLES) for size in local.shape)
    values = local[::rows, ::columns].to("cpu", torch.float64).contiguous()
    if bool((values == values[0, 0]).all()):
        return None
    about = repr((tuple(local.shape), local.dtype, values.tolist()))
    return sha256(about.encode()).digest()


def _says_tied(module: nn.Module) -> bool:
    configs = (getattr(part, "config", None) for part in module.modules())
    return any(getattr(config, "tie_word_embeddings", False) is True for config in configs)
