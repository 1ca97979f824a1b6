"""Small trials of what GPUs run differently from CPUs, each in a process of its own.

A GPU's fault ends the process, or breaks it for later work. Trials also run on a CPU, to test the trials themselves.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from zbpipe.costs.job import JobCosts
from zbpipe.costs.model import CostModel
from zbpipe.runtime._torch import fsdp2, pipelining
from zbpipe.runtime.build import build_pipeline_schedule
from zbpipe.runtime.device import find_device
from zbpipe.runtime.measure.profiler import Profiler
from zbpipe.runtime.measure.recording import MemoryCounter
from zbpipe.runtime.ranks.failures import end_at_once
from zbpipe.runtime.ranks.progress import MOST, Launched
from zbpipe.runtime.split.stage import find_weight_work
from zbpipe.runtime.verify.gradient_check import schedule_w_last
from zbpipe.schedule.ir import Op, OpKind, Schedule
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.offloading import Offload, copy_all

SECONDS = 120.0
"""Limit of a trial, mostly for compilers."""
WAY_OUT = "--zbpipe.plain (in Python plain=True), which leaves these parts out"
"""Way out for a job after a failed trial."""
MICROBATCHES, DIM, ROWS = 4, 256, 64
PER_EDGE = "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P"
"""torch's variable (from 2.15 on) for a process group per edge of the pipeline."""


HAS_GROUPS_PER_EDGE = hasattr(torch.distributed.config, "pipeline_per_edge_p2p")


class Result(NamedTuple):
    what: str
    found: str = "works"
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {'FAILS: ' if self.failed else ''}{self.found}"


def try_out(device: str, names: Sequence[str] = ()) -> Iterator[Result]:
    """The result of each trial on a device of this type, one after the other. Default: of all that it can run."""
    devices = 2 if device == "cpu" else torch.accelerator.device_count()
    for name in names or TRIALS:
        ranks = 2 if name in _OF_TWO else 1
        if ranks > devices:
            yield Result(name, "untried, because it needs two GPUs")
        elif name == _PER_EDGE and not HAS_GROUPS_PER_EDGE:
            yield Result(name, f"untried, because torch {torch.__version__} has none")
        else:
            yield _run_apart(name, device, ranks)


def _run_apart(name: str, device: str, ranks: int) -> Result:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zbpipe.runtime.verify.on_device", name, device]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), os.path.join(folder, "meeting")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(ranks)
        ]
        complaints = []
        try:
            for process in processes:
                _, said = process.communicate(timeout=SECONDS)
                if process.returncode:
                    complaints.append(_find_error(said) or f"exit code {process.returncode}")
        except subprocess.TimeoutExpired:
            complaints.append(f"not finished after {SECONDS:.0f} seconds")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return Result(name, complaints[0], failed=True) if complaints else Result(name)


def _find_error(said: str) -> str:
    """A traceback's line with the error, or the last line."""
    lines = re.sub(r"^\[rank\d+\]: ?", "", said.strip(), flags=re.MULTILINE).splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return "".join((errors or lines)[-1:])


def _train(
    device: torch.device,
    *,
    wrap: Callable[[nn.Module], object] = lambda part: None,
    name: str = "ZBV",
    schedule: Schedule | None = None,
    cast: bool = False,
    steps: int = 2,
    attach: Callable[[Any], object] = lambda runtime: None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Gradients of the last step of this rank's part of the pipeline, those of the unsplit model, and the schedule."""
    placement = resolve(name).place(dist.get_world_size())
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)).to(device)
        for _ in range(placement.num_stages)
    ]
    x, target = torch.randn(2, MICROBATCHES * ROWS, DIM).to(device)
    own = {index: parts[index] for index in placement.stages_on(dist.get_rank())}
    torch.autograd.backward([nn.functional.mse_loss(nn.Sequential(*parts)(x), target)])
    expected = _gradients_of(own.values())
    for part in own.values():
        wrap(part)
    stages = [PipelineStage(part, index, len(parts), device) for index, part in own.items()]
    runtime: Any = build_pipeline_schedule(name, stages, MICROBATCHES, nn.functional.mse_loss, **options)
    if schedule is not None:
        runtime.adopt(schedule)
    attach(runtime)
    with torch.autocast(device.type, torch.bfloat16) if cast else nullcontext():
        for _ in range(steps):  # the first I leaves nothing to W
            for part in own.values():
                part.zero_grad()
            runtime.step(*([x] if 0 in own else []), target=target if len(parts) - 1 in own else None)
    find_device(device).synchronize()
    return _gradients_of(own.values()), expected, runtime


