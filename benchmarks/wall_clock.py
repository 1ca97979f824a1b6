"""Step times by the clock beside the simulated ones: real schedules, processes and messages, stages that sleep.

A stage holds one number and sleeps for the times of its F, I and W, so that the cores of the machine, few as they may
be, do not count: what is measured is how torch's executor, the sends and receives of gloo and the order of the actions
keep up with the simulator, which gets the same times. Run it from anywhere: `python benchmarks/wall_clock.py --help`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import CostModel, Op, OpKind, Placement
from zbpipe.registry import lookup
from zbpipe.transport import Receives

Times = tuple[float, float, float]
"""Of F, I and W: a rank's for one microbatch, shared equally by its stages."""

PLANS: dict[str, Callable[[int], float]] = {"plan, p": lambda p: p, "plan, p/2+1.5": lambda p: p / 2 + 1.5}
"""By name, the memory limit for p ranks."""
NAMED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "ZBH1", "ZBH2", "ZB1P", "ZB2P", "ZBV", "VHalf", "VMin")
YARDSTICK = "1F1B"
METHODS = {
    OpKind.F: "forward_one_chunk",
    OpKind.B: "backward_one_chunk",  # and I
    OpKind.W: "backward_weight_one_chunk",
}
TIMES: tuple[Times, ...] = ((1, 1, 1), (1, 1.2, 0.8), (1, 2, 1))
GOAL = 0.05
"""How far a measured time may be from the simulated one, relative to it."""
LATE = 1e-4
"""Seconds by which `time.sleep` usually comes back late. More than that is not spent awake, for the cores are few."""


