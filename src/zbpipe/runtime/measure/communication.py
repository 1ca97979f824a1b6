"""Measurement of communication: links between pipeline ranks and to the host's memory, and FSDP2's collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbpipe.costs.model import Link, Links
from zbpipe.runtime._torch import fsdp2, pipelining
from zbpipe.runtime._torch.stage_work import OwnWork, find_work
from zbpipe.runtime.device import find_device
from zbpipe.runtime.offload import Copier, make_copier
from zbpipe.schedule.ir import Placement

_ROUNDS = 5
_LARGE = 1 << 20
"""Bytes of the larger of the two messages that measure a link, unless the job's messages are larger."""
_SMALL_COPY, _LARGE_COPY = 1 << 16, 1 << 25
"""Bytes of the two timed copies."""


class Communication(NamedTuple):
    links: Links
    collectives: Mapping[tuple[int, str], float]
    """Seconds of FSDP2's collectives, by stage and kind ("gather", "reduce")."""


def time_fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, from an idle device to an idle device."""
    fastest = float("inf")
    for _ in range(_ROUNDS):
        find_device(device).synchronize()
        start = time.perf_counter()
        run()
        find_device(device).synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def find_placement(stage: pipelining.Stage) -> Placement:
    return Placement(tuple(stage.stage_index_to_group_rank[index] for index in range(stage.num_stages)))


def measure_links(stages: Sequence[pipelining.Stage], message_bytes: int) -> Links:
    """The links of this rank with its neighbours in the pipeline. All ranks of the pipeline have to call this."""
    # One pair after the other sends a small and a large message there and back. Each direction counts as half of the
    # time.
    group, ranks = stages[0].group, find_placement(stages[0]).rank_of
    me, device = stages[0].group_rank, pipelining.device_of(stages[0])
    # Both ends of a link need the same size, and the last stage sends nothing.
    most = torch.tensor(message_bytes, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    large = max(int(most), _LARGE)
    pairs = sorted({tuple(sorted(pair)) for pair in pairwise(ranks) if pair[0] != pair[1]})
    links: dict[tuple[int, int], Link] = {}
    for one, other in pairs:
        if me not in (one, other):
            continue
        peer = other if me == one else one
        small_seconds, large_seconds = (_time_one_way(peer, me == one, size, device, group) for size in (1, large))
        bandwidth = (large - 1) / max(large_seconds - small_seconds, 1e-9)
        links[one, other] = links[other, one] = Link(small_seconds, bandwidth)
    return links


def _time_one_way(peer: int, leads: bool, size: int, device: torch.device, group: Any) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def go_and_return() -> None:
        for operation in (dist.isend, dist.irecv) if leads else (dist.irecv, dist.isend):
            for work in dist.batch_isend_irecv([dist.P2POp(operation, message, group=group, group_peer=peer)]):
                work.wait()

    return time_fastest(go_and_return, device) / 2


def measure_host(device: torch.device) -> Link | None:
    """The link from `device` to its host's memory, in the slower direction; None if nothing offloads."""
    # GPUs that share a link have to measure at the same time to get their share. On the CPU this is the speed of the
    # stand-in for a GPU.
    with suppress(ValueError):
        copier = make_copier(device)
        small, large = (_time_copy(copier, size, device) for size in (_SMALL_COPY, _LARGE_COPY))
        return Link(small, (_LARGE_COPY - _SMALL_COPY) / max(large - small, 1e-9))
    return None


def _time_copy(copier: Copier, size: int, device: torch.device) -> float:
    storage = torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
    out = back = float("inf")
    for _ in range(_ROUNDS):
        find_device(device).synchronize()
        start = time.perf_counter()
        copy = copier.copy_out([storage])
        copier.release(copy)
        find_device(device).synchronize()
        between = time.perf_counter()
        copier.copy_back(copy)
        copier.wait(copy)
        find_device(device).synchronize()
        out, back = min(out, between - start), min(back, time.perf_counter() - between)
    return max(out, back)


def measure_communication(stages: Sequence[pipelining.Stage], message_bytes: int) -> Communication:
    """The links of this rank, and the collectives of its stages. All ranks have to call this between two steps."""
    links = measure_links(stages, message_bytes)
    shared = [stage for stage in stages if fsdp2.is_shared(stage.submod)] if fsdp2.IS_KNOWN else []
    return Communication(links, {key: seconds for stage in shared for key, seconds in _measure(stage)})


def _measure(stage: pipelining.Stage) -> Iterator[tuple[tuple[int, str], float]]:
    device = pipelining.device_of(stage)
    work = find_work(stage)
    if not (isinstance(work, OwnWork) and work.reshards):  # else each F and backward includes it
        yield (stage.stage_index, "gather"), time_fastest(lambda: fsdp2.gather_all(stage.submod), device)
        fsdp2.free_all(stage.submod)
    yield (stage.stage_index, "reduce"), time_fastest(lambda: fsdp2.reduce_zeros(stage.submod, device), device)
