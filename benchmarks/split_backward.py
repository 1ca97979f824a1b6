"""What a backward in two halves costs: (time of I + time of W) / time of B, of zbpipe's split and of torch's own.

The stage is number 1 of 3. There both splits do the same work; on the first stage torch runs no I, and the whole
backward in W. Run it from anywhere: `python benchmarks/split_backward.py --help`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from live_bytes import meter
from llama import Block, Checkpointing, checkpointed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from zbpipe.runtime.split.stage import split_backward

Execution = Literal["eager", "compile"]
Split = Literal["torch", "zbpipe"]
Contender = Literal["unsplit", "torch", "zbpipe"]
Action = Literal["F", "B", "I", "W"]
Seconds = dict[Action, float]

ACTIONS: dict[Contender, tuple[Action, ...]] = {
    "unsplit": ("F", "B"),
    "torch": ("F", "I", "W"),
    "zbpipe": ("F", "I", "W"),
}
WARM_UP_PASSES = 3


@dataclass(frozen=True)
class Size:
    """A stage of Llama blocks and its microbatch."""

    dim: int
    seq: int
    batch: int
    head_dim: int
    blocks: int = 2

    @property
    def heads(self) -> int:
        return self.dim // self.head_dim

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 4)


SIZES: dict[str, dict[str, Size]] = {
    "cpu": {
        "tiny": Size(dim=32, seq=8, batch=1, head_dim=16, blocks=8),
        "small": Size(dim=128, seq=128, batch=1, head_dim=64),
        "medium": Size(dim=256, seq=256, batch=2, head_dim=64),
        "large": Size(dim=512, seq=512, batch=2, head_dim=64),
    },
    "cuda": {
        "tiny": Size(dim=64, seq=16, batch=1, head_dim=16, blocks=8),
        "small": Size(dim=1024, seq=2048, batch=1, head_dim=64),
        "medium": Size(dim=2048, seq=4096, batch=1, head_dim=128),
        "large": Size(dim=4096, seq=4096, batch=1, head_dim=128),
    },
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


class Mode(NamedTuple):
    """How a stage runs."""

    execution: Execution
    checkpointing: Checkpointing


class MiddleStage:
    """A `PipelineStage` between two neighbours on the same rank, run one action at a time on one microbatch."""

    def __init__(self, size: Size, mode: Mode, contender: Contender, device: torch.device) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[device.type]}
        block = (size.dim, size.heads, size.kv_heads, size.seq)
        blocks = [checkpointed(Block(*block), mode.checkpointing) for _ in range(size.blocks)]
        self.blocks = nn.Sequential(*blocks).to(**options)
        if mode.execution == "compile":
            for each in blocks:  # one by one, as TorchTitan does it
                each.compile(fullgraph=True)
        self.x, self.dy = torch.randn(2, size.batch, size.seq, size.dim).to(**options)
        # The first module has a parameter, so that its output, the input of the stage in question, requires grad.
        modules = [nn.RMSNorm(size.dim, **options), self.blocks, nn.Identity()]
        stages = [PipelineStage(module, index, 3, device) for index, module in enumerate(modules)]
        self.stage = stages[1]
        _first_step(stages, self.x)
        if contender == "zbpipe":
            split_backward([self.stage], "deferred")

    def receive(self, action: Action) -> None:
        """Get what `action` needs from a neighbour, in memory of its own as if it had been received."""
        if action == "F":
            self.stage.set_local_fwd_input(self.x.clone(), 0)
        elif action in ("B", "I"):
            self.stage.set_local_bwd_input((self.dy.clone(),), 0)

    def run(self, action: Action) -> None:
        """Run `action` of microbatch 0."""
        if action == "F":
            self.stage.forward_one_chunk(0, ())
        elif action == "W":
            self.stage.backward_weight_one_chunk(0)
        else:
            self.stage.backward_one_chunk(0, full_backward=action == "B")

    def send(self, action: Action) -> None:
        """Let go of the result of `action`, as after it was sent to a neighbour."""
        if action == "F":
            self.stage.get_fwd_send_ops(0)
            # Older torch keeps the outputs of a stage until its backward.
            if hasattr(self.stage, "release_fwd_send_outputs"):
                self.stage.release_fwd_send_outputs(0)
        elif action in ("B", "I"):
            self.stage.get_local_bwd_output(0)


def _first_step(stages: Sequence[PipelineStage], x: Tensor) -> None:
    """One step of a schedule: the public way to make stages ready. It leaves a `.grad` in every weight."""
    schedule = ScheduleInterleaved1F1B(
        list(stages), n_microbatches=1, loss_fn=lambda output, target: (output * target).sum()
    )
    schedule.step(x, target=torch.ones_like(x))


class Stopwatch:
    """Times sections of device work: with the device's own events, so that launches may run ahead as in training."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: dict[Action, tuple[Any, Any]] = {}

    @contextmanager
    def section(self, action: Action) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks[action] = (start, self._mark())

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> Seconds:
        """Seconds of each section, once all are done."""
        if not self._on_device:
            return {action: end - start for action, (start, end) in self._marks.items()}
        torch.cuda.synchronize()
        return {action: start.elapsed_time(end) / 1e3 for action, (start, end) in self._marks.items()}


