"""Agreement on one schedule. Ranks with different tables would wait for each other's messages forever."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TypeVar

import torch
import torch.distributed as dist

from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.ranks.failures import PipelineError, name_ranks

Answer = TypeVar("Answer")
Value = TypeVar("Value")
_WIDTH = 256
"""Number of bytes that a rank sends: its digest, then as much of the description as fits."""

_num_keys: Counter[str] = Counter()
"""Number of keys that this process has made, by kind and ranks."""


def make_key(purpose: str, ranks: Sequence[int]) -> str:
    """A unique key in the job's store. All ranks make their objects in the same order."""
    kind = f"zbpipe/{purpose}/{'-'.join(map(str, ranks))}"
    _num_keys[kind] += 1
    return f"{kind}/{_num_keys[kind]}"


def require_same(
    schedule: pipelining.PipelineSchedule, name: str, group: dist.ProcessGroup | None, device: torch.device | str
) -> None:
    """Compare a schedule with those of all ranks in `group` (see `compare`). The `name` is only for the error, because
    a table's path may differ between ranks."""
    table = pipelining.what_it_runs(schedule)
    digest = sha256(table.encode()).hexdigest()[:8]
    text = f"{name} with {pipelining.num_microbatches(schedule)} microbatches (table {digest})"
    compare(table, text, group, device)


def compare(topic: str, text: str, group: dist.ProcessGroup | None, device: torch.device | str) -> list[str]:
    """The texts of all ranks in `group` (None: of the job), which also have to call this, on the same topic.

    A rank with another schedule may have no topic before its own `require_same`; it fails there as the others do.

    Raises:
        PipelineError: the topics differ. The message names the ranks with each text.
    """
    if is_alone(group):
        return [text]
    digest = sha256(topic.encode()).digest()
    message = digest + text.encode()
    mine = torch.tensor(list(message[:_WIDTH].ljust(_WIDTH, b"\0")), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    everything = [bytes(each.tolist()) for each in gathered]
    texts = [each[len(digest) :].rstrip(b"\0").decode(errors="replace") for each in everything]
    if any(not each.startswith(digest) for each in everything):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        holders = group_ranks(dict(zip(ranks, texts, strict=True)))
        found = "; ".join(f"{name_ranks(of)}: {text}" for text, of in holders.items())
        raise PipelineError(f"the ranks have different schedules: {found}")
    return texts


def find_once(question: str, find: Callable[[], Answer]) -> Answer:
    """The first asking rank's result, for all ranks of the job with the same question. The others wait for it.

    A search's result depends on the machine: with numba it covers more. The searching rank waits for no other rank, so
    ranks may ask at any time, or not at all. The `question` contains everything that determines the answer. If `find`
    raises a ValueError, all asking ranks raise it. Any other exception becomes a RuntimeError.
    """
    if not dist.is_initialized() or is_alone(None):
        return find()
    store, key = pipelining.default_store(), f"zbpipe/answer/{sha256(question.encode()).hexdigest()}"
    if store.add(f"{key}/asked", 1) == 1:
        answer: Answer | Exception
        try:
            answer = find()
        except Exception as error:  # the other ranks wait for an answer
            answer = ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(repr(error))
        store.set(key, pickle.dumps(answer))
    found: Answer | Exception = pickle.loads(store.get(key))
    if isinstance(found, Exception):
        raise found
    return found


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether the group has no other ranks, as with the backend "fake"."""
    return dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


def group_ranks(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    groups: dict[Value, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups
