"""Checks of zbpipe on one GPU, in some minutes: one line each, with PASS, FAIL, or "untried: needs a GPU".

It needs torch 2.11 or newer, no network and no TorchTitan. Without a GPU it runs what a CPU can show, in small sizes.
benchmarks/README.md says what each part shows.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import JSON, about, choose_device, distance, meter, parser, seconds, single_rank, synchronize, write_json
from host import BASELINE, CASES, RANK, RANKS, step_seconds
from llama import Block, checkpointed
from ranks import fork_from, run_ranks
from split_backward import DTYPES, SIZES
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, distribute_tensor
from waits import Kind, Link, measure

import zbpipe
from zbpipe.runtime._torch import hooks
from zbpipe.runtime.split.deferring_layers import defer_weights
from zbpipe.runtime.split.weight_gradients import WeightGradients
from zbpipe.runtime.verify.gradient_check import schedule_w_last
from zbpipe.simulator.offloading import Offload, copy_all

Verdict = Literal["PASS", "FAIL", "untried: needs a GPU"]
UNTRIED: Verdict = "untried: needs a GPU"
REPLAYS = 20
"""Of a captured step."""
GOALS = {False: 1.25, True: 1.15}
"""Host time that ZB may take relative to torch's Interleaved1F1B, by whether the blocks are compiled."""
GRADIENTS = 3e-2
"""How far gradients in bfloat16 may be from those of the model in one piece."""
SLEEP = 3_000_000
"""Cycles that W waits for, where it is late."""


@dataclass(frozen=True)
class Line:
    part: str
    what: str
    verdict: Verdict
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """Seconds, or ratios."""

    def __str__(self) -> str:
        return f"{self.part:8}  {self.what}: {self.text}{'; ' if self.text else ''}{self.verdict}"


class Machine(NamedTuple):
    device: torch.device
    rounds: int
    ranks: Sequence[int]
    """How many share the device, one after the other."""

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def median(self, function: Callable[[], Any]) -> float:
        """Seconds of a call, with the device's work."""
        function()
        return statistics.median(seconds(function, self.device) for _ in range(self.rounds))

    def judged(self, good: bool) -> Verdict:
        """Of a time: a CPU that has other work to do proves nothing."""
        return "PASS" if good or not self.has_gpu else "FAIL"


# Host time.


def host(machine: Machine) -> Iterator[Line]:
    """Seconds that the host needs: below that, launches decide how long a microbatch takes."""
    few = min(case.blocks for case in CASES)
    for case in (each for each in CASES if machine.has_gpu or each.blocks == few):
        steps = step_seconds(case, machine.device, machine.rounds)
        text = ", ".join(
            f"{name} {1e6 * each.seconds:.0f} ({each.ratio:.2f}, {each.low:.2f} to {each.high:.2f})"
            for name, each in steps.items()
        )
        text = f"{text} us per block and microbatch (and relative to {BASELINE})"
        figures = {name: each._asdict() for name, each in steps.items()}
        yield Line("host", str(case), machine.judged(steps["ZB"].ratio <= GOALS[case.compiled]), text, figures)


# Ranks that have a share of the GPU each.


def pipeline(machine: Machine) -> Iterator[Line]:
    """Step times of schedules, in turns, each against the simulator with the times of ops measured there."""
    few = ["--schedules", "Interleaved1F1B:2", "ZBVZeroBubble", "ZB:4", "--queues", "one queue"]
    yield from _shared("pipeline", machine, ["--seconds", "300", *([] if machine.has_gpu else few)])


def connections(machine: Machine) -> Iterator[Line]:
    """The same where all streams of a rank share a queue of the GPU, with lists made without and with knowing it."""
    asked = ["--schedules", *(["1F1B"] if machine.has_gpu else []), "Interleaved1F1B:2", "ZBV"]
    asked += ["--queues", "queue per peer"]
    asked += ["--checkpointing", "selective", "--rounds", "5", "--seconds", "60"]
    for transport in ("queue per peer", "shared with compute")[not machine.has_gpu :]:
        for line in _shared(
            "connections", machine, [*asked, "--transport", transport], CUDA_DEVICE_MAX_CONNECTIONS="1"
        ):
            yield replace(line, what=f"{line.what}, made for {transport!r}")


def late(machine: Machine) -> Iterator[Line]:
    """W late on its stream; and a rank that fails while the host of another one waits in `.item()`."""
    cell = Cell(2, "ZBV", delayed=machine.has_gpu)
    (error,) = _on_ranks([cell], machine.device)
    yield Line("late", str(cell), "PASS" if error < 1e-4 else "FAIL", f"gradients differ by {error:.1e}")
    yield from _shared("late", machine, ["--fails", "--seconds", "60"])


def _shared(part: str, machine: Machine, asked: Sequence[str], **variables: str) -> Iterator[Line]:
    """Run `shares.py`, on a CPU in small."""
    sizes = ["--ranks", "2", "--microbatches", "4", "--rounds", "1", "--dim", "64", "--tokens", "16"]
    small = [] if machine.has_gpu else sizes
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "shares.json")
        command = [sys.executable, str(Path(__file__).with_name("shares.py")), *asked, *small]
        command += ["--device", machine.device.type, "--json", str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, check=False)
        results = json.loads(file.read_text())["results"] if file.exists() else []
    for each in results:
        what = ", ".join((each["schedule"], each["checkpointing"], each["queues"]))
        text = f"{1e3 * each['step']:.1f} ms, {each['relative']:.3f} of Interleaved1F1B's"
        text += f", {each['step'] / each['simulated']:.3f} of simulated; gradients differ by {each['error']:.1e}"
        yield Line(part, what, "PASS" if each["error"] < GRADIENTS else "FAIL", text, each)
    marks = ("time of all ranks", "the last rank ended", "FAIL")
    said = [line for line in ran.stdout.splitlines() if line.startswith(marks)] or ran.stderr.splitlines()[-1:]
    yield Line(part, "all ranks", "FAIL" if ran.returncode else "PASS", "; ".join(said))


def outside(machine: Machine) -> Iterator[Line]:
    """Memory that NCCL takes outside of torch's allocator, so that no prediction counts it."""
    if not machine.has_gpu:
        yield Line("outside", "memory of a communicator", UNTRIED)
        return
    with tempfile.TemporaryDirectory() as folder:
        _join(mp.start_processes(nccl_main, (folder,), join=False, daemon=True), 120)
        found = json.loads(Path(folder, "bytes").read_text())
    text = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in found.items())
    yield Line("outside", "memory of a communicator of one rank", "PASS", text, found)


def nccl_main(rank: int, folder: str) -> None:
    """The only rank of a group over NCCL."""

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    x = torch.ones(1 << 20, device="cuda")
    before = used()
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    made = used()
    dist.all_reduce(x)
    found = {"context": before, "group": made - before, "first collective": used() - made}
    Path(folder, "bytes").write_text(json.dumps(found))
    dist.destroy_process_group()


# CUDA graphs.


def graph(machine: Machine) -> Iterator[Line]:
    """F, I and W of a block: nothing may wait for the device, or allocate outside of the graph's memory."""
    torch.manual_seed(0)
    dim, tokens = (1024, 256) if machine.has_gpu else (32, 8)
    plain = Block(dim, dim // 16, dim // 64 or 1, tokens).to(machine.device)
    block, gradients = copy.deepcopy(plain), WeightGradients()
    defer_weights(block, gradients)
    x = torch.randn(1, tokens, dim, device=machine.device, requires_grad=True)
    for module in (plain, block):
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)

    def once() -> None:
        loss = block(x).square().mean()
        with gradients.record() as pending:
            loss.backward()
        for each in pending:
            each.accumulate()

    def worst() -> float:
        pairs = zip(block.parameters(), plain.parameters(), strict=True)
        return max(distance(weight.grad, other.grad) for weight, other in pairs)  # type: ignore[arg-type]

    plain(x).square().mean().backward()
    once()
    eager = worst()
    yield Line(
        "graph", "F, I, W without a graph", "PASS" if eager < 1e-4 else "FAIL", f"gradients differ by {eager:.1e}"
    )
    if not machine.has_gpu:
        yield Line("graph", "F, I, W captured and replayed", UNTRIED)
        return
    replay = _captured(once)
    for weight in block.parameters():
        weight.grad.zero_()  # type: ignore[union-attr]
    replay()
    replayed = worst()
    times = {"eager": machine.median(once), "replayed": machine.median(replay)}
    text = f"gradients differ by {replayed:.1e}; " + ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in times.items())
    yield Line("graph", "F, I, W captured and replayed", "PASS" if replayed < 1e-4 else "FAIL", text, times)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return captured.replay


