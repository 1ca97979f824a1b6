"""Measured against simulated step times: real schedules, processes and messages, stages that sleep.

Stages sleep (`sleeping.py`), so that eight ranks run on two cores. This shows how torch's executor, gloo's
sends and receives and the order of the actions keep up with the simulator, which gets the same times.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from harness import JSON, markdown, parser, write_json
from ranks import run_ranks
from sleeping import Ran, Runner, sleep_until

import zbpipe
from zbpipe import CostModel, OpKind, Placement, Schedule
from zbpipe.costs.model import Receives
from zbpipe.costs.transformer import Checkpointing, typical_costs, typical_times
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.jitter import Jitter, step_times

Times = tuple[float, float, float] | Checkpointing
"""Of F, I and W: a rank's for one microbatch, shared equally by its stages. With a checkpointing it is a typical
transformer's, whose memory decides what ZB and ZBLoop run."""


PLANS: dict[str, Callable[[int], float]] = {"plan, p": lambda p: p, "plan, p/2+1.5": lambda p: p / 2 + 1.5}
"""By plan the microbatches that a rank may hold, by the number of ranks."""
PLANNED = PLANS | {"plan, 2p": lambda p: 2 * p}
NAMED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "ZBH1", "ZBH2", "ZB1P", "ZB2P", "ZBV", "VHalf", "VMin")
BASELINE = "1F1B"
TIMES: tuple[Times, ...] = ((1, 1, 1), (1, 1.2, 0.8), (1, 2, 1))
TIMEOUT = 1800
"""Seconds for all schedules."""
GOAL = 0.05
"""How far a measured time may be from the simulated one, relative to it."""


@dataclass(frozen=True)
class Job:
    ranks: int
    microbatches: int
    unit: float
    """Seconds that a time of 1 takes."""
    rounds: int
    """Measured steps of each schedule."""
    schedules: tuple[str, ...] = (*NAMED, *PLANS)
    times: tuple[Times, ...] = TIMES
    backend: str = "gloo"
    """Or one of benchmarks/fifo.py, where messages wait for each other."""
    late: float = 0.0
    """By how much each message comes late on average, exponentially. For the backends of benchmarks/fifo.py."""


@dataclass(frozen=True)
class Result:
    """One schedule with one set of times; all in seconds."""

    ranks: int
    microbatches: int
    times: Times
    schedule: str
    measured: list[float]
    """A step each, from the common start to the end of the last rank."""
    simulated: float
    with_overhead: float
    """Simulated with ops that take `overhead` longer."""
    latency: float
    """Of one message, measured in the same run and given to the simulator."""
    overhead: float
    """What Python takes for one op beside its sleep: see `overhead_of`."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def ratio(self) -> float:
        return self.seconds / self.simulated


# One rank.


def uniform_costs(placement: Placement, times: Times, unit: float, latency: float) -> CostModel:
    """What stages on `placement` sleep, and how long messages take."""
    if isinstance(times, Checkpointing):
        return typical_costs(placement, times, times=[unit * time for time in typical_times(times)], comm=latency)
    return CostModel.uniform(placement, *(unit * time for time in times), comm=latency)


def source_of(name: str, job: Job, costs: Callable[[Placement], CostModel]) -> str | Schedule:
    """The schedule's name; or a plan, or the schedule of NAME:v, which rank 0 makes for all."""
    name, stages = split_name(name)
    if name not in PLANNED and stages is None:
        return name
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        size = job.ranks, job.microbatches
        if name in PLANNED:
            made = [zbpipe.plan(*size, costs, PLANNED[name](job.ranks)).schedule]
        else:
            placement = resolve(name).place(job.ranks, stages)
            made = [zbpipe.generate(name, *size, stages_per_rank=stages, costs=costs(placement))]
    dist.broadcast_object_list(made)
    return made[0]


def split_name(name: str) -> tuple[str, int | None]:
    """The schedule, and its stages per rank, from NAME:v@receives."""
    name, _, stages = name.partition("@")[0].partition(":")
    return name, int(stages) if stages else None


