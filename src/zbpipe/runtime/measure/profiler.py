"""Measurement of a running job: its costs, and one step of all ranks, planned and measured.

Costs are times of F, I and W and of FSDP's collectives, the overhead per op, bytes of activations, and links.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbpipe.costs.file import dump_costs
from zbpipe.costs.job import JobCosts
from zbpipe.costs.model import CostModel, FillWaits, Link, Links
from zbpipe.runtime import checks
from zbpipe.runtime._torch import fsdp2, pipelining
from zbpipe.runtime._torch.stage_work import OwnWork, find_work
from zbpipe.runtime.device import find_device
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.runtime.measure.transport import find_messages
from zbpipe.runtime.offload import Copier, make_copier
from zbpipe.schedule.ir import COMPUTATIONS, Op, OpKind, Placement, Schedule, require_whole
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Span, Timeline
from zbpipe.views import report
from zbpipe.views.perfetto import write_perfetto

logger = logging.getLogger(__name__)

WARM_UP = 1
"""Steps before any measurement: they compile, allocate, and connect the ranks."""


@dataclass(frozen=True)
class RankTable:
    seconds: Mapping[tuple[int, str], float]
    """Median time over microbatches and steps, by stage and kind of op or collective."""
    kept: Mapping[tuple[int, str], int]
    """Bytes that one op allocates and does not free, by stage and kind (F, I)."""
    most: Mapping[tuple[int, str], int]
    """Peak bytes that one op has allocated and not freed, by stage and kind."""
    links: Links
    message_bytes: int
    host: Link | None = None
    """The link to the host's memory; None if nothing offloads."""
    overhead: float = 0.0
    """Median seconds between ops that wait for no message."""
    waits: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Median seconds of an op's waits for collectives, by stage and kind."""
    fill_waits: FillWaits = "off"
    """As in this rank's other steps."""


class Profiler:
    """Measures the costs of a schedule in the next steps of a running job.

        profiler = zbpipe.Profiler(schedule, steps=3)
        ...                     # train for 5 steps: 1 to warm up, 1 for memory, 3 for times
        profiler.costs          # the same on all ranks; None before
        zbpipe.plan(4, 16, profiler.costs)

    Times come from events in a GPU's stream, or from the CPU's clock, also those of waits for collectives in F and I of
    eager blocks. Meanwhile no products run in these waits (`fill_waits`). Between two steps it measures the links
    between ranks and to the host's memory, by copies, and FSDP2's gathers and reductions. It does not affect later
    steps.

    Args:
        schedule: a schedule of zbpipe or torch that runs I and W.
        steps: number of steps to time, at least 1.
        group: the ranks that share their measurements, including replicas of the pipeline. Each needs a profiler.
            Default: all ranks of the job.
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
        done = partial(log_costs, group=group) if done is None else done
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
        self._schedule, self._group, self._done = schedule, group, done
        collect(schedule, [*[Wanted.NOTHING] * WARM_UP, Wanted.MEMORY, *[Wanted.WAITS] * steps], self._finish)

    def _finish(self, records: list[StepRecord]) -> None:
        memory, *self.records = records
        stages = pipelining.stages_of(self._schedule)
        communication = measure_communication(stages, memory.message_bytes)
        dist.barrier(self._group)  # so that all ranks use the host link at the same time
        table = RankTable(
            seconds={**average_by_kind(self.records), **communication.collectives},
            kept={op[:2]: taken for op, taken in memory.kept.items()},
            most={op[:2]: taken for op, taken in memory.most.items()},
            links=communication.links,
            message_bytes=memory.message_bytes,
            host=measure_host(pipelining.device_of(stages[0])),
            overhead=find_overhead(self.records, stages[0].num_stages),
            waits=_average_by_key(((op[:2], each) for step in self.records for op, each in step.waits.items()), median),
            fill_waits=getattr(getattr(self._schedule, "waits", None), "how", "off"),  # torch's schedules fill none
        )
        tables: list[RankTable] = [table] * dist.get_world_size(self._group)
        dist.all_gather_object(tables, table, group=self._group)
        transport, _ = find_messages(self._schedule)
        self.costs = replace(combine(tables, find_placement(stages[0])), transport=transport)
        self._done(self.costs)


def log_costs(costs: JobCosts, file: str | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Log the costs on the first rank of the group, and write them to `file`, if given."""
    if dist.get_rank(group) != 0:
        return
    log_visibly(logger, "measured costs:\n%s", report.costs(costs))
    if not file:
        return
    try:  # training must not fail with the file
        dump_costs(costs, file)
    except OSError as error:
        logger.warning("the measured costs cannot be written: %s", error)
    else:
        log_visibly(logger, "wrote the measured costs to %s, for `zbpipe plan --costs-file`", file)


