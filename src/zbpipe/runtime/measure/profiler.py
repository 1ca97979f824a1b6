"""Measurement of a running job: times of F, I and W and of FSDP's collectives, overhead per op, bytes of activations,
and links."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from zbpipe.costs.job import JobCosts
from zbpipe.costs.model import CostModel, Link
from zbpipe.runtime import checks
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.lists import find_messages
from zbpipe.runtime.logs import log_visibly
from zbpipe.runtime.measure.collectives import Collectives, measure_collectives
from zbpipe.runtime.measure.host import measure_host
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.runtime.measure.stopwatch import time_fastest
from zbpipe.schedule.ir import COMPUTATIONS, Op, OpKind, Placement, require_whole
from zbpipe.views import report

logger = logging.getLogger(__name__)

WARM_UP = 1
"""Steps that are not measured: they compile, allocate, and connect the ranks."""
_ROUNDS = 5
_LARGE = 1 << 20
"""Bytes of the larger of the two messages that measure a link, unless the job's own messages are larger."""

Links = Mapping[tuple[int, int], Link]
"""Links by (from, to), two ranks of the pipeline."""


@dataclass(frozen=True)
class RankTable:
    """Measurements of one rank."""

    seconds: Mapping[tuple[int, str], float]
    """Median time over microbatches and steps, by stage and kind of op."""
    kept: Mapping[tuple[int, str], int]
    """Bytes that one op allocates and does not free, by stage and kind (F, I)."""
    most: Mapping[tuple[int, str], int]
    """Peak bytes that one op has allocated and not freed, by stage and kind."""
    links: Links
    message_bytes: int
    host: Link | None = None
    """The link to the host's memory; None if nothing offloads there."""
    overhead: float = 0.0
    """Median seconds between ops that wait for no message."""
    collectives: Collectives = field(default_factory=dict)
    """FSDP2's collectives of its stages."""


