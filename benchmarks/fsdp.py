"""Steps of pipelines with FSDP2 against the simulator: gathers and reductions during the computations, and torch's way.

Pipeline ranks times 2 data-parallel ones. Layers and collectives sleep; all else is real: processes, messages, torch's
executor, FSDP2 with each layer as a module of its own, and its collectives over gloo. FSDP2 orders its work by streams,
which do nothing on a CPU. Here a collective keeps its stream busy, and FSDP2's waits for it take as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import torch
import torch.distributed as dist
from harness import JSON, markdown, parser, write_json
from ranks import run_ranks
from sleeping import SleepingLayer, mean_loss, run_together, sleep_until
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.pipelining import PipelineStage
from wall_clock import TIMEOUT, Times, in_words, read_times, uniform_costs

import zbpipe
from zbpipe import CostModel, OpKind, Schedule
from zbpipe.costs.model import GATHER, REDUCE
from zbpipe.runtime._torch import hooks
from zbpipe.runtime._torch.fsdp2 import FsdpMode
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.simulation import gather_in_each_op

DATA = 2


class Stream(torch.cpu.Stream):
    """A stream of the CPU on which collectives take time. An event is the time at which the work before it ends."""

    wire_is_free_at = 0.0
    """Collectives of all streams use the same links, one after the other."""

    def __init__(self, priority: int = 0) -> None:
        self.free_at = 0.0

    def work(self, seconds: float) -> None:
        self.free_at = send(seconds, self.free_at)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.free_at)

    def record_event(self) -> Any:
        return self.free_at

    def wait_event(self, event: Any) -> None:
        if isinstance(event, float):  # torch's own take no time
            self.wait_until(event)

    def wait_until(self, end: float) -> None:
        self.free_at = max(self.free_at, end)


class Computation(Stream):
    """The process itself, which waits by sleeping.

    As on a GPU, whose host runs ahead, a layer begins where the one before it in its op ended, not when Python has
    come to it.
    """

    def begin_op(self) -> None:
        self.free_at = time.monotonic()

    def record_event(self) -> Any:
        return time.monotonic()

    def wait_until(self, end: float) -> None:
        self.free_at = max(self.free_at, end)
        sleep_until(self.free_at)


class Layer(SleepingLayer):
    def _sleep(self, kind: OpKind) -> None:
        stream: Any = torch.cpu.current_stream()
        stream.wait_until(stream.free_at + self.seconds[kind])


def send(seconds: float, begin: float = 0.0) -> float:
    """Keep the links busy, from `begin` on or as soon as they are free; returns the end."""
    Stream.wire_is_free_at = max(time.monotonic(), begin, Stream.wire_is_free_at) + seconds
    return Stream.wire_is_free_at


class SleepingReduceScatter(DefaultReduceScatter):
    """A reduction that takes `seconds` of its stream, from the time at which all ranks have begun it."""

    seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = super().__call__(*args, **kwargs)
        stream: Any = torch.cpu.current_stream()
        stream.work(self.seconds)
        return done


class SleepingAllGather(DefaultAllGather):
    seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(*args, **kwargs)
        if work is not None:
            return SleepingWork(work, send(self.seconds))
        stream: Any = torch.cpu.current_stream()  # FSDP2 waits for an event of this stream
        stream.work(self.seconds)
        return None


class SleepingWork(dist.Work):
    """A collective that ends when it has its result, and not before `end`."""

    def __init__(self, work: Any, end: float) -> None:
        super().__init__()
        self.work, self.end = work, end

    def wait(self, *args: Any) -> bool:
        done: bool = self.work.wait(*args)
        sleep_until(self.end)
        return done


def begin_op(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
    """Run an op, whose first layer begins now."""
    stream: Any = torch.cpu.current_stream()
    stream.begin_op()
    return compute()


@dataclass(frozen=True)
class Job:
    ranks: int
    """Pipeline ranks."""
    schedules: tuple[str, ...]
    times: tuple[Times, ...]
    collectives: tuple[float, ...]
    """Time of a stage's gather, and of its reduction, in units of its W of one microbatch."""
    layers: int
    """Number of layers of a stage, which FSDP2 gathers and reduces one by one."""
    unit: float
    """Seconds that a time of 1 takes."""
    rounds: int
    modes: tuple[FsdpMode, ...]

    @property
    def microbatches(self) -> int:
        return 2 * self.ranks


@dataclass(frozen=True)
class Result:
    """One schedule with one time of the collectives; steps in seconds."""

    ranks: int
    schedule: str
    times: Times
    collectives: float
    """As in `Job`."""
    simulated: tuple[float, ...]
    """By mode."""
    measured: tuple[float, ...]
    """Shortest step by mode."""

    @property
    def error(self) -> float:
        """Largest difference between measured and simulated steps, relative to the latter."""
        return max(abs(real / model - 1) for real, model in zip(self.measured, self.simulated, strict=True))


class Runner:
    """One schedule on this rank, ready to run steps. Costs are in seconds."""

    def __init__(self, schedule: Schedule, costs: CostModel, job: Job, mesh: DeviceMesh, mode: FsdpMode) -> None:
        self.mesh, self.job = mesh, job
        group, last = mesh.get_group("pp"), costs.num_stages - 1
        indices = schedule.placement.stages_on(mesh.get_local_rank("pp"))
        self.layers = {index: [Layer() for _ in range(job.layers)] for index in indices}
        self.gathers = {index: SleepingAllGather() for index in indices}
        self.reductions = {index: SleepingReduceScatter() for index in indices}
        stages = [
            PipelineStage(self._shard(index), index, costs.num_stages, torch.device("cpu"), group=group)
            for index in indices
        ]
        options: Any = {"costs": costs, "fsdp_mode": mode}
        self.schedule: Any = zbpipe.build_pipeline_schedule(schedule, stages, job.microbatches, mean_loss, **options)
        batch = torch.ones(job.microbatches, 1)
        inputs, target = [batch] if 0 in indices else [], batch if last in indices else None
        self.step = partial(self.schedule.step, *inputs, target=target, return_outputs=False)
        for _ in range(2):  # without sleep: the first one prepares, and leaves nothing to W in its first I
            self.run()
        for index, layers in self.layers.items():
            self.gathers[index].seconds = costs.of(index, GATHER).seconds / job.layers
            self.reductions[index].seconds = costs.of(index, REDUCE).seconds / job.layers
            for layer in layers:
                layer.seconds = {kind: costs.of(index, kind).seconds / job.layers for kind in layer.seconds}

    def run(self) -> None:
        with hooks.hook(self.schedule, hooks.HookOrder.RECORD, begin_op):
            self.step()

    def _shard(self, index: int) -> nn.Module:
        stage = nn.Sequential(*self.layers[index])
        for module in (*stage, stage):
            fully_shard(module, mesh=self.mesh["dp"], reshard_after_forward=False)
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            module.set_custom_all_gather(self.gathers[index])  # type: ignore[operator]
            module.set_custom_reduce_scatter(self.reductions[index])  # type: ignore[operator]
        for layer, following in pairwise(stage):  # on a GPU the host runs ahead and issues it
            layer.set_modules_to_forward_prefetch([following])
        return stage


def find_costs(name: str, times: Times, collectives: float, job: Job) -> CostModel:
    place = resolve("ZBV" if name == "plan" else name).place(job.ranks)
    costs = uniform_costs(place, times, job.unit, 0.0)
    by_stage = tuple(collectives * costs.of(stage, OpKind.W).seconds for stage in range(costs.num_stages))
    return replace(costs, gather=by_stage, reduce=by_stage)


def find_schedule(name: str, costs: CostModel, job: Job) -> Schedule:
    """The named schedule, or a plan on the V that holds no more than 1F1B."""
    if name == "plan":
        return zbpipe.plan(
            job.ranks, job.microbatches, costs, sum(costs.activations), placements=["v"], budget=1e6
        ).schedule
    return resolve(name).make(job.ranks, job.microbatches, costs=costs)