def capture(machine: Machine) -> Iterator[Line]:
    """A whole step of one rank with two stages: each replay gives the gradients of an eager step, bit-identical."""
    dim, tokens, microbatches = (1024, 256, 8) if machine.has_gpu else (32, 8, 4)
    x, target = torch.randn(2, microbatches, tokens, dim, device=machine.device)
    for name in ("ZBV", "ZB"):
        modules = [_stage(index, dim, tokens).to(machine.device) for index in range(2)]
        stages = [PipelineStage(module, index, 2, machine.device) for index, module in enumerate(modules)]
        schedule: Any = zbpipe.build_pipeline_schedule(name, stages, microbatches, nn.functional.mse_loss)
        weights = [weight for module in modules for weight in module.parameters()]
        yield from _captured_step(machine, schedule, weights, partial(schedule.step, x, target=target))


def _captured_step(
    machine: Machine, schedule: Any, weights: Sequence[nn.Parameter], run: Callable[[], Any]
) -> Iterator[Line]:
    def step() -> None:
        for weight in weights:
            weight.grad = None  # so that the graph makes the gradients, and each replay writes them anew
        run()

    def gradients() -> list[Tensor]:
        return [weight.grad.clone() for weight in weights if weight.grad is not None]

    name = schedule.schedule.name
    torch.use_deterministic_algorithms(True)  # as in `offload`, here also while it is timed
    try:
        for _ in range(3):
            step()
        expected, times = gradients(), {"eager": machine.median(step)}
        yield Line("capture", f"step of {name}, steady", "PASS" if schedule.is_steady else "FAIL")
        if not machine.has_gpu:
            yield Line("capture", f"step of {name}, captured and replayed", UNTRIED)
            return
        replay = _captured(step)
        for weight in weights:
            weight.grad.fill_(7)  # type: ignore[union-attr]
        for _ in range(REPLAYS):
            replay()
        is_right = all(map(torch.equal, gradients(), expected)) and schedule.replays == REPLAYS
        times["replayed"] = machine.median(replay)
    finally:
        torch.use_deterministic_algorithms(False)
    text = f"{REPLAYS} replays; " + ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in times.items())
    yield Line("capture", f"step of {name}, captured and replayed", "PASS" if is_right else "FAIL", text, times)


# Waits for collectives.


def waits(machine: Machine) -> Iterator[Line]:
    """W's products in emulated waits. A copy, which takes units of the GPU, has to keep two thirds of the gain."""
    rounds = min(machine.rounds, 7)
    for milliseconds in (0.3, 0.6) if machine.has_gpu else (2.0,):
        gains: dict[str, float] = {}
        for kind in get_args(Kind):
            for parts in (1, 2, 4) if machine.has_gpu else (1,):
                what = f"{milliseconds:g} ms per wait, {kind}, W in {parts} parts"
                if kind == "copy" and not machine.has_gpu:
                    yield Line("waits", what, UNTRIED)
                    continue
                found = measure(machine.device, Link(machine.device, milliseconds, kind), parts, rounds)
                gains[kind] = max(gains.get(kind, 0.0), found.gain)
                yield Line("waits", what, "PASS" if found.is_equal else "FAIL", str(found), found._asdict())
        if machine.has_gpu:
            text = ", ".join(f"{kind} {gain:.1%}" for kind, gain in gains.items())
            good = gains["copy"] >= gains["sleep"] * 2 / 3
            yield Line("waits", f"{milliseconds:g} ms per wait, best gains", machine.judged(good), text, gains)


