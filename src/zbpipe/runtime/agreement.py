"""All ranks have to run the same schedule: two tables that differ leave them waiting for each other's messages."""

from __future__ import annotations

from hashlib import sha256

import torch
import torch.distributed as dist

from zbpipe.runtime import _torch
from zbpipe.runtime.failures import PipelineError

_WIDTH = 256
"""Bytes that a rank tells: its digest, then as much of the description as fits."""


def require_same(
    schedule: _torch.PipelineSchedule,
    name: str,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> None:
    """Compare `schedule` with those of the other ranks in `group` (None: all of the job), which all have to call this.

    Args:
        schedule: any of torch's, of which zbpipe's are some.
        name: what the error calls it. It may differ, as two paths of the same table do.
        group: with the backend "fake" there is nobody to ask.
        device: where the backend wants its tensors.

    Raises:
        PipelineError: they differ; the message says which ranks have which schedule.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    digest = sha256(_torch.what_it_runs(schedule).encode()).digest()
    text = f"{name} with {_torch.num_microbatches(schedule)} microbatches (table {digest.hex()[:8]})"
    told = _exchange(digest + text.encode(), group, device)
    if any(each[: len(digest)] != digest for each in told):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        texts = [each[len(digest) :].rstrip(b"\0").decode(errors="replace") for each in told]
        raise PipelineError(f"the ranks have different schedules: {_by_text(texts, ranks)}")


def _exchange(text: bytes, group: dist.ProcessGroup | None, device: torch.device | str) -> list[bytes]:
    mine = torch.tensor(list(text[:_WIDTH].ljust(_WIDTH, b"\0")), dtype=torch.uint8, device=device)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, mine, group=group)
    return [bytes(each.tolist()) for each in told]


def _by_text(texts: list[str], ranks: list[int]) -> str:
    holders = {text: [rank for rank, each in zip(ranks, texts, strict=True) if each == text] for text in texts}
    return "; ".join(f"{'ranks' if len(of) > 1 else 'rank'} {_spans(of)}: {text}" for text, of in holders.items())


def _spans(ranks: list[int]) -> str:
    """As in "0-2, 5": a job may have thousands."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
