"""Measure a running job: times of F, I and W of every stage, transfers between ranks, bytes of activations."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbpipe.costs import CostModel, Link
from zbpipe.ir import Placement
from zbpipe.job_costs import JobCosts
from zbpipe.runtime import _torch
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.transport import Receives, Transport

WARM_UP = 1
"""Steps that are not looked at: they compile, allocate, and connect the ranks."""
_ROUNDS = 5
_LARGE = 1 << 20
"""Bytes of the larger message that measures a link, at least; the job's own may be larger."""


class Messages(NamedTuple):
    """How those of a running schedule go."""

    transport: Transport
    receives: Receives


def messages_of(schedule: _torch.PipelineSchedule) -> Messages:
    """What they wait for, and where the ranks post their receives, of zbpipe's schedules and torch's."""
    usual = _torch.usual_transport(_torch.stages_of(schedule)[0])
    by_torch = Receives.LATE if _torch.receives_late(schedule) else Receives.EARLY
    return Messages(getattr(schedule, "transport", usual), getattr(schedule, "receives", by_torch))


Links = Mapping[tuple[int, int], Link]
"""By (from rank, to rank) of a pipeline."""


@dataclass(frozen=True)
class RankTable:
    """What one rank measured."""

    seconds: Mapping[tuple[int, str], float]
    """By stage and kind of op, the median over microbatches and steps."""
    kept: Mapping[tuple[int, str], int]
    """By stage and kind (F, I): the bytes that one op leaves taken."""
    links: Links
    message_bytes: int


class Profiler:
    """Measures a schedule while it trains, and then is out of its way.

        profiler = zbpipe.Profiler(schedule, steps=3)
        ...                          # train; the profiler needs 2 steps more than `steps`
        profiler.costs               # the same on all ranks; None before

    The first step warms up, the second measures memory, then `steps` steps measure times: on a GPU with events in its
    stream, on the CPU with its clock. Transfers are measured between two steps, by messages of their own.

    Args:
        schedule: any of zbpipe's or torch's that runs I and W.
        steps: how many steps to time, from 1 on.
        group: the ranks that end with the same table, on which the schedule's rank holds the same stages; default: all
            ranks of the job. Each has to have a profiler.
        done: called with the table when it is there, between two steps.

    Raises:
        ValueError: less than one step, or a schedule that does not run I and W by themselves.
    """

    def __init__(
        self,
        schedule: _torch.PipelineSchedule,
        steps: int = 3,
        *,
        group: dist.ProcessGroup | None = None,
        done: Callable[[JobCosts], None] = lambda costs: None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"a profile needs at least 1 step, got steps={steps}")
        if not isinstance(schedule, _torch.ScheduleRuntime) or not _torch.has_split_backward(schedule):
            raise ValueError(
                f"{type(schedule).__name__} runs whole backwards, so I and W cannot be timed: measure with one of"
                " zbpipe's schedules, for example ZBH1, which has the memory of 1F1B"
            )
        self.costs: JobCosts | None = None
        self.records: list[StepRecord] = []
        """The timed steps, on this rank."""
        self._schedule = schedule
        self._group = group
        self._done = done
        collect(schedule, [*[Wanted.NOTHING] * WARM_UP, Wanted.MEMORY, *[Wanted.TIMES] * steps], self._finish)

    def _finish(self, records: list[StepRecord]) -> None:
        memory, *self.records = records
        self.costs = self._gathered(memory)
        self._done(self.costs)

    def _gathered(self, memory: StepRecord) -> JobCosts:
        stages = _torch.stages_of(self._schedule)
        table = RankTable(
            seconds=seconds_by_kind(self.records),
            kept={(op.stage, str(op.kind)): taken for op, taken in memory.kept.items()},
            links=measure_links(stages, memory.message_bytes),
            message_bytes=memory.message_bytes,
        )
        tables: list[RankTable] = [table] * dist.get_world_size(self._group)
        dist.all_gather_object(tables, table, group=self._group)
        return replace(combined(tables, rank_of(stages[0])), transport=messages_of(self._schedule).transport)


