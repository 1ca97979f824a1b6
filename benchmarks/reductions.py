"""The time that FSDP2's reduction of gradients adds to a step: during the last W of each stage, and after it.

2 pipeline ranks times 2 data-parallel ones. Layers and collectives sleep; all else is real: processes, messages,
torch's executor, FSDP2 with each layer as a module of its own, and its collectives over gloo. FSDP2 orders its work by
streams, which do nothing on a CPU. Here a collective keeps its stream busy, and FSDP2's waits for it take as long.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from harness import JSON, markdown, parser, write_json
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.pipelining import PipelineStage
from wall_clock import Times, in_words, read_times, uniform_costs

import zbpipe
from zbpipe import CostModel, OpKind
from zbpipe.cli.demo.sleeping import SleepingLayer, sleep_until
from zbpipe.costs.transformer import Checkpointing
from zbpipe.schedule.registry import resolve

PIPELINE, DATA = 2, 2
WAYS = ("late", "early")


class Stream(torch.cpu.Stream):
    """A stream of the CPU on which collectives take time. An event is the time at which the work before it ends."""

    wire_is_free_at = 0.0
    """Collectives of all streams use the same links, one after the other."""

    def __init__(self, priority: int = 0) -> None:
        self.free_at = 0.0

    def work(self, seconds: float) -> None:
        start = max(time.monotonic(), self.free_at, Stream.wire_is_free_at)
        self.free_at = Stream.wire_is_free_at = start + seconds

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.free_at)

    def record_event(self) -> Any:
        return self.free_at

    def wait_event(self, event: Any) -> None:
        if isinstance(event, float):  # torch's own, of gathers, take no time
            self.wait_until(event)

    def wait_until(self, end: float) -> None:
        self.free_at = max(self.free_at, end)


class Computation(Stream):
    """The process itself, which waits by sleeping."""

    def record_event(self) -> Any:
        return time.monotonic()

    def wait_until(self, end: float) -> None:
        sleep_until(end)


class SleepingReduceScatter(DefaultReduceScatter):
    """A reduction that takes `seconds` of its stream, from the time at which all ranks have begun it."""

    seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = super().__call__(*args, **kwargs)
        stream: Any = torch.cpu.current_stream()
        stream.work(self.seconds)
        return done


def emulate_streams() -> None:
    """Have FSDP2 use streams that take time, in this process."""
    cpu: Any = torch.cpu
    cpu.Stream = Stream
    cpu._current_stream = cpu._default_cpu_stream = Computation()


@dataclass(frozen=True)
class Job:
    """What one set of processes measures."""

    schedules: tuple[str, ...]
    times: tuple[Times, ...]
    reductions: tuple[float, ...]
    """Time of a stage's reduction, in units of its W of one microbatch."""
    microbatches: int
    layers: int
    """Number of layers of a stage, which FSDP2 reduces one by one."""
    unit: float
    """Seconds that a time of 1 takes."""
    rounds: int
    timeout: float


@dataclass(frozen=True)
class Result:
    """One schedule with one reduction; all in seconds."""

    schedule: str
    times: Times
    reduction: float
    """As in `Job`."""
    reduced: float
    """Time of all reductions of the rank with the longest."""
    largest: float
    """Time of its longest reduction of a layer."""
    without: float
    """Shortest step with reductions that take no time."""
    late: float
    early: float
    simulated: float
    """Exposed time of the early reduction, by the simulator."""

    @property
    def exposed_late(self) -> float:
        return self.late - self.without

    @property
    def exposed_early(self) -> float:
        return self.early - self.without