def timed_pass(stage: MiddleStage, actions: Sequence[Action], device: torch.device) -> Seconds:
    """Seconds that each of `actions` took."""
    watch = Stopwatch(device)
    for action in actions:
        stage.receive(action)
        with watch.section(action):
            stage.run(action)
        stage.send(action)
    return watch.seconds()


def measured_bytes(stage: MiddleStage, actions: Sequence[Action], device: torch.device) -> dict[str, int]:
    """Bytes alive after each of `actions` beyond those before the first, and their "peak"; gradients exist already."""
    found: dict[str, int] = {}
    with meter(device) as bytes_:
        for action in actions:
            stage.receive(action)
            stage.run(action)
            stage.send(action)
            found[action] = bytes_.live
        found["peak"] = bytes_.peak
    return found


def warm_up(stage: MiddleStage, actions: Sequence[Action], device: torch.device) -> str | None:
    """Some passes; the first line of the error if they fail."""
    try:
        for _ in range(WARM_UP_PASSES):
            timed_pass(stage, actions, device)
    except RuntimeError as error:
        # torch wraps what happened into its own error and a dump of the stage's tensors.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return str(cause).strip().splitlines()[0]
    return None


def require_same_gradients(expected: nn.Module, found: nn.Module, name: str) -> None:
    """After equally many passes, all contenders have to have the same gradients, or their times mean nothing."""
    for (weight_name, weight), other in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        error = (weight.grad - other.grad).norm() / weight.grad.norm()
        tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
        if not error <= tolerance:
            raise RuntimeError(f"{name}: gradient of {weight_name} is off by {error:.1e} of its norm")


def race(stages: Mapping[Contender, MiddleStage], rounds: int, device: torch.device) -> dict[Contender, list[Seconds]]:
    """Every contender once a round, in a new order each round, so that a slow moment of the machine spares none."""
    times: dict[Contender, list[Seconds]] = {contender: [] for contender in stages}
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        gc.collect()
        order = list(stages)
        shuffle(order)
        for contender in order:
            times[contender].append(timed_pass(stages[contender], ACTIONS[contender], device))
    return times


@dataclass(kw_only=True)
class Result:
    """One line of the table."""

    size: str
    execution: Execution
    checkpointing: Checkpointing
    split: Split
    f: float | None = None
    """Median seconds of this split's F."""
    b: float | None = None
    """Median seconds of the unsplit stage's B."""
    i: float | None = None
    """Median seconds of this split's I."""
    w: float | None = None
    """Median seconds of this split's W."""
    ratio: float | None = None
    """Median over the rounds of (I + W) / B of that round."""
    ratio_quartiles: list[float] = field(default_factory=list)
    """The ratio's first and third quartile."""
    kept_bytes: int | None = None
    """Bytes alive between I and W beyond those before F."""
    peak_bytes: int | None = None
    """The most bytes alive during F, I and W beyond those before F."""
    unsplit_peak_bytes: int | None = None
    """The same during F and B of the unsplit stage."""
    error: str | None = None
    """First line of what the split raised."""


def compare(name: str, size: Size, mode: Mode, rounds: int, device: torch.device) -> list[Result]:
    """Both splits and the ordinary backward on stages with the same weights."""
    torch.compiler.reset()  # all modes compile the same code, and the compiler counts how often
    stages = {c: MiddleStage(size, mode, c, device) for c in get_args(Contender)}
    errors = {c: warm_up(stage, ACTIONS[c], device) for c, stage in stages.items()}
    if errors["unsplit"] is not None:
        raise RuntimeError(f"the ordinary backward fails: {errors['unsplit']}")
    running = {c: stage for c, stage in stages.items() if errors[c] is None}
    for contender, stage in running.items():
        require_same_gradients(running["unsplit"].blocks, stage.blocks, contender)
    # Bytes before times: the passes after a garbage collection free by reference counts alone, as in a training that
    # collects garbage between steps only.
    gc.collect()
    # On the CPU a compiled graph hides its tensors from the meter.
    can_measure = mode.execution == "eager" or device.type == "cuda"
    sizes = {c: measured_bytes(stage, ACTIONS[c], device) for c, stage in running.items() if can_measure}
    times = race(running, rounds, device)
    results = []
    for split in get_args(Split):
        result = Result(size=name, **mode._asdict(), split=split, error=errors[split])
        if split in running:
            _fill_times(result, times[split], times["unsplit"])
        if split in sizes:
            result.kept_bytes, result.peak_bytes = sizes[split]["I"], sizes[split]["peak"]
            result.unsplit_peak_bytes = sizes["unsplit"]["peak"]
        results.append(result)
    return results