@dataclass(frozen=True)
class Job:
    """What one set of processes measures."""

    ranks: int
    microbatches: int
    unit: float
    """Seconds that a time of 1 takes."""
    rounds: int
    """Measured steps of each schedule."""
    schedules: tuple[str, ...] = (*NAMED, *PLANS)
    times: tuple[Times, ...] = TIMES
    timeout: float = 1800
    """Seconds for all of it."""
    backend: str = "gloo"
    """Or one of benchmarks/fifo.py, where messages wait for each other."""


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
    """What Python takes for one op beside its sleep: see `Runner.overhead`."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def ratio(self) -> float:
        return self.seconds / self.simulated


# One stage.


def sleep_until(end: float) -> None:
    """Return at `end` of `time.monotonic`, as exactly as the machine allows."""
    time.sleep(max(0.0, end - LATE - time.monotonic()))
    while time.monotonic() < end:
        pass


class SleepingLayer(nn.Linear):
    """One number times a weight. F sleeps in the forward, I and W on the ways of dX and dW.

    So each sleeps in the action that computes its gradient, whoever splits the backward: I and W both in torch's B,
    one after the other in torch's split, and in zbpipe's, which runs the linear layer's own deferral.
    """

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.seconds = dict.fromkeys((OpKind.F, OpKind.I, OpKind.W), 0.0)
        self.slept: list[tuple[OpKind, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self._sleep(OpKind.F)
        # The batch needs no gradient. In a model there are more layers, and all but the very first compute dX.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return F.linear(self._sleeping(x, OpKind.I), self._sleeping(self.weight, OpKind.W))

    def _sleeping(self, tensor: Tensor, kind: OpKind) -> Tensor:
        """`tensor`, whose gradient takes its time. The I of a deferral hands on None where W will compute dW."""
        view = tensor.view_as(tensor)
        view.register_hook(lambda gradient: None if gradient is None else self._sleep(kind))
        return view

    def _sleep(self, kind: OpKind) -> None:
        start = time.monotonic()
        sleep_until(start + self.seconds[kind])
        self.slept.append((kind, time.monotonic() - start))


class Ran(NamedTuple):
    """An op that ran, and the sleeps during it."""

    op: Op
    start: float
    end: float
    slept: tuple[tuple[OpKind, float], ...]
    """Of which kind (F, I, W), and how many seconds."""


def follow(stage: PipelineStage, ran: list[Ran]) -> None:
    """Add to `ran` what `stage` runs from now on."""
    layer = cast(SleepingLayer, stage.submod)

    def followed(run: Callable[..., Any], usual: OpKind, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        kind = OpKind.I if kwargs.get("full_backward") is False else usual
        layer.slept = []
        start = time.monotonic()
        result = run(microbatch, *args, **kwargs)
        ran.append(Ran(Op(stage.stage_index, kind, microbatch), start, time.monotonic(), tuple(layer.slept)))
        return result

    for kind, method in METHODS.items():
        setattr(stage, method, partial(followed, getattr(stage, method), kind))


def check(ran: Sequence[Ran], ops: Sequence[Op], costs: CostModel, torchs_split: bool) -> None:
    """Raise unless exactly `ops` ran, in this order, and slept for what belongs to them, once and long enough.

    With torch's split the first stage, whose input needs no gradient, runs its whole backward in W.
    """
    if [each.op for each in ran] != list(ops):
        raise AssertionError(f"ran {' '.join(str(each.op) for each in ran)} instead of {' '.join(map(str, ops))}")
    for op, _, _, slept in ran:
        late = torchs_split and op.stage == 0
        belongs = {OpKind.B: "IW", OpKind.I: "" if late else "I", OpKind.W: "IW" if late else "W"}
        short = any(seconds < costs.seconds(op.stage, kind) - 1e-9 for kind, seconds in slept)
        if sorted(kind for kind, _ in slept) != list(belongs.get(op.kind, "F")) or short:
            raise AssertionError(f"{op} slept {slept}")


# One rank.


def message_seconds(messages: int = 100) -> float:
    """The median way of a message from rank 0 to rank 1 or back, where it is waited for; the same on all ranks."""
    rank, taken = dist.get_rank(), []
    for number in range(messages if rank < 2 else 0):
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


class Runner:
    """One schedule on this rank, ready to run steps."""

    def __init__(self, source: str, receives: str | None, costs: CostModel, job: Job) -> None:
        rank, last = dist.get_rank(), costs.num_stages - 1
        indices = zbpipe.stage_indices(source, rank=rank, num_ranks=job.ranks)
        layers = {index: SleepingLayer() for index in indices}
        stages = [PipelineStage(layer, i, costs.num_stages, torch.device("cpu")) for i, layer in layers.items()]
        self.torchs = lookup(source).source == "torch"
        options: dict[str, Any] = {} if self.torchs else {"costs": costs, "receives": receives}
        self.schedule = zbpipe.build_pipeline_schedule(source, stages, job.microbatches, _loss, **options)
        self.costs = costs
        self.ops = zbpipe.generate(source, job.ranks, job.microbatches, costs=costs).ops[rank]
        self.ran: list[Ran] = []
        self.within: list[float] = []
        self.between: list[float] = []
        for stage in stages:
            follow(stage, self.ran)
        batch = torch.ones(job.microbatches, 1)
        self.arguments = [batch] if 0 in indices else []
        self.target = batch if last in indices else None
        self._run()  # without sleep: shapes, and whatever else the first step prepares
        for index, layer in layers.items():
            layer.seconds = {kind: costs.seconds(index, kind) for kind in layer.seconds}

    def seconds(self) -> float:
        """Of one step, from a start common to all ranks to the end of the last one."""
        self.ran.clear()
        gc.collect()
        gc.disable()  # as trainers do, who collect garbage between steps
        start = _common_start()
        sleep_until(start)
        self._run()
        taken = torch.tensor([time.monotonic() - start], dtype=torch.float64)
        gc.enable()
        check(self.ran, self.ops, self.costs, self.torchs)
        self.within += [each.end - each.start - sum(seconds for _, seconds in each.slept) for each in self.ran]
        self.between += [after.start - before.end for before, after in pairwise(self.ran)]
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    @property
    def overhead(self) -> float:
        """Seconds of this rank for an op beside its sleep: within it, and from it to the next.

        Medians, because some ops wait for a message first.
        """
        return statistics.median(self.within) + statistics.median(self.between)

    def _run(self) -> None:
        self.schedule.step(*self.arguments, target=self.target, return_outputs=False)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _common_start() -> float:
    """A time a little ahead, the same on all ranks, which share one clock."""
    dist.barrier()
    start = torch.tensor([time.monotonic() + 0.02], dtype=torch.float64)
    dist.broadcast(start, 0)
    return start.item()


def uniform_costs(placement: Placement, times: Times, unit: float, latency: float) -> CostModel:
    """What stages on `placement` sleep, and how long messages take."""
    return CostModel.uniform(placement, *(unit * time for time in times), comm=latency)


def source_of(name: str, job: Job, costs: Callable[[Placement], CostModel], directory: Path) -> str:
    """The schedule's name, or the CSV file of the plan, which rank 0 makes for all."""
    name = name.partition("@")[0]
    if name not in PLANS:
        return name
    limit = PLANS[name](job.ranks)
    file = directory / f"plan-{limit:g}.csv"
    if dist.get_rank() == 0:
        file.write_text(zbpipe.plan(job.ranks, job.microbatches, costs, limit).schedule.to_csv())
    dist.barrier()
    return str(file)


def receives_of(name: str) -> str | None:
    """What stands behind an @: where the schedule's receives are posted."""
    return name.partition("@")[2] or None


def simulated(source: str, job: Job, costs: CostModel, overhead: float = 0.0) -> float:
    """Seconds of a step, by the simulator, if each op takes `overhead` longer than it sleeps."""
    schedule = zbpipe.generate(source, job.ranks, job.microbatches, costs=costs)
    split = any(op.kind is OpKind.W for ops in schedule for op in ops)
    if split and lookup(source).source == "torch":  # see `check`
        costs = replace(costs, i=(0.0, *costs.i[1:]), w=(costs.i[0] + costs.w[0], *costs.w[1:]))
    longer = replace(
        costs,
        f=tuple(seconds + overhead for seconds in costs.f),
        i=tuple(seconds + overhead for seconds in costs.i),
        w=tuple(seconds + overhead * split for seconds in costs.w),  # a B is one op
    )
    return zbpipe.simulate(schedule, longer).makespan


