"""Step times of a pipeline on one GPU: each rank is a process with a share of the GPU's units, by CUDA's MPS.

NCCL refuses two ranks on one GPU, so messages go through `ipc.py`. No setting of the GPU changes, and MPS's daemon ends
with this command. On the CPU (`--device cpu`) it shows that the logic is right, and nothing about speed. It has not run
on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import JSON, choose_device, distance, markdown, parser, synchronize, write_json
from ipc import LIMIT, QUEUES, connect, gathered, make_flags, new_group
from llama import Block, checkpointed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.costs.model import Transport
from zbpipe.runtime.measure.profiler import make_timelines
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.runtime.measure.transport import find_messages
from zbpipe.schedule.registry import resolve

SCHEDULES = ("1F1B", "Interleaved1F1B:2", "Interleaved1F1B:4", "ZBVZeroBubble", "ZBH1", "ZBV", "ZB:2", "ZB:4")
"""NAME:v has v stages per rank. With checkpointing ZBVZeroBubble is left out: torch's split fails there."""
BASELINE = "Interleaved1F1B:2"
ERROR = 3e-2
"""How far bfloat16's gradients may be from those of the model in one piece, relative to them."""
PROMISED, ON_BUSY_CPUS = 5.0, 30.0
"""Seconds after a failure in which all ranks end, and on CPUs, which other processes may use."""


@dataclass(frozen=True)
class Job:
    device: torch.device
    ranks: int
    microbatches: int
    rounds: int
    dim: int
    tokens: int
    blocks: int
    schedules: tuple[str, ...]
    queues: tuple[str, ...]
    checkpointing: tuple[Any, ...]
    transport: str | None = None
    """For which zbpipe's schedules are made, and steps simulated, if not for the queues."""
    fails: bool = False
    """Whether the last rank fails in the third step, while the other hosts wait for the device."""

    @property
    def slot_bytes(self) -> int:
        """Of the largest message; links are measured with a MiB at least."""
        return max(1 << 20, 4 * self.tokens * self.dim)


class Result(NamedTuple):
    """Steps of a schedule, in seconds."""

    checkpointing: str
    queues: str
    schedule: str
    step: float
    """The median."""
    relative: float
    """To `BASELINE`, or the first schedule: the median of steps of the same turn."""
    simulated: float
    """With the times of ops, messages and queues of this job."""
    error: float
    """Of the gradients."""


# One rank.


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds from the last rank's start to the last one's end. All processes have one monotonic clock."""
    synchronize(device)
    dist.barrier()
    start = time.monotonic()
    function()
    synchronize(device)
    starts, ends = zip(*gathered((start, time.monotonic())), strict=True)
    return max(ends) - max(starts)


def slowdowns(device: torch.device) -> dict[str, float]:
    """Time of all ranks at once relative to one rank alone.

    Products: 1 if each rank has units of its own. Copies: how much more of the memory's bandwidth a rank has while the
    others idle. On GPUs of their own ranks have no such gain, which shortens the ends of 1F1B's steps the most.
    """
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
    x, y = torch.randn(2, size, size, device=device, dtype=dtype)
    found = {}
    for name, run in (("products", partial(torch.mm, x, x, out=y)), ("copies", partial(y.copy_, x))):
        work = partial(timeit, run, number=100)
        timed(work, device)
        alone = [timed(work if dist.get_rank() == 0 else int, device) for _ in range(3)]
        found[name] = median(timed(work, device) for _ in range(3)) / median(alone)
    return found


class Trained(NamedTuple):
    schedule: Any
    parts: Mapping[int, nn.Module]
    step: Callable[[], None]


def train(
    job: Job, name: str, group: Any, transport: str, model: Sequence[nn.Module], x: Tensor, target: Tensor
) -> Trained:
    """Build a schedule on this rank's part of `model`."""
    name, _, per_rank = name.partition(":")
    stages_per_rank = int(per_rank) if per_rank else None
    total = resolve(name).place(job.ranks, stages_per_rank).num_stages
    own = zbpipe.stage_indices(name, rank=dist.get_rank(), num_ranks=job.ranks, stages_per_rank=stages_per_rank)
    size = len(model) // total
    parts = {n: nn.Sequential(*copy.deepcopy(list(model[n * size : (n + 1) * size]))) for n in own}
    stages = [PipelineStage(part, n, total, job.device, group=group) for n, part in parts.items()]
    options = {"transport": transport} if resolve(name).source != "torch" else {}
    schedule: Any = zbpipe.build_pipeline_schedule(name, stages, job.microbatches, nn.functional.mse_loss, **options)

    def step() -> None:
        for part in parts.values():
            part.zero_grad(set_to_none=False)
        schedule.step(*([x] if 0 in parts else []), target=target if total - 1 in parts else None)

    return Trained(schedule, parts, step)