def simulated(source: str | Schedule, job: Job, costs: CostModel, overhead: float = 0.0) -> float:
    """Seconds of a step, by the simulator, if each op takes `overhead` longer than it sleeps."""
    schedule = zbpipe.generate(source, job.ranks, job.microbatches, costs=costs)
    split = any(op.kind is OpKind.W for ops in schedule for op in ops)
    if split and resolve(source).source == "torch":  # see `check`
        costs = replace(costs, i=(0.0, *costs.i[1:]), w=(costs.i[0] + costs.w[0], *costs.w[1:]))
    longer = replace(
        costs,
        f=tuple(seconds + overhead for seconds in costs.f),
        i=tuple(seconds + overhead for seconds in costs.i),
        w=tuple(seconds + overhead * split for seconds in costs.w),  # a B is one op
    )
    if job.late:
        return step_times(schedule, longer, Jitter(delay=job.late * job.unit)).p50
    return zbpipe.simulate(schedule, longer).makespan


def message_seconds() -> float:
    """The median way of a message from rank 0 to rank 1 or back, where it is waited for; the same on all ranks."""
    rank, taken = dist.get_rank(), []
    for number in range(100 if rank < 2 else 0):
        sender = number % 2
        sent_at = torch.zeros(1, dtype=torch.float64)
        if rank == sender:
            # As in a pipeline, the receiver has been waiting for some time, and is asleep.
            sleep_until(time.monotonic() + 0.005)
            sent_at[0] = time.monotonic()
            dist.send(sent_at, 1 - rank)
        else:
            dist.recv(sent_at, sender)
            taken.append(time.monotonic() - sent_at.item())
    median = torch.tensor([statistics.median(taken) if taken else 0.0], dtype=torch.float64)
    dist.broadcast(median, 0)
    return median.item()


def overhead_of(steps: Sequence[Sequence[Ran]]) -> float:
    """Seconds of this rank for an op beside its sleep: within it, and from it to the next.

    Medians, because some ops wait for a message first.
    """
    within = [op.end - op.start - sum(seconds for _, seconds in op.slept) for ran in steps for op in ran]
    between = [after.start - before.end for ran in steps for before, after in pairwise(ran)]
    return statistics.median(within) + statistics.median(between)


def on_this_rank(job: Job) -> list[Result]:
    """All schedules with all times, in rounds of one step each, whose order changes. All ranks find the same."""
    latency = message_seconds()
    if job.late:
        cast(Any, dist.group.WORLD).late = partial(
            random.Random(dist.get_rank()).expovariate, 1 / (job.late * job.unit)
        )
    shuffled, results = random.Random(0), []
    for times in job.times:
        costs = partial(uniform_costs, times=times, unit=job.unit, latency=latency)
        sources = {name: source_of(name, job, costs) for name in job.schedules}
        placed = {name: costs(resolve(source).place(job.ranks)) for name, source in sources.items()}
        runners = {
            name: Runner(source, placed[name], job.microbatches, name.partition("@")[2] or None)  # the receives' place
            for name, source in sources.items()
        }
        measured: dict[str, list[float]] = {name: [] for name in job.schedules}
        ran: dict[str, list[list[Ran]]] = {name: [] for name in job.schedules}
        for _ in range(job.rounds):
            for name in shuffled.sample(job.schedules, len(job.schedules)):
                measured[name].append(runners[name].seconds())
                ran[name].append(list(runners[name].ran))
        for name, source in sources.items():
            overhead = overhead_of(ran[name])
            expected = simulated(source, job, placed[name])
            longer = simulated(source, job, placed[name], overhead)
            seconds = measured[name], expected, longer, latency, overhead
            results.append(Result(job.ranks, job.microbatches, times, name, *seconds))
    return results


# The table.


def table(results: Sequence[Result]) -> str:
    heads = ["p, m", "times", "schedule", "from", "simulated", "measured", "ratio", "overhead counted"]
    return markdown([*heads, "speed-up", "simulated"], (_cells(result, results) for result in results), left=4)