def rank_of(stage: _torch.Stage) -> Placement:
    """Where the stages of its pipeline are."""
    return Placement(tuple(stage.stage_index_to_group_rank[index] for index in range(stage.num_stages)))


def seconds_by_kind(records: Iterable[StepRecord]) -> dict[tuple[int, str], float]:
    """By stage and kind of op, the median over all microbatches."""
    spans: dict[tuple[int, str], list[float]] = defaultdict(list)
    for record in records:
        for span in record.spans:
            spans[span.op.stage, str(span.op.kind)].append(span.end - span.start)
    return {key: median(each) for key, each in spans.items()}


def combined(tables: Sequence[RankTable], placement: Placement) -> JobCosts:
    """One table out of those of all ranks; where several hold the same stage, their mean.

    A whole backward, B, counts as I. Where memory was not measured, a rank's stages share its microbatch evenly.
    """
    seconds = _mean_by_key(table.seconds for table in tables)
    kept = _mean_by_key(table.kept for table in tables)
    links = {key: link for table in tables for key, link in table.links.items()}
    stages = range(placement.num_stages)
    f, i, b, w = (tuple(seconds.get((stage, kind), 0.0) for stage in stages) for kind in "FIBW")
    activations = tuple(max(kept.get((stage, "F"), 0.0), 0.0) for stage in stages)
    if not kept:
        activations = tuple(1 / len(placement.stages_on(rank)) for rank in placement.rank_of)
    freed = (-kept.get((stage, "I"), 0.0) for stage in stages)
    return JobCosts(
        CostModel(
            f,
            tuple(map(max, i, b)),
            w,
            activations,
            freed_by_i=tuple(
                min(each / held, 1.0) if held else 0.0 for each, held in zip(freed, activations, strict=True)
            ),
            links=links,
            message_bytes=float(max(table.message_bytes for table in tables)),
        ),
        placement,
    )


def _mean_by_key(tables: Iterable[Mapping[tuple[int, str], float]]) -> dict[tuple[int, str], float]:
    """For each key the mean of what the tables have under it."""
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for table in tables:
        for key, value in table.items():
            values[key].append(value)
    return {key: fmean(each) for key, each in values.items()}


def measure_links(stages: Sequence[_torch.Stage], message_bytes: int) -> Links:
    """The links from and to this rank's neighbours in the pipeline, by (from, to); all its ranks have to call this.

    A small and a large message go to and fro between each two ranks that hand stages to each other, one pair after the
    other. Half of the way there and back is taken as the way in each direction.
    """
    group, ranks = stages[0].group or dist.group.WORLD, rank_of(stages[0]).rank_of
    me, device = stages[0].group_rank, stages[0].device
    large = max(_most_of_all_ranks(message_bytes, device, group), _LARGE)
    pairs = sorted({tuple(sorted(pair)) for pair in pairwise(ranks) if pair[0] != pair[1]})
    links: dict[tuple[int, int], Link] = {}
    for one, other in pairs:
        if me not in (one, other):
            continue
        assert group is not None, "a pipeline of several ranks has a process group"
        peer = dist.get_global_rank(group, other if me == one else one)
        small_seconds, large_seconds = (_one_way(peer, me == one, size, device, group) for size in (1, large))
        bandwidth = (large - 1) / max(large_seconds - small_seconds, 1e-9)
        links[one, other] = links[other, one] = Link(small_seconds, bandwidth)
    return links


def _most_of_all_ranks(number: int, device: torch.device, group: Any) -> int:
    """Both ends of a link have to agree on a size, and a rank with the last stage alone sends nothing forward."""
    most = torch.tensor(number, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return int(most)


def _one_way(peer: int, leads: bool, size: int, device: torch.device, group: Any) -> float:
    """Seconds of one message of so many bytes: half of the fastest way there and back, out of a few."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def transfer(operation: Callable[..., Any]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, message, peer, group)]):
            work.wait()

    fastest = float("inf")
    for _ in range(_ROUNDS):
        _finish(device)
        start = time.perf_counter()
        for operation in (dist.isend, dist.irecv) if leads else (dist.irecv, dist.isend):
            transfer(operation)
        _finish(device)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / 2


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