# Copies to the host's memory.


def offload(machine: Machine) -> Iterator[Line]:
    """Two stages on one rank; what waits goes to the host as soon as it is there, and comes back at the last moment.

    Activations wait for their I longest, and deferred gradients for their W, if all F come first, then all I, then all
    W. Activations make up most of the memory if W follows its I at once.
    """
    for what in Offload:
        orders = ["F", "IW"] if what is Offload.ACTIVATIONS else ["F", "I", "W"]
        (expected, plain), (found, copied) = (_offloaded(machine, orders, each) for each in (None, what))
        error = max(map(distance, found, expected))
        times, peaks = ([each[name] for each in (plain, copied)] for name in ("seconds", "peak"))
        text = f"gradients differ by {error:.1e}; step {1e3 * times[0]:.0f} to {1e3 * times[1]:.0f} ms"
        text += f", peak {peaks[0] / 2**20:.1f} to {peaks[1] / 2**20:.1f} MiB"
        # The meter of the CPU does not see that a tensor's memory shrinks.
        saves = peaks[1] < peaks[0] or not machine.has_gpu
        figures = {"plain": plain, "copied": copied}
        yield Line("offload", what.value, "PASS" if error == 0 and saves else "FAIL", text, figures)


def _offloaded(
    machine: Machine, orders: Sequence[str], what: Offload | None, microbatches: int = 4
) -> tuple[list[Tensor], dict[str, float]]:
    """Gradients of a step, and its seconds and bytes."""
    size = SIZES[machine.device.type]["large" if machine.has_gpu else "tiny"]
    options: Any = {"device": machine.device, "dtype": DTYPES[machine.device.type]}
    torch.manual_seed(0)
    block = partial(Block, size.dim, size.heads, size.kv_heads, size.seq)
    modules = [nn.Sequential(*(checkpointed(block(), "full") for _ in range(2))).to(**options) for _ in range(2)]
    stages = [PipelineStage(module, index, 2, machine.device) for index, module in enumerate(modules)]
    schedule: Any = zbpipe.build_pipeline_schedule("ZBV", stages, microbatches, nn.functional.mse_loss)
    plain = schedule_w_last(2, microbatches, orders)
    schedule.adopt(plain if what is None else copy_all(plain, what))
    x, target = torch.randn(2, microbatches, size.seq, size.dim, **options)

    def step() -> None:
        for module in modules:
            module.zero_grad(set_to_none=False)
        schedule.step(x, target=target)

    # On a GPU attention's backward adds in any order, unless told otherwise. New memory is filled with NaN then, too.
    torch.use_deterministic_algorithms(True)
    for _ in range(2):  # the first steps also check and count
        step()
    gradients = [weight.grad.clone() for module in modules for weight in module.parameters()]  # type: ignore[union-attr]
    torch.use_deterministic_algorithms(False)
    with meter(machine.device) as bytes_:
        step()
        peak = bytes_.peak
    return gradients, {"seconds": machine.median(step), "peak": float(peak)}


# Ranks that share the GPU.


class Cell(NamedTuple):
    ranks: int
    """Of the pipeline."""
    schedule: str
    backend: str = "fifo_one_queue"
    delayed: bool = False
    """Whether every W comes late on its stream: what does not wait for it reads too early."""
    sanitized: bool = False
    """Whether torch's sanitizer of streams looks on."""
    shards: int = 1
    """Number of ranks over which FSDP2 shards each stage."""
    mode: str = "overlap"
    """What FSDP2 does during the computations."""
    compiled: bool = False

    @property
    def processes(self) -> int:
        return self.ranks * self.shards

    def __str__(self) -> str:
        how = [*([f"FSDP2 over {self.shards}, {self.mode}"] if self.shards > 1 else [])]
        how += ["compiled"] if self.compiled else []
        how += [*(["W delayed"] if self.delayed else []), *(["under TORCH_CUDA_SANITIZER"] if self.sanitized else [])]
        return ", ".join([f"p = {self.ranks}, {self.schedule}, {self.backend}", *how])


