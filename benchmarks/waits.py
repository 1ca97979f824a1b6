"""W's products in waits for emulated collectives: steps with and without them, and a model of the gain.

On a GPU one rank runs blocks in the local shapes of Llama 3 70B with tensor parallelism of 8. A collective is a kernel
on another stream, which only waits ("sleep"), or copies by 24 blocks of threads that take units from products ("copy").
On a CPU two ranks over gloo run small blocks. Each of their collectives ends some milliseconds after its launch. There
the clock counts this thread's CPU time and the emulated waits, so that other processes do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from functools import cache
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import parser, synchronize
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime import device as devices
from zbpipe.runtime.split.waits import MEASURED_STEP

Kind = Literal["sleep", "copy"]
MICROBATCHES, THREAD_BLOCKS, WAITS_AFTER_A_PRODUCT = 8, 24, 3


SHAPES = {"cuda": (8192, 8, 1, 128, 3584, 8192), "cpu": (256, 4, 4, 32, 512, 256)}
"""Width, heads, heads of keys, width of a head, width of the feed-forward layer, and tokens, on one rank."""


class Link:
    """Launches collectives, and waits for them."""

    def __init__(self, device: torch.device, milliseconds: float, kind: Kind = "sleep") -> None:
        self.seconds, self.kind, self.waited = milliseconds / 1e3, kind, 0.0
        self.on_gpu = device.type == "cuda"
        self._ends: dict[int, Any] = {}
        self._wait = funcol.wait_tensor
        if self.on_gpu:
            self._stream, self._repeats = torch.cuda.Stream(), 1
            start, one, two = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            x = torch.ones(SHAPES["cuda"][-1], SHAPES["cuda"][0], device=device, dtype=torch.bfloat16)
            _copy(x, 1)
            start.record()
            torch.cuda._sleep(10_000_000)
            one.record()
            _copy(x, 10)
            two.record()
            two.synchronize()
            self._cycles = int(10_000_000 * milliseconds / start.elapsed_time(one))
            self._repeats = max(round(10 * milliseconds / one.elapsed_time(two)), 1)

    def now(self) -> float:
        return time.thread_time() + self.waited

    def launch(self, x: Tensor) -> Tensor:
        if not self.on_gpu:
            mean = x / dist.get_world_size()
            result: Tensor = torch.ops._c10d_functional.all_reduce(mean, "sum", dist.group.WORLD.group_name)  # type: ignore[union-attr]
            self._ends[result.data_ptr()] = self.now() + self.seconds
            return result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self.kind == "sleep":
                torch.cuda._sleep(self._cycles)
            result = _copy(x, self._repeats if self.kind == "copy" else 1)
            self._ends[result.data_ptr()] = torch.cuda.Event()
            self._ends[result.data_ptr()].record()
        result.record_stream(torch.cuda.current_stream())
        x.record_stream(self._stream)
        return result

    def wait(self, tensor: Tensor) -> Tensor:
        end = self._ends.pop(tensor.data_ptr())
        if self.on_gpu:
            torch.cuda.current_stream().wait_event(end)
            return tensor
        self.waited += max(end - self.now(), 0.0)
        result: Tensor = self._wait(tensor)
        return result


@cache
def _copying_kernel() -> Any:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(x, y, elements, repeats, step: tl.constexpr):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            for start in range(tl.program_id(0) * step, elements, tl.num_programs(0) * step):
                places = start + tl.arange(0, step)
                tl.store(y + places, tl.load(x + places, places < elements), places < elements)

    return kernel


def _copy(x: Tensor, repeats: int) -> Tensor:
    """A copy by few blocks of threads, as NCCL's kernels are."""
    y = torch.empty_like(x)
    _copying_kernel()[(THREAD_BLOCKS,)](x, y, x.numel(), repeats, step=8192)
    return y


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return funcol.wait_tensor(link.launch(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return funcol.wait_tensor(ctx.link.launch(dy.contiguous())), None


class _Cut(nn.Module):
    """A linear layer whose weight gradient is several products, each of some rows."""

    def __init__(self, inputs: int, outputs: int, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(inputs, outputs // parts, bias=False) for _ in range(parts))

    def forward(self, x: Tensor) -> Tensor:
        found = [part(x) for part in self.parts]
        return torch.cat(found, -1) if len(found) > 1 else found[0]


class _Block(nn.Module):
    def __init__(self, shapes: tuple[int, ...], parts: int, link: Link) -> None:
        super().__init__()
        dim, heads, kv_heads, self.head_dim, hidden, _ = shapes
        self.link, self.norms = link, nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.query, self.out = _Cut(dim, heads * self.head_dim, parts), _Cut(heads * self.head_dim, dim, parts)
        self.key, self.value = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (_Cut(dim, hidden, parts) for _ in range(2))
        self.down = _Cut(hidden, dim, parts)

    def forward(self, x: Tensor) -> Tensor:
        h = _Collective.apply(self.norms[0](x), self.link)
        query, key, value = (
            of(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for of in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + _Collective.apply(self.out(mixed.transpose(1, 2).flatten(2)), self.link)
        h = _Collective.apply(self.norms[1](x), self.link)
        return x + _Collective.apply(self.down(F.silu(self.gate(h)) * self.up(h)), self.link)


class Result(NamedTuple):
    plain: float
    """Seconds of a step without fills."""
    filled: float
    model: float
    """Seconds that fills save if W were divisible, and fast as in its op."""
    in_waits: float
    """Share of W's products that ran in waits."""
    is_equal: bool
    """Whether gradients are bit-identical."""

    @property
    def gain(self) -> float:
        return 1 - self.filled / self.plain

    def __str__(self) -> str:
        share = f", {(self.plain - self.filled) / self.model:.0%} of the model's gain" if self.model else ""
        return f"{1e3 * self.plain:.0f} to {1e3 * self.filled:.0f} ms, {self.gain:.1%} shorter{share}"


def measure(device: torch.device, link: Link, parts: int, rounds: int) -> Result:
    """Steps of ZBV with both of its stages on this rank, filled and not in turns."""
    torch.manual_seed(0)
    shapes = SHAPES[device.type]
    like: Any = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    with ExitStack() as patched:
        patched.enter_context(patch.object(funcol, "wait_tensor", link.wait))
        if not link.on_gpu:
            patched.enter_context(
                patch.object(devices._Moment, "record", lambda mark: setattr(mark, "time", link.now()))
            )
        modules = [_Block(shapes, parts, link).to(**like) for _ in range(2)]
        group = dist.new_subgroups(1)[0]
        stages = [PipelineStage(each, index, 2, device, group=group) for index, each in enumerate(modules)]
        schedule: Any = zbpipe.build_pipeline_schedule(
            "ZBV", stages, MICROBATCHES, nn.functional.mse_loss, fill_waits="own"
        )
        x, target = torch.randn(2, MICROBATCHES, shapes[-1], shapes[0], **like)

        def step() -> float:
            for module in modules:
                module.zero_grad()
            synchronize(device)
            before = time.perf_counter() if link.on_gpu else link.now()
            schedule.step(x, target=target)
            synchronize(device)
            return (time.perf_counter() if link.on_gpu else link.now()) - before

        in_w: list[float] = []
        with patch.object(schedule.waits, "_log", lambda: in_w.extend(schedule.waits.seconds_of_w())):
            for _ in range(MEASURED_STEP):
                step()
        model = sum(min(each, WAITS_AFTER_A_PRODUCT * link.seconds) for each in in_w)
        budgets, gradients = schedule.waits.budgets, {}
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for fills in (False, True):
                schedule.waits.budgets, schedule.waits.filled = budgets if fills else {}, 0
                times[fills].append(step())
                gradients[fills] = [each.grad for module in modules for each in module.parameters()]
        is_equal = all(map(torch.equal, *gradients.values()))
        plain, filled = (statistics.median(each) for each in times.values())
        in_waits = schedule.waits.filled / MICROBATCHES / len(schedule.waits._may_fill)
        return Result(plain, filled, model, in_waits, is_equal)


def worker(milliseconds: list[float], parts: int, rounds: int) -> list[Result]:
    cpu = torch.device("cpu")
    return [measure(cpu, Link(cpu, each), parts, rounds) for each in milliseconds]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--milliseconds", type=float, nargs="+", default=[0, 1, 2, 4, 8, 16])
    arguments.add_argument("--parts", type=int, default=1, help="into which each product of W is cut, by rows")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    found = run_ranks(2, worker, options.milliseconds, options.parts, options.rounds, timeout=900)
    for milliseconds, *results in zip(options.milliseconds, *found, strict=True):
        for rank, each in enumerate(results):
            print(f"{milliseconds:4.1f} ms, rank {rank}: {each}, {each.in_waits:.0%} of W in waits, {each.is_equal}")
    return int(not all(each.is_equal for results in found for each in results))


if __name__ == "__main__":
    sys.exit(main())