class Profiler:
    """Measures the costs of a schedule in the next steps of a running job.

        profiler = zbpipe.Profiler(schedule, steps=3)
        ...                     # train for 5 steps: 1 to warm up, 1 for memory, 3 for times
        profiler.costs          # the same on all ranks; None before
        zbpipe.plan(4, 16, profiler.costs)

    Times come from events in the stream on a GPU, and from a clock on the CPU. Between two steps it measures the links
    between ranks and to the host's memory, with its own copies, and FSDP2's gathers and reductions. Later steps run as
    if there were no profiler.

    Args:
        schedule: a schedule of zbpipe or torch that runs I and W.
        steps: number of steps to time, at least 1.
        group: the ranks that share their measurements, including replicas of the pipeline. Default: all ranks of the
            job. Each of them needs a profiler.
        done: called with the costs, between two steps. By default the first rank of the group logs them.

    Raises:
        ValueError: an invalid schedule, number of steps or group, or a schedule that does not run I and W.
    """

    def __init__(
        self,
        schedule: pipelining.PipelineSchedule,
        steps: int = 3,
        *,
        group: dist.ProcessGroup | None = None,
        done: Callable[[JobCosts], None] | None = None,
    ) -> None:
        done = self._tell if done is None else done
        checks.require_schedule("zbpipe.Profiler", schedule)
        (steps,) = require_whole(1, steps=steps)
        checks.require_group(group)
        checks.require_callable(done=done)
        if not isinstance(schedule, pipelining.ScheduleRuntime) or not pipelining.has_split_backward(schedule):
            raise ValueError(
                f"{type(schedule).__name__} runs whole backwards, so I and W cannot be timed: use Auto, which"
                " measures by itself in about 1F1B's memory, or ZBV, which takes more under checkpointing"
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
        self.costs = self._gather(memory)
        self._done(self.costs)

    def _tell(self, costs: JobCosts) -> None:
        if dist.get_rank(self._group) == 0:
            log_visibly(logger, "measured costs:\n%s", report.costs(costs))

    def _gather(self, memory: StepRecord) -> JobCosts:
        stages = hooks.stages_of(self._schedule)
        links = measure_links(stages, memory.message_bytes)
        dist.barrier(self._group)  # so that all use the host link at the same time
        collectives = measure_collectives(stages)
        table = RankTable(
            seconds=average_by_kind(self.records),
            kept={(op.stage, str(op.kind)): taken for op, taken in memory.kept.items()},
            most={(op.stage, str(op.kind)): taken for op, taken in memory.most.items()},
            links=links,
            message_bytes=memory.message_bytes,
            host=measure_host(pipelining.device_of(stages[0])),
            overhead=find_overhead(self.records, stages[0].num_stages),
            collectives=collectives,
        )
        tables: list[RankTable] = [table] * dist.get_world_size(self._group)
        dist.all_gather_object(tables, table, group=self._group)
        transport, _ = find_messages(self._schedule)
        return replace(combine(tables, find_placement(stages[0])), transport=transport)


def find_placement(stage: pipelining.Stage) -> Placement:
    """Placement of the pipeline's stages."""
    return Placement(tuple(stage.stage_index_to_group_rank[index] for index in range(stage.num_stages)))


def average_by_kind(
    records: Iterable[StepRecord], average: Callable[[Sequence[float]], float] = median
) -> dict[tuple[int, str], float]:
    """Median seconds over all microbatches, by stage and kind of op. Single slow ops do not change the median."""
    spans = (span for record in records for span in record.spans)
    return _average_by_key((((span.op.stage, str(span.op.kind)), span.end - span.start) for span in spans), average)


def find_overhead(records: Iterable[StepRecord], num_stages: int) -> float:
    """Median seconds from the end of an op to the start of the next, where that waits for no message.

    These are W, F of the first stage, and the backward of the last one. 0 without such ops.
    """

    def is_ready(op: Op) -> bool:
        return op.kind is OpKind.W or op.stage == (0 if op.kind is OpKind.F else num_stages - 1)

    pairs = (pair for record in records for pair in pairwise(record.spans))
    gaps = [after.start - before.end for before, after in pairs if is_ready(after.op)]
    return max(median(gaps), 0.0) if gaps else 0.0


def _average_by_key(
    values: Iterable[tuple[tuple[int, str], float]], average: Callable[[Sequence[float]], float]
) -> dict[tuple[int, str], float]:
    by_key: dict[tuple[int, str], list[float]] = defaultdict(list)
    for key, value in values:
        by_key[key].append(value)
    return {key: average(each) for key, each in by_key.items()}


def combine(tables: Sequence[RankTable], placement: Placement) -> JobCosts:
    """Costs from the tables of all ranks; the mean for a stage on several ranks."""
    # A whole backward, B, counts as I on stages that run no I. Without measured memory, the stages of a rank have equal
    # shares of a microbatch.
    seconds, kept, most = (
        _average_by_key((pair for table in tables for pair in getattr(table, name).items()), fmean)
        for name in ("seconds", "kept", "most")
    )
    links = {key: link for table in tables for key, link in table.links.items()}
    stages = range(placement.num_stages)
    gather, reduce = (
        _average_by_key(
            (((stage, kind), pair[place]) for table in tables for stage, pair in table.collectives.items()), fmean
        )
        for place, kind in enumerate(("gather", "reduce"))
    )
    f, i, b, w = (tuple(seconds.get((stage, kind), 0.0) for stage in stages) for kind in "FIBW")
    activations = tuple(max(kept.get((stage, "F"), 0.0), 0.0) for stage in stages)
    if not kept:
        activations = tuple(1 / len(placement.stages_on(rank)) for rank in placement.rank_of)
    beyond = {key: max(each - max(kept.get(key, 0.0), 0.0), 0.0) for key, each in most.items()}
    freed = (-kept.get((stage, "I"), 0.0) for stage in stages)
    return JobCosts(
        CostModel(
            f,
            tuple(split or whole for split, whole in zip(i, b, strict=True)),
            w,
            activations,
            freed_by_i=tuple(
                min(each / held, 1.0) if held else 0.0 for each, held in zip(freed, activations, strict=True)
            ),
            links=links,
            message_bytes=float(max(table.message_bytes for table in tables)),
            host=_find_slowest([table.host for table in tables]),
            overhead=fmean(table.overhead for table in tables),
            gather=tuple(gather.get((stage, "gather"), 0.0) for stage in stages) if gather else 0.0,
            reduce=tuple(reduce.get((stage, "reduce"), 0.0) for stage in stages) if reduce else 0.0,
            working={
                kind: tuple(beyond.get((stage, str(kind)), 0.0) for stage in stages)
                for kind in COMPUTATIONS
                if any(key[1] == kind for key in beyond)
            },
        ),
        placement,
    )


def _find_slowest(ways: Sequence[Link | None]) -> Link | None:
    """A link as slow as the slowest of `ways`; None if any of them is unknown."""
    known = [way for way in ways if way is not None]
    if len(known) < len(ways):
        return None
    return Link(max(way.latency for way in known), min(way.bandwidth for way in known))


def measure_links(stages: Sequence[pipelining.Stage], message_bytes: int) -> Links:
    """The links of this rank with its neighbours in the pipeline. All ranks of the pipeline have to call this."""
    # One pair of neighbours after the other sends a small and a large message there and back. Each direction counts as
    # half of the time.
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
    """Seconds of one message of `size` bytes: half of the fastest of a few round trips."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def transfer(operation: Callable[..., Any]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, message, group=group, group_peer=peer)]):
            work.wait()

    def go_and_return() -> None:
        for operation in (dist.isend, dist.irecv) if leads else (dist.irecv, dist.isend):
            transfer(operation)

    return time_fastest(go_and_return, device, _ROUNDS) / 2