def log_visibly(logger: logging.Logger, words: str, *values: object) -> None:
    """Log a message as information, or as a warning if the job does not show information (Python's default)."""
    logger.log(logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING, words, *values)


def average_by_kind(
    records: Iterable[StepRecord], average: Callable[[Sequence[float]], float] = median
) -> dict[tuple[int, str], float]:
    """Median seconds over all microbatches, by stage and kind of op. Single slow ops do not count."""
    return _average_by_key(((span.op[:2], _seconds(span)) for record in records for span in record.spans), average)


def find_overhead(records: Iterable[StepRecord], num_stages: int) -> float:
    """Median seconds from the end of an op to the start of the next, if that waits for no message; 0 without such ops.
    These are W, F of the first stage, and the backward of the last one."""

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
    """Costs from the tables of all ranks. For a stage on several ranks, the mean."""
    # On stages without I, a whole backward B counts as I. Without measured memory, a rank's stages have equal shares of
    # a microbatch.
    seconds, kept, most, waits = (
        _average_by_key((pair for table in tables for pair in getattr(table, name).items()), fmean)
        for name in ("seconds", "kept", "most", "waits")
    )
    links = {key: link for table in tables for key, link in table.links.items()}
    stages = range(placement.num_stages)
    f, i, b, w, gather, reduce = (
        tuple(seconds.get((stage, kind), 0.0) for stage in stages) for kind in (*"FIBW", "gather", "reduce")
    )
    i = tuple(split or whole for split, whole in zip(i, b, strict=True))
    activations = tuple(max(kept.get((stage, "F"), 0.0), 0.0) for stage in stages)
    if not kept:
        activations = tuple(1 / len(placement.stages_on(rank)) for rank in placement.rank_of)
    beyond = {key: max(each - max(kept.get(key, 0.0), 0.0), 0.0) for key, each in most.items()}
    # Medians of an op and of its waits can be of different microbatches.
    waiting = {
        kind: tuple(min(waits.get((n, kind), waits.get((n, other), 0.0)), each) for n, each in enumerate(own))
        for kind, other, own in ((OpKind.F, "", f), (OpKind.I, "B", i))
    }
    freed = (min(-kept.get((n, "I"), 0.0) / held, 1.0) if held else 0.0 for n, held in enumerate(activations))
    return JobCosts(
        CostModel(
            f,
            i,
            w,
            activations,
            freed_by_i=tuple(freed),
            links=links,
            message_bytes=float(max(table.message_bytes for table in tables)),
            host=_find_slowest([table.host for table in tables]),
            overhead=fmean(table.overhead for table in tables),
            gather=gather if any(gather) else 0.0,
            reduce=reduce if any(reduce) else 0.0,
            working={
                kind: tuple(beyond.get((stage, kind), 0.0) for stage in stages)
                for kind in COMPUTATIONS
                if any(key[1] == kind for key in beyond)
            },
            waits={kind: each for kind, each in waiting.items() if any(each)},
            # Ranks with compiled stages fill none, and measure none.
            fill_waits=next((table.fill_waits for table in tables if table.fill_waits != "off"), "off"),
        ),
        placement,
    )


def _find_slowest(ways: Sequence[Link | None]) -> Link | None:
    known = [way for way in ways if way is not None]
    if len(known) < len(ways):
        return None
    return Link(max(way.latency for way in known), min(way.bandwidth for way in known))