PLAIN_CELLS = [
    Cell(1, "ZBV"),
    Cell(2, "ZBV"),
    Cell(2, "ZBH1"),
    Cell(4, "ZBV"),
    Cell(4, "VHalf"),
    Cell(4, "ZBV", "fifo_queue_per_edge"),
    Cell(2, "ZBV", shards=2),
    Cell(2, "ZBH1", shards=2),
    Cell(2, "ZBV", shards=2, mode="reshard"),
    Cell(2, "ZBV", compiled=True),
    Cell(2, "ZBV", shards=2, compiled=True),
]
GPU_CELLS = [
    *(cell._replace(delayed=True) for cell in PLAIN_CELLS),
    *(Cell(2, "ZBV", sanitized=True, shards=shards) for shards in (1, 2)),
]


def ranks(machine: Machine) -> Iterator[Line]:
    """Ranks in processes of their own, NCCL's order of messages, and the gradients of the model in one piece."""
    plain, gpu = ([cell for cell in some if cell.ranks in machine.ranks] for some in (PLAIN_CELLS, GPU_CELLS))
    cells = [*plain, *(gpu if machine.has_gpu else [])]
    for processes in dict.fromkeys((cell.processes, cell.sanitized) for cell in cells):
        together = [cell for cell in cells if (cell.processes, cell.sanitized) == processes]
        try:
            errors = _on_ranks(together, machine.device)
        except Exception as failure:
            reason = str(failure).strip().splitlines()[-1]
            yield from (Line("ranks", str(cell), "FAIL", reason) for cell in together)
            continue
        for cell, error in zip(together, errors, strict=True):
            text = f"gradients differ by {error:.1e}"
            yield Line("ranks", str(cell), "PASS" if error < 1e-4 else "FAIL", text, {"error": error})
    if not machine.has_gpu:
        yield from (Line("ranks", str(cell), UNTRIED) for cell in gpu)


def _on_ranks(cells: Sequence[Cell], device: torch.device) -> list[float]:
    """The worst error of each cell, over all ranks. On a GPU they are no forks: torch reads the variable of its
    sanitizer when it is imported."""
    with patch.dict(os.environ, {"TORCH_CUDA_SANITIZER": "1"} if cells[0].sanitized else {}):
        method = "spawn" if device.type == "cuda" else "forkserver"
        by_rank = run_ranks(cells[0].processes, train_all, cells, device, method=method)
    return [max(errors) for errors in zip(*by_rank, strict=True)]