def _fill_times(result: Result, split: list[Seconds], unsplit: list[Seconds]) -> None:
    result.f, result.i, result.w = (statistics.median(t[action] for t in split) for action in ("F", "I", "W"))
    result.b = statistics.median(t["B"] for t in unsplit)
    ratios = [(halves["I"] + halves["W"]) / whole["B"] for halves, whole in zip(split, unsplit, strict=True)]
    first, result.ratio, third = statistics.quantiles(ratios, n=4, method="inclusive")
    result.ratio_quartiles = [first, third]


def table(results: Sequence[Result]) -> str:
    """Times in milliseconds, bytes in MiB."""
    heads = [
        "size",
        "execution",
        "checkpointing",
        "split",
        "F",
        "B",
        "I",
        "W",
        "(I+W)/B",
        "quartiles",
        "kept",
        "peak",
        "peak F+B",
    ]
    rows = [heads, *map(_cells, results)]
    # A failure's text goes beyond its column.
    widths = [max(len(row[c]) for row in rows if len(row) == len(heads)) for c in range(len(heads))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if c < 4 else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "F, B, I, W in ms; kept between I and W, and peaks, in MiB"])


def _cells(result: Result) -> list[str]:
    names = [result.size, result.execution, result.checkpointing, result.split]
    if result.error is not None:
        return [*names, f"fails: {result.error}"]
    times = [f"{1e3 * (seconds or 0):.1f}" for seconds in (result.f, result.b, result.i, result.w)]
    quartiles = "-".join(f"{q:.2f}" for q in result.ratio_quartiles)
    sizes = (result.kept_bytes, result.peak_bytes, result.unsplit_peak_bytes)
    return [
        *names,
        *times,
        f"{result.ratio:.3f}",
        quartiles,
        *("-" if n is None else f"{n / 2**20:.1f}" for n in sizes),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names, modes = list(SIZES["cpu"]), list(get_args(Checkpointing))
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds, at least 2 (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--checkpointing", nargs="+", choices=modes, default=modes, help="default: all")
    ways = list(get_args(Execution))
    parser.add_argument("--execution", nargs="+", choices=ways, default=ways, help="default: both")
    parser.add_argument("--device", choices=list(SIZES), help="default: cuda if there is one, also for ROCm")
    parser.add_argument("--threads", type=int, default=1, help="threads of CPU operators (default: %(default)s)")
    parser.add_argument(
        "--malloc",
        choices=("keep", "default"),
        default="keep",
        help="keep: glibc keeps freed memory for the process, as allocators of GPUs do (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, in seconds and bytes")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds has to be at least 2")
    return arguments


def keep_freed_memory() -> None:
    """Have glibc's malloc give nothing back to the kernel; without effect where there is no glibc.

    Else the operators that allocate pay for page faults, all the more of them the more memory lives. The allocators of
    GPUs keep memory, and the CPU stands in for a GPU here.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_mmap_max, m_trim_threshold = -4, -1
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)


def report(results: Sequence[Result], device: torch.device, malloc: str) -> dict[str, Any]:
    """What goes into the JSON file."""
    on_cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "malloc": malloc,
        "results": [asdict(result) for result in results],
    }


def main() -> int:
    arguments = parse_arguments()
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(arguments.threads)
    if arguments.malloc == "keep":
        keep_freed_memory()
    # All three stages are on this rank, so nothing is ever sent; gloo would look for a network nevertheless.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    results: list[Result] = []
    for name in arguments.sizes:
        for mode in starmap(Mode, product(arguments.execution, arguments.checkpointing)):
            print(f"measuring {name}, {mode.execution}, checkpointing {mode.checkpointing} ...", file=sys.stderr)
            results += compare(name, SIZES[device.type][name], mode, arguments.rounds, device)
    dist.destroy_process_group()
    if arguments.json:
        arguments.json.write_text(json.dumps(report(results, device, arguments.malloc), indent=2) + "\n")
    print(table(results))
    return int(any(result.error and result.split == "zbpipe" for result in results))


if __name__ == "__main__":
    sys.exit(main())