def run_rank(job: Job, directory: Path) -> Iterator[Result]:
    """All schedules with all times, in rounds of one step each, whose order changes."""
    latency = message_seconds()
    shuffled = random.Random(0)
    for times in job.times:
        costs = partial(uniform_costs, times=times, unit=job.unit, latency=latency)
        sources = {name: source_of(name, job, costs, directory) for name in job.schedules}
        placed = {name: costs(lookup(source).place(job.ranks)) for name, source in sources.items()}
        runners = {name: Runner(source, receives_of(name), placed[name], job) for name, source in sources.items()}
        measured: dict[str, list[float]] = {name: [] for name in job.schedules}
        for _ in range(job.rounds):
            for name in shuffled.sample(job.schedules, len(job.schedules)):
                measured[name].append(runners[name].seconds())
        for name, source in sources.items():
            overhead = runners[name].overhead
            expected = simulated(source, job, placed[name])
            longer = simulated(source, job, placed[name], overhead)
            yield Result(job.ranks, job.microbatches, times, name, measured[name], expected, longer, latency, overhead)


def on_this_rank(job: Job, directory: Path) -> list[Result]:
    """The body of one process. All ranks find the same."""
    return list(run_rank(job, directory))


def measure(job: Job) -> list[Result]:
    """All schedules on one process per rank, all of them gone when this returns or raises."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(job.ranks, on_this_rank, job, Path(directory), timeout=job.timeout, backend=job.backend)[0]


# The table.


def table(results: Sequence[Result]) -> str:
    """Markdown, times in seconds."""
    lines = [
        "| p, m | times | schedule | from | simulated | measured | ratio | overhead counted | speed-up | simulated |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        rival = next(r for r in results if r.schedule == YARDSTICK and _cell(r) == _cell(result))
        name = result.schedule.partition("@")[0]
        whose = "zbpipe" if name in PLANS else lookup(name).source
        ratio = f"{result.ratio:.3f}"
        lines.append(
            f"| {result.ranks}, {result.microbatches} | {', '.join(f'{each:g}' for each in result.times)}"
            f" | {result.schedule} | {whose} | {result.simulated:.3f} | {result.seconds:.3f}"
            f" | {f'**{ratio}**' if missed(result) else ratio} | {result.seconds / result.with_overhead:.3f}"
            f" | {100 * (rival.seconds / result.seconds - 1):+.1f} %"
            f" | {100 * (rival.simulated / result.simulated - 1):+.1f} % |"
        )
    return "\n".join(lines)


def _cell(result: Result) -> tuple[int, int, Times]:
    return result.ranks, result.microbatches, result.times


def missed(result: Result) -> bool:
    """Whether the step took longer or shorter than simulated, by more than the goal."""
    return abs(result.ratio - 1) > GOAL


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="default: 4 8")
    parser.add_argument("--microbatches", type=int, nargs="+", help="for each of the ranks (default: 2p)")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of a time of 1 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="measured of each schedule (default: %(default)s)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=[*NAMED, *PLANS],
        metavar="NAME",
        help="1F1B is always run (default: all). ZBV@early posts receives early, likewise late, timed and nearest",
    )
    parser.add_argument(
        "--backend", default="gloo", help="or one of benchmarks/fifo.py, where messages queue (default: %(default)s)"
    )
    parser.add_argument(
        "--times", nargs="+", type=_times, default=list(TIMES), metavar="F,I,W", help="default: 1,1,1 1,1.2,0.8 1,2,1"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each p (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    arguments.microbatches = arguments.microbatches or [2 * ranks for ranks in arguments.ranks]
    if len(arguments.microbatches) != len(arguments.ranks):
        parser.error("--microbatches takes one number for each of the --ranks")
    return arguments


def _times(text: str) -> Times:
    f, i, w = map(float, text.split(","))
    return f, i, w


def _known(text: str) -> str:
    name, at, receives = text.partition("@")
    return lookup(name).name + at + (Receives.parse(receives) if at else "")


def main() -> int:
    arguments = parse_arguments()
    names = [name if name in PLANS else _known(name) for name in arguments.schedules]
    names = [YARDSTICK, *(name for name in names if name != YARDSTICK)]
    results: list[Result] = []
    for ranks, microbatches in zip(arguments.ranks, arguments.microbatches, strict=True):
        print(f"measuring on {ranks} ranks ...", file=sys.stderr)
        times = tuple(arguments.times)
        how = arguments.unit, arguments.steps, tuple(names), times, arguments.timeout, arguments.backend
        job = Job(ranks, microbatches, *how)
        found = measure(job)
        overhead = statistics.median(result.overhead for result in found)
        print(
            f"{ranks} ranks: {1000 * found[0].latency:.2f} ms a message, {1000 * overhead:.2f} ms an op beside its"
            " sleep",
            file=sys.stderr,
        )
        results += found
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return int(any(map(missed, results)))


if __name__ == "__main__":
    sys.exit(main())