def _join(processes: Any, timeout: float) -> None:
    """Wait for what `mp.spawn` started; all of it is gone when this returns or raises.

    Raises:
        Exception: one of theirs; or TimeoutError after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    try:
        while not processes.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end within {timeout:.0f} seconds")
    finally:
        for process in processes.processes:
            process.kill()
            process.join()


def train_all(cells: Sequence[Cell], device: torch.device) -> list[float]:
    import fifo  # noqa: F401  # registers the backends, here and not in the process that only looks on

    return [_train(cell, device) for cell in cells]


def _train(cell: Cell, device: torch.device, microbatches: int = 8) -> float:
    """Two steps; how far the gradients of the second are from those of the model in one piece."""
    group, shards = _groups(cell)
    rank = dist.get_rank(group)
    num_stages = cell.ranks * len(zbpipe.stage_indices(cell.schedule, rank=rank, num_ranks=cell.ranks))
    dim, tokens = (512, 128) if device.type == "cuda" else (32, 8)
    model = [_stage(index, dim, tokens).to(device) for index in range(num_stages)]
    parts = {
        index: copy.deepcopy(model[index])
        for index in zbpipe.stage_indices(cell.schedule, rank=rank, num_ranks=cell.ranks)
    }
    if cell.shards > 1:
        for part in parts.values():
            fully_shard(part, mesh=DeviceMesh.from_group(shards, device.type))
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no reduction that scales
    if cell.compiled:
        for part in parts.values():
            part.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    stages = [PipelineStage(part, index, num_stages, device, group=group) for index, part in parts.items()]
    schedule: Any = zbpipe.build_pipeline_schedule(
        cell.schedule, stages, microbatches, nn.functional.mse_loss, fsdp_mode=cell.mode
    )
    torch.manual_seed(1)
    x, target = torch.randn(2, microbatches, tokens, dim).to(device)
    with hooks.hook(schedule, hooks.HookOrder.RECORD, _late_w) if cell.delayed else nullcontext():
        for _ in range(2):
            for part in parts.values():
                part.zero_grad()
            schedule.step(*([x] if 0 in parts else []), target=target if num_stages - 1 in parts else None)
    for one, goal in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        (nn.functional.mse_loss(nn.Sequential(*model)(one), goal) / microbatches).backward()
    synchronize(device)
    return max(
        _distance_of_shards(weight.grad, other.grad)  # type: ignore[arg-type]
        for index, part in parts.items()
        for weight, other in zip(part.parameters(), model[index].parameters(), strict=True)
    )


def _groups(cell: Cell) -> tuple[Any, Any]:
    """This process's group of the pipeline, and the one over which its stages are sharded."""
    numbers = torch.arange(cell.processes).view(cell.ranks, cell.shards)
    options: Any = {"timeout": timedelta(seconds=120), "backend": cell.backend}
    (pipeline, _), (shards, _) = (
        dist.new_subgroups_by_enumeration(each.tolist(), **options) for each in (numbers.T, numbers)
    )
    return pipeline, shards


def _distance_of_shards(found: Tensor, expected: Tensor) -> float:
    if not isinstance(found, DTensor):
        return distance(found, expected)
    whole: Any = distribute_tensor(expected, found.device_mesh, found.placements, src_data_rank=None)
    return distance(found.to_local(), whole.to_local())


def _stage(index: int, dim: int, tokens: int) -> nn.Module:
    torch.manual_seed(100 + index)
    return Block(dim, dim // 16, max(dim // 64, 1), tokens)


def _late_w(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
    if kind == "W":
        torch.cuda._sleep(SLEEP)
    return compute()


# The command.

PARTS: dict[str, Callable[[Machine], Iterator[Line]]] = {
    part.__name__: part for part in (pipeline, host, connections, graph, capture, late, waits, outside, offload, ranks)
}


def run(machine: Machine, parts: Sequence[str]) -> Iterator[Line]:
    """The lines of some parts; a part that raises ends with a line that fails."""
    for name in parts:
        try:
            yield from PARTS[name](machine)
        except Exception as error:
            traceback.print_exc()
            yield Line(name, type(error).__name__, "FAIL", str(error).strip().splitlines()[0] if str(error) else "")


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    numbers = sorted({cell.ranks for cell in PLAIN_CELLS})
    arguments.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments.add_argument("--rounds", type=int, default=21, help="of everything that is timed")
    arguments.add_argument("--device", choices=("cpu", "cuda"), help="cuda, also for ROCm, if there is one")
    arguments.add_argument("--ranks", nargs="+", type=int, choices=numbers, default=numbers)
    arguments.add_argument("--json", **JSON)
    return arguments.parse_args()


def main() -> int:
    arguments = parse_arguments()
    device = choose_device(arguments.device)
    machine = Machine(device, max(arguments.rounds, 1), arguments.ranks)
    torch.set_num_threads(1)
    fork_from("fifo")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, no deterministic products
    print(", ".join(f"{name} {value}" for name, value in about(device).items()), flush=True)
    lines = []
    for part in arguments.parts:
        with single_rank(*((RANK, RANKS) if part == "host" else ())):  # only the ranks' messages leave this process
            for line in run(machine, [part]):
                print(line, flush=True)
                lines.append(line)
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in get_args(Verdict)}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    write_json(arguments.json, device, lines)
    return int(counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