def _gradients_of(parts: Iterable[nn.Module]) -> list[Tensor]:
    found = (weight.grad for part in parts for weight in part.parameters())
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found if each is not None]


def _require_same(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    _require(len(found) == len(expected), f"{len(found)} of {len(expected)} gradients are there")
    errors = torch.stack([(one - other).norm() / other.norm() for one, other in zip(found, expected, strict=True)])
    worst = float(errors.max())  # NaN if any is
    _require(worst <= tolerance, f"gradients are off by {worst:.1e} of their norm")


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise RuntimeError(complaint)


_TOLERANCE = 1e-3
"""GPUs may multiply float32 with fewer bits (TF32), and add in another order."""


def _compare(device: torch.device, **options: Any) -> Any:
    """Train, and require the unsplit model's gradients. Returns the schedule."""
    gradients, expected, runtime = _train(device, **options)
    _require_same(gradients, expected, _TOLERANCE)
    return runtime


def _try_events(device: torch.device) -> None:
    _compare(device)
    if device.type == "cpu":  # it has no events
        return
    launched, x = Launched(find_device(device).new_event), torch.ones(DIM, DIM, device=device)
    for microbatch in range(MOST + 1):
        launched.around("F", 0, microbatch, lambda: x.mm(x))
    find_device(device).synchronize()
    _require(launched.count_ended() == MOST + 1, launched.describe())


def _try_fused_w(device: torch.device) -> None:
    (fused, *_), (two_steps, *_) = (_train(device, cast=True, plain=plain) for plain in (False, True))
    _require_same(fused, two_steps, 1e-2)  # a bfloat16 has 8 bits


def _try_offload(device: torch.device) -> None:
    plain = schedule_w_last(2, MICROBATCHES)
    (expected, *_), (gradients, *_) = (_train(device, schedule=each) for each in (plain, copy_all(plain, Offload.ALL)))
    _require_same(gradients, expected, 0)


def _try_measuring(device: torch.device) -> None:
    counter = MemoryCounter(device)
    op, size = Op(0, OpKind.F, 0), 1 << 20
    with counter.within_step(), counter.within_op(op):
        kept = torch.empty(size, dtype=torch.uint8, device=device)
        torch.empty(size, dtype=torch.uint8, device=device)
    found = counter.found[op]
    _require(found.kept == kept.nbytes and found.most == 2 * size, f"{size} and {2 * size} bytes were seen as {found}")
    costs: list[JobCosts] = []
    _compare(device, steps=4, attach=lambda runtime: Profiler(runtime, 1, done=costs.append))
    _require(len(costs) == 1, "nothing was measured")
    measured = costs[0].costs
    assert isinstance(measured, CostModel), "it measures stages"
    _require(min(*measured.f, *measured.i, *measured.w) > 0 and measured.host is not None, f"measured {measured}")


def _try_compiled_w(device: torch.device) -> None:
    for stage in pipelining.stages_of(_compare(device, wrap=lambda part: part.compile())):
        work = find_weight_work(stage)
        _require(work is not None and work.share > 0.9, f"only {work.share if work else 0:.0%} of W could wait")


def _try_fsdp(device: torch.device) -> None:
    _require(fsdp2.IS_KNOWN, f"unknown for torch {torch.__version__}, so FSDP runs as torch has it")
    mesh = DeviceMesh(device.type, [0])
    _compare(device, wrap=lambda part: fully_shard(part, mesh=mesh))


def _try_messages(device: torch.device) -> None:
    for name in ("1F1B", "ZBH1", "ZBV"):
        _compare(device, name=name)


def _try_groups_per_edge(device: torch.device) -> None:
    os.environ[PER_EDGE] = "1"
    _try_messages(device)


_PER_EDGE = "messages in a group per edge"
TRIALS: dict[str, Callable[[torch.device], object]] = {
    "plain schedules": partial(_compare, plain=True),
    "events after computations": _try_events,
    "fused W": _try_fused_w,
    "copies to the host": _try_offload,
    "times and memory of ops": _try_measuring,
    "W of compiled regions": _try_compiled_w,
    "FSDP during computations": _try_fsdp,
    "messages in one queue": _try_messages,
    _PER_EDGE: _try_groups_per_edge,
}
_OF_TWO = ("messages in one queue", _PER_EDGE)


def _main(name: str, device_type: str, rank: int, ranks: int, meeting: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type)
    if device.type != "cpu":
        device = torch.device(device_type, rank)
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    TRIALS[name](device)
    dist.destroy_process_group()


if __name__ == "__main__":
    named, on, number, of, where = sys.argv[1:]
    with end_at_once():
        _main(named, on, int(number), int(of), where)