class Runner:
    """One schedule on this rank, ready to run steps. Costs are in seconds."""

    def __init__(self, name: str, costs: CostModel, job: Job, mesh: DeviceMesh, reduce_grads: str) -> None:
        self.costs, self.job, self.mesh = costs, job, mesh
        group, last = mesh.get_group("pp"), costs.num_stages - 1
        indices = resolve(name).place(PIPELINE).stages_on(mesh.get_local_rank("pp"))
        self.layers = {index: [SleepingLayer() for _ in range(job.layers)] for index in indices}
        self.reductions = {index: SleepingReduceScatter() for index in indices}
        stages = [
            PipelineStage(self._shard(index), index, costs.num_stages, torch.device("cpu"), group=group)
            for index in indices
        ]
        options = {"costs": costs, "reduce_grads": reduce_grads}
        self.schedule: Any = zbpipe.build_pipeline_schedule(name, stages, job.microbatches, _loss, **options)
        batch = torch.ones(job.microbatches, 1)
        self.arguments = [batch] if 0 in indices else []
        self.target = batch if last in indices else None
        self._run()  # two without sleep: the first one prepares, and leaves nothing to W in its first I
        self._run()
        for index, layers in self.layers.items():
            for layer in layers:
                layer.seconds = {kind: costs.seconds(index, kind) / job.layers for kind in layer.seconds}

    def _shard(self, index: int) -> nn.Module:
        stage = nn.Sequential(*self.layers[index])
        for module in (*stage, stage):
            fully_shard(module, mesh=self.mesh["dp"], reshard_after_forward=False)
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            module.set_custom_reduce_scatter(self.reductions[index])  # type: ignore[operator]
        return stage

    def layer_seconds(self, reduction: float) -> dict[int, float]:
        """Seconds of the reduction of one layer, by stage."""
        return {index: reduction * self.costs.seconds(index, OpKind.W) / self.job.layers for index in self.layers}

    def seconds(self, reduction: float) -> float:
        """Run one step; returns the seconds from a common start to the end of the last rank."""
        for index, seconds in self.layer_seconds(reduction).items():
            self.reductions[index].seconds = seconds
        gc.collect()
        gc.disable()
        start = torch.tensor([time.monotonic() + 0.02], dtype=torch.float64)
        dist.broadcast(start, 0)
        sleep_until(start.item())
        self._run()
        taken = torch.tensor([time.monotonic() - start.item()], dtype=torch.float64)
        gc.enable()
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def _run(self) -> None:
        self.schedule.step(*self.arguments, target=self.target, return_outputs=False)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def on_this_rank(job: Job) -> list[Result]:
    """All schedules, times and reductions, in rounds of one step each."""
    emulate_streams()
    mesh, results = init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pp", "dp")), []
    for times in job.times:
        for name in job.schedules:
            costs = uniform_costs(resolve(name).place(PIPELINE), times, job.unit, 0.0)
            runners = {way: Runner(name, costs, job, mesh, way) for way in WAYS}
            steps = [(way, reduction) for reduction in (0.0, *job.reductions) for way in WAYS]
            taken: dict[tuple[str, float], list[float]] = {step: [] for step in steps}
            for _ in range(job.rounds):
                for way, reduction in steps:
                    taken[way, reduction].append(runners[way].seconds(reduction))
            shortest = {step: min(measured) for step, measured in taken.items()}
            for reduction in job.reductions:
                of_layers = runners["early"].layer_seconds(reduction)
                found = torch.tensor([job.layers * sum(of_layers.values()), max(of_layers.values())])
                dist.all_reduce(found, dist.ReduceOp.MAX)
                reduced, largest = found.tolist()
                without = min(shortest["late", 0.0], shortest["early", 0.0])
                measured = without, shortest["late", reduction], shortest["early", reduction]
                with_reductions = replace(costs, reduce=tuple(reduction * seconds for seconds in costs.w))
                simulated = zbpipe.simulate(runners["early"].schedule.schedule, with_reductions).exposed_reduction
                results.append(Result(name, times, reduction, reduced, largest, *measured, simulated))
    return results


def table(results: Sequence[Result]) -> str:
    """Markdown, times in seconds."""
    heads = ["schedule", "times", "reduction / W", "reductions", "largest", "step without", "late", "early"]
    return markdown([*heads, "exposed, late", "exposed, early", "simulated"], map(_cells, results), left=2)


def _cells(result: Result) -> list[str]:
    seconds = result.reduced, result.largest, result.without, result.late, result.early
    exposed = result.exposed_late, result.exposed_early, result.simulated
    return [
        *(result.schedule, in_words(result.times), f"{result.reduction:g}"),
        *(f"{each:.3f}" for each in (*seconds, *exposed)),
    ]


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--schedules", nargs="+", default=["ZBV", "ZBVLean"], metavar="NAME")
    times = "a rank's for one microbatch; or none, selective, full: of a typical transformer with this checkpointing"
    add(
        "--times",
        nargs="+",
        type=read_times,
        default=[(1.0, 1.0, 1.0), Checkpointing("full")],
        metavar="F,I,W",
        help=times,
    )
    of_w = "time of the reduction of a stage, relative to its W of one microbatch"
    add("--reductions", nargs="+", type=float, default=[0.5, 1.0, 2.0], metavar="R", help=of_w)
    add("--microbatches", type=int, default=4)
    add("--layers", type=int, default=8, help="of a stage, which FSDP2 reduces one by one")
    add("--unit", type=float, default=0.4, help="seconds of a time of 1")
    add("--steps", type=int, default=6, help="measured of each kind")
    add("--timeout", type=float, default=1800)
    add("--json", **JSON)
    return arguments.parse_args()


def main() -> int:
    chosen = parse_arguments()
    sizes = chosen.microbatches, chosen.layers, chosen.unit, chosen.steps, chosen.timeout
    job = Job(tuple(chosen.schedules), tuple(chosen.times), tuple(chosen.reductions), *sizes)
    results: list[Result] = run_ranks(PIPELINE * DATA, on_this_rank, job, timeout=job.timeout)[0]
    print(table(results))
    write_json(chosen.json, "cpu", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