def measure(job: Job, folder: Path, say: Callable[[Any], object]) -> None:
    """Times of all schedules, on all ranks of the default group: `say` gets each `Result`."""
    dtype = torch.bfloat16 if job.device.type == "cuda" else torch.float32
    new = partial(new_group, edges=connect(job.device, folder, job.slot_bytes), flags=make_flags(job.device, folder))
    found = slowdowns(job.device)
    say(f"time of all ranks at once, relative to one alone: {found}")
    if job.device.type == "cuda" and found["products"] > 1.3:
        raise RuntimeError("the ranks take turns on the GPU, so times of schedules would mean nothing")
    torch.manual_seed(0)
    heads = job.dim // (128 if job.dim >= 512 else 16)
    blocks = [Block(job.dim, heads, heads // 4, job.tokens).to(job.device, dtype) for _ in range(job.blocks)]
    x, target = torch.randn(2, job.microbatches, job.tokens, job.dim).to(job.device, dtype)
    whole = nn.Sequential(*copy.deepcopy(blocks))
    for one, goal in zip(x.chunk(job.microbatches), target.chunk(job.microbatches), strict=True):
        (nn.functional.mse_loss(whole(one), goal) / job.microbatches).backward()
    for checkpointing, queue in itertools.product(job.checkpointing, job.queues):
        transport = job.transport or queue
        model = [checkpointed(copy.deepcopy(block), checkpointing) for block in blocks]
        names = [each for each in job.schedules if checkpointing == "none" or each != "ZBVZeroBubble"]
        trained = {name: train(job, name, new(queue), transport, model, x, target) for name in names}
        errors = {name: _check(job, each, whole) for name, each in trained.items()}
        times: dict[str, list[float]] = {name: [] for name in trained}
        for _, name in itertools.product(range(job.rounds), trained):  # in turns: the GPU's clock drifts
            times[name].append(timed(trained[name].step, job.device))
        reference = times[BASELINE if BASELINE in times else names[0]]
        for name, each in trained.items():
            relative = median(one / other for one, other in zip(times[name], reference, strict=True))
            simulated = _simulate(each, Transport.parse(transport))
            say(Result(checkpointing, queue, name, median(times[name]), relative, simulated, errors[name]))


def _check(job: Job, trained: Trained, whole: nn.Sequential) -> float:
    """The largest error of a gradient over all ranks, after three steps. zbpipe's first two also check contents."""
    for _ in range(3):
        trained.step()
    synchronize(job.device)
    blocks, worst = list(whole), 0.0
    size = len(blocks) // (len(trained.parts) * job.ranks)
    for n, part in trained.parts.items():
        own, expected = part.parameters(), nn.Sequential(*blocks[n * size : (n + 1) * size]).parameters()
        for one, other in zip(own, expected, strict=True):
            error = distance(one.grad, other.grad)  # type: ignore[arg-type]
            worst = max(worst, math.inf if math.isnan(error) else error)
    return max(gathered(worst))


def _simulate(trained: Trained, transport: Transport) -> float:
    records: list[StepRecord] = []
    collect(trained.schedule, [Wanted.TIMES], records.extend)
    trained.step()
    planned = make_timelines(trained.schedule, records[0]).planned
    receives = find_messages(trained.schedule)[1]
    return zbpipe.simulate(planned.schedule, planned.costs, transport=transport, receives=receives).makespan


def fail(job: Job, folder: Path) -> None:
    """In the third step the last rank fails, and the other hosts wait for the device."""
    group = new_group("one queue", connect(job.device, folder, job.slot_bytes), make_flags(job.device, folder))
    model = [nn.Linear(16, 16, device=job.device) for _ in range(2 * job.ranks)]
    x, target = torch.randn(2, job.microbatches, 16, device=job.device)
    trained = train(job, "ZBV", group, "one queue", model, x, target)
    for _ in range(2):
        trained.step()

    def raise_error(*given: Any) -> None:
        (folder / "failed").write_text(str(time.monotonic()))
        raise ArithmeticError("this rank fails")

    if dist.get_rank() == job.ranks - 1:
        next(iter(trained.parts.values())).register_forward_pre_hook(raise_error)
    trained.step()
    for part in trained.parts.values():
        for weight in part.parameters():
            weight.grad.sum().item()  # type: ignore[union-attr]


def rank_main(rank: int, job: Job, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=job.ranks, timeout=limit)
    results = folder / "results"

    def say(what: Any) -> None:
        if rank:
            return
        print(what, flush=True)
        if isinstance(what, Result):
            with results.open("a") as file:
                print(json.dumps(what._asdict()), file=file)

    if job.fails:
        fail(job, folder)
    else:
        measure(job, folder, say)
        dist.barrier()
        dist.destroy_process_group()


# All ranks.


class Ends(NamedTuple):
    codes: Sequence[int | None]
    """None: it had to be killed."""
    seconds: float
    """From the failure, if one was planned, to the last end."""
    results: Sequence[Result]


def start(job: Job, seconds: float) -> Ends:
    """Run all ranks. All processes are gone when this returns."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, _mps(job, name):
        folder = Path(name)
        ranks = [context.Process(target=rank_main, args=(rank, job, folder), daemon=True) for rank in range(job.ranks)]
        for each in ranks:
            each.start()
        until = time.monotonic() + seconds
        try:
            while any(each.is_alive() for each in ranks) and time.monotonic() < until:
                if not job.fails and any(each.exitcode for each in ranks):
                    break
                time.sleep(0.02)
            end, codes = time.monotonic(), [each.exitcode for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.join()
        failed, results = folder / "failed", folder / "results"
        took = end - float(failed.read_text()) if failed.exists() else 0.0
        lines = results.read_text().splitlines() if results.exists() else []
        return Ends(codes, took, [Result(**json.loads(each)) for each in lines])


@contextlib.contextmanager
def _mps(job: Job, folder: str) -> Iterator[None]:
    """A daemon of these ranks alone, whose files are in folders of its own."""
    # Memory of expandable segments cannot be shared by IPC.
    settings = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:False")
    settings |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    control = "nvidia-cuda-mps-control"
    kept = {name: value for name, value in os.environ.items() if name == "CUDA_DEVICE_MAX_CONNECTIONS"}
    with patch.dict(os.environ, settings | kept):
        if job.device.type == "cpu":
            yield
            return
        if not shutil.which(control):
            sys.exit(f"{control} is missing: without MPS ranks take turns, and times of schedules mean nothing")
        os.environ |= dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        subprocess.run([control, "-d"], check=True, timeout=30)
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // job.ranks)
        try:
            yield
        finally:
            subprocess.run([control], input="quit -t 5\n", text=True, timeout=30, check=False)


def table(results: Sequence[Result]) -> str:
    heads = ["checkpointing", "queues", "schedule", "step, ms", "relative", "simulated", "step/simulated", "error"]
    rows = []
    for each in results:
        times = f"{1e3 * each.step:.1f}", f"{each.relative:.3f}", f"{1e3 * each.simulated:.1f}"
        rows.append([*each[:3], *times, f"{each.step / each.simulated:.3f}", f"{each.error:.1e}"])
    return markdown(heads, rows, left=3)


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--device", choices=("cpu", "cuda"), help="cuda if there is one")
    sizes = {"ranks": 4, "microbatches": 16, "rounds": 7, "dim": 1536, "tokens": 2048, "seconds": 280}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default)
    add("--schedules", nargs="+", default=SCHEDULES)
    add("--queues", nargs="+", choices=list(QUEUES), default=list(QUEUES))
    add("--checkpointing", nargs="+", choices=("none", "selective", "full"), default=("none", "selective"))
    add("--transport", help="for which zbpipe's schedules are made, and steps simulated, if not for the queues")
    add("--fails", action="store_true", help="see only how all ranks end after one has failed")
    add("--json", **JSON)
    return arguments.parse_args()


def main() -> int:
    asked = parse_arguments()
    device = choose_device(asked.device)
    sizes = {name: getattr(asked, name) for name in ("ranks", "microbatches", "rounds", "dim", "tokens")}
    lists: dict[str, Any] = {name: tuple(getattr(asked, name)) for name in ("schedules", "queues", "checkpointing")}
    job = Job(device=device, blocks=4 * asked.ranks, transport=asked.transport, fails=asked.fails, **sizes, **lists)
    ends = start(job, asked.seconds)
    write_json(asked.json, device, [each._asdict() for each in ends.results])
    if asked.fails:
        print(f"the last rank ended {ends.seconds:.1f} s after the failure; exit codes {ends.codes}")
        most = ON_BUSY_CPUS if device.type == "cpu" else PROMISED
        return int(None in ends.codes or 0 in ends.codes or ends.seconds > most)
    print(table(ends.results))
    wrong = [each.schedule for each in ends.results if each.error >= ERROR]
    if wrong or any(ends.codes) or None in ends.codes:
        print(f"FAIL within {asked.seconds} s: exit codes {ends.codes}, wrong gradients of {wrong or 'none'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