def _cells(result: Result, results: Sequence[Result]) -> list[str]:
    baseline = next(r for r in results if r.schedule == BASELINE and _setting(r) == _setting(result))
    name, _ = split_name(result.schedule)
    ratio = f"{result.ratio:.3f}"
    return [
        f"{result.ranks}, {result.microbatches}",
        in_words(result.times),
        result.schedule,
        "zbpipe" if name in PLANNED else resolve(name).source,
        f"{result.simulated:.3f}",
        f"{result.seconds:.3f}",
        f"**{ratio}**" if missed(result) else ratio,
        f"{result.seconds / result.with_overhead:.3f}",
        f"{100 * (baseline.seconds / result.seconds - 1):+.1f} %",
        f"{100 * (baseline.simulated / result.simulated - 1):+.1f} %",
    ]


def in_words(times: Times) -> str:
    return times if isinstance(times, Checkpointing) else ", ".join(f"{each:g}" for each in times)


def _setting(result: Result) -> tuple[int, int, Times]:
    return result.ranks, result.microbatches, result.times


def missed(result: Result) -> bool:
    return abs(result.ratio - 1) > GOAL


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--ranks", type=int, nargs="+", default=[4, 8])
    add("--microbatches", type=int, nargs="+", help="for each of the ranks; 2p without it")
    add("--unit", type=float, default=0.1, help="seconds of a time of 1")
    add("--steps", type=int, default=3, help="measured of each schedule")
    schedules = (
        "1F1B always runs. ZB:4 has 4 stages per rank. ZBV@early posts receives early; also @late, @timed, @nearest"
    )
    add("--schedules", nargs="+", default=[*NAMED, *PLANS], metavar="NAME", help=schedules)
    add("--backend", default="gloo", help="or one of benchmarks/fifo.py, where messages queue")
    times = "or none, selective, full: typical times of a transformer with this checkpointing"
    add("--times", nargs="+", type=read_times, default=list(TIMES), metavar="F,I,W", help=times)
    late = "mean delay of messages, with --backend fifo_queue_per_edge; the simulated time is the median"
    add("--late", type=float, default=0.0, help=late)
    add("--json", **JSON)
    chosen = arguments.parse_args()
    chosen.microbatches = chosen.microbatches or [2 * ranks for ranks in chosen.ranks]
    if chosen.late and not chosen.backend.startswith("fifo"):
        arguments.error("--late needs a backend of benchmarks/fifo.py: --backend fifo_queue_per_edge")
    if len(chosen.microbatches) != len(chosen.ranks):
        arguments.error("--microbatches takes one number for each of the --ranks")
    return chosen


def read_times(text: str) -> Times:
    if text in list(Checkpointing):
        return Checkpointing(text)
    f, i, w = map(float, text.split(","))
    return f, i, w


def _known(text: str) -> str:
    (name, stages), (_, at, receives) = split_name(text), text.partition("@")
    return f"{resolve(name).name}{f':{stages}' if stages else ''}{at}{Receives.parse(receives) if at else ''}"


def main() -> int:
    arguments = parse_arguments()
    names = [name if name in PLANNED else _known(name) for name in arguments.schedules]
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    results: list[Result] = []
    for ranks, microbatches in zip(arguments.ranks, arguments.microbatches, strict=True):
        print(f"measuring on {ranks} ranks ...", file=sys.stderr)
        how = arguments.unit, arguments.steps, tuple(names), tuple(arguments.times)
        job = Job(ranks, microbatches, *how, arguments.backend, arguments.late)
        found: list[Result] = run_ranks(ranks, on_this_rank, job, timeout=TIMEOUT, backend=job.backend)[0]
        overhead = statistics.median(result.overhead for result in found)
        print(
            f"{ranks} ranks: {1000 * found[0].latency:.2f} ms a message, {1000 * overhead:.2f} ms an op beside its"
            " sleep",
            file=sys.stderr,
        )
        results += found
    print(table(results))
    write_json(arguments.json, "cpu", results)
    return int(any(map(missed, results)))


if __name__ == "__main__":
    sys.exit(main())