def write_trace(
    schedule: pipelining.PipelineSchedule,
    file: str | Path,
    step: int = 3,
    *,
    done: Callable[[str], None] = lambda words: None,
) -> None:
    """Write a trace of one of the next training steps. All ranks of the pipeline have to call this.

    The planned timeline uses the medians of the measured times. So the two differ in waits and scatter, not in typical
    op times.

    Args:
        schedule: a schedule of zbpipe or torch.
        file: written by the job's first rank after the step, gzipped if the name ends in `.gz`. A failure only logs a
            warning.
        step: number of the step, counted from the next one as 1.
        done: called with a line for the log, on the rank that wrote the file.

    Raises:
        ValueError: on the first rank, if it cannot write the file.
    """
    if dist.get_rank() == 0:
        checks.require_writable(file)

    def write(records: list[StepRecord]) -> None:
        planned, measured, _ = make_timelines(schedule, records[0])
        if dist.get_rank() != 0:
            return
        try:
            write_perfetto(file, planned, measured=measured)
        except OSError as error:
            logger.warning("the trace of this step cannot be written: %s", error)
            return
        done(
            f"{file} shows {planned.schedule.name}: {measured.makespan:.4g} s measured, {planned.makespan:.4g} s"
            " simulated; open it in ui.perfetto.dev"
        )

    collect(schedule, [*[Wanted.NOTHING] * (step - 1), Wanted.TIMES], write)


def make_timelines(
    schedule: pipelining.PipelineSchedule, record: StepRecord, communication: Communication | None = None
) -> Recorded:
    """A step of this rank, simulated and measured. All ranks of the job have to call this."""
    stages = pipelining.stages_of(schedule)
    links, collectives = communication or measure_communication(stages, record.message_bytes)
    table = RankTable({**average_by_kind([record]), **collectives}, {}, {}, links, record.message_bytes)
    everything: list[tuple[RankTable, StepRecord]] = [(table, record)] * dist.get_world_size(stages[0].group)
    dist.all_gather_object(everything, (table, record), group=stages[0].group)
    costs = combine([each for each, _ in everything], find_placement(stages[0])).costs
    assert isinstance(costs, CostModel), "stages were measured"
    spans = tuple(each.spans for _, each in everything)
    ran = Schedule.from_rows([[span.op for span in row] for row in spans], record.schedule)
    transport, receives = find_messages(schedule)
    overlaps = pipelining.overlaps_fsdp(schedule)
    planned = simulate(ran, costs, transport=transport, receives=receives, overlaps_fsdp=overlaps)
    # The measured spans include delays by collectives, whose own times are not recorded.
    measured = Timeline(ran, replace(costs, gather=0.0, reduce=0.0), spans)
    return Recorded(planned, measured, max(find_exposed(each) for _, each in everything) if costs.gather else 0.0)


class Recorded(NamedTuple):
    planned: Timeline
    measured: Timeline
    exposed_fsdp: float
    """Seconds for which the rank with the most waited for FSDP2's collectives. 0 without FSDP2."""


def find_exposed(record: StepRecord) -> float:
    """Seconds for which this rank waited for FSDP2's collectives in a step. A gather delays the first F of its stage. A
    reduction delays the last W or B, whose buffer it needs, and the end of the step. Delays are relative to the median
    op of the same stage and kind."""
    if not record.spans:
        return 0.0
    delays = (_seconds(span) - usual for span, usual in _at_ends(record.spans))
    return sum(max(each, 0.0) for each in delays) + max(record.seconds - record.spans[-1].end, 0.0)


def _at_ends(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Each stage's first F and last W or B, each with the median seconds of its kind."""
    by_stage: dict[int, dict[OpKind, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        by_stage[span.op.stage][span.op.kind].append(span)
    for by_kind in by_stage.values():
        usual = {kind: median(map(_seconds, each)) for kind, each in by_kind.items()}
        last = max((by_kind[kind][-1] for kind in (OpKind.W, OpKind.B) if kind in by_kind), key=lambda span: span.end)
        yield by_kind[OpKind.F][0], usual[OpKind.F]
        yield last, usual[last.op.kind]


def _seconds(span: Span) -> float:
    return span.end - span.start


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