def simulate(schedule: Schedule, costs: CostModel, mode: FsdpMode) -> float:
    costs = gather_in_each_op(costs) if mode == "reshard" else costs
    return zbpipe.simulate(schedule, costs, overlaps_fsdp=mode != "torch").makespan


def on_this_rank(job: Job) -> list[Result]:
    """All schedules, times and collectives, in rounds of one step each."""
    cpu: Any = torch.cpu  # FSDP2 gets streams that take time
    cpu.Stream = Stream
    cpu._current_stream = cpu._default_cpu_stream = Computation()
    mesh, results = init_device_mesh("cpu", (job.ranks, DATA), mesh_dim_names=("pp", "dp")), []
    for times in job.times:
        for name in job.schedules:
            for collectives in job.collectives:
                costs = find_costs(name, times, collectives, job)
                schedule = find_schedule(name, costs, job)
                runners = [Runner(schedule, costs, job, mesh, mode) for mode in job.modes]
                rounds = [[run_together(runner.run)[1] for runner in runners] for _ in range(job.rounds)]
                measured = tuple(map(min, zip(*rounds, strict=True)))
                simulated = tuple(simulate(schedule, costs, mode) for mode in job.modes)
                results.append(Result(job.ranks, name, times, collectives, simulated, measured))
    return results


def table(results: Sequence[Result], modes: Sequence[FsdpMode]) -> str:
    """Markdown, steps in seconds. Shorter is the first mode than the last one."""
    steps = (f"{mode}, {how}" for mode in modes for how in ("simulated", "measured"))
    heads = ["schedule", "times", "p", "collective / W", *steps, "shorter, simulated", "measured", "largest error"]
    return markdown(heads, map(_cells, results), left=2)


def _cells(result: Result) -> list[str]:
    pairs = zip(result.simulated, result.measured, strict=True)
    shorter = (1 - each[0] / each[-1] for each in (result.simulated, result.measured))
    return [
        *(result.schedule, in_words(result.times), str(result.ranks), f"{result.collectives:g}"),
        *(f"{each:.3f}" for pair in pairs for each in pair),
        *(f"{each:.1%}" for each in (*shorter, result.error)),
    ]


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--ranks", nargs="+", type=int, default=[2, 4], metavar="P", help="pipeline ranks")
    names = ["ZBV", "ZB", "plan", "1F1B", "Interleaved1F1B"]
    add("--schedules", nargs="+", default=names, metavar="NAME", help='names, and "plan"')
    times = "a rank's for one microbatch; or none, selective, full: of a typical transformer with this checkpointing"
    add("--times", nargs="+", type=read_times, default=[(1.0, 1.0, 1.0)], metavar="F,I,W", help=times)
    of_w = "time of a stage's gather and of its reduction, relative to its W of one microbatch"
    add("--collectives", nargs="+", type=float, default=[1.0, 2.0], metavar="R", help=of_w)
    add("--layers", type=int, default=8, help="of a stage, which FSDP2 gathers and reduces one by one")
    add("--unit", type=float, default=0.2, help="seconds of a time of 1")
    add("--steps", type=int, default=3, help="measured of each kind")
    add("--modes", nargs="+", choices=get_args(FsdpMode), default=["overlap", "torch"], help="of FSDP2's collectives")
    add("--json", **JSON)
    return arguments.parse_args()


def main() -> int:
    chosen = parse_arguments()
    results: list[Result] = []
    for ranks in chosen.ranks:
        lists = tuple(chosen.schedules), tuple(chosen.times), tuple(chosen.collectives)
        job = Job(ranks, *lists, chosen.layers, chosen.unit, chosen.steps, tuple(chosen.modes))
        results += run_ranks(ranks * DATA, on_this_rank, job, timeout=TIMEOUT)[0]
    print(table(results, chosen.modes))
    write_json(chosen.json, "cpu", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
