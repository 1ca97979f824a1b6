"""Cost of a backward in two halves: (time of I + time of W) / time of B, of zbpipe's split and of torch's own.

The stage is number 1 of 3. There both splits do the same work; on the first stage torch runs no I, and the whole
backward in W.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, starmap
from typing import Any, Literal, NamedTuple, get_args

import torch
from harness import JSON, choose_device, forget_peak, markdown, meter, parser, single_rank, synchronize, write_json
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


class Experts(nn.Module):
    """Experts in one tensor, as in libraries of models: each gets a part of the rows."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, size.dim, 2 * size.dim) / size.dim**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * size.dim, size.dim) / size.dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) to the same."""
        rows = x.view(EXPERTS, -1, x.shape[-1])
        return x + torch.bmm(nn.functional.silu(torch.bmm(rows, self.up)), self.down).view_as(x)


class Convolution(nn.Module):
    """A residual block of two convolutions along the sequence."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv1d(size.dim, size.dim, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) to the same."""
        return x + self.other(nn.functional.silu(self.one(x.mT))).mT


EXPERTS = 4
Layers = Literal["llama", "experts", "convolutions"]


def build_layer(layers: Layers, size: Size) -> nn.Module:
    if layers == "llama":
        return Block(size.dim, size.heads, size.kv_heads, size.seq)
    return Experts(size) if layers == "experts" else Convolution(size)


class Mode(NamedTuple):
    execution: Execution
    checkpointing: Checkpointing
    layers: Layers = "llama"


class MiddleStage:
    """A `PipelineStage` between two neighbours on the same rank, run one action at a time on one microbatch."""

    def __init__(self, size: Size, mode: Mode, contender: Contender, device: torch.device) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[device.type]}
        blocks = [checkpointed(build_layer(mode.layers, size), mode.checkpointing) for _ in range(size.blocks)]
        self.blocks = nn.Sequential(*blocks).to(**options)
        if mode.execution == "compile":
            for each in blocks:  # one by one, as TorchTitan does it
                each.compile(fullgraph=True)
        self.x, self.dy = torch.randn(2, size.batch, size.seq, size.dim).to(**options)
        # The first module has a parameter, so that its output, the input of the stage in question, requires grad.
        modules = [nn.RMSNorm(size.dim, **options), self.blocks, nn.Identity()]
        stages = [PipelineStage(module, index, 3, device) for index, module in enumerate(modules)]
        self.stage = stages[1]
        # One step of a schedule: the public way to make stages ready. It leaves a `.grad` in every weight.
        schedule = ScheduleInterleaved1F1B(
            list(stages), n_microbatches=1, loss_fn=lambda one, other: (one * other).sum()
        )
        schedule.step(self.x, target=torch.ones_like(self.x))
        if contender == "zbpipe":
            split_backward([self.stage], "deferred")

    def receive(self, action: Action) -> None:
        """Get what `action` needs from a neighbour, in memory of its own as if it had been received."""
        if action == "F":
            self.stage.set_local_fwd_input(self.x.clone(), 0)
        elif action in ("B", "I"):
            self.stage.set_local_bwd_input((self.dy.clone(),), 0)

    def run(self, action: Action) -> None:
        if action == "F":
            self.stage.forward_one_chunk(0, ())
        elif action == "W":
            self.stage.backward_weight_one_chunk(0)
        else:
            self.stage.backward_one_chunk(0, full_backward=action == "B")

    def send(self, action: Action) -> None:
        """Release the result of `action`, as after it was sent to a neighbour."""
        if action == "F":
            self.stage.get_fwd_send_ops(0)
            # Older torch keeps the outputs of a stage until its backward.
            if hasattr(self.stage, "release_fwd_send_outputs"):
                self.stage.release_fwd_send_outputs(0)
        elif action in ("B", "I"):
            self.stage.get_local_bwd_output(0)


def timed_pass(stage: MiddleStage, actions: Sequence[Action], device: torch.device) -> Seconds:
    """Seconds of each of `actions`; on a GPU by its own events, so that launches run ahead as in training."""
    marks: dict[Action, tuple[Any, Any]] = {}
    for action in actions:
        stage.receive(action)
        start = _mark(device)
        stage.run(action)
        marks[action] = start, _mark(device)
        stage.send(action)
    synchronize(device)
    if device.type == "cuda":
        return {action: start.elapsed_time(end) / 1e3 for action, (start, end) in marks.items()}
    return {action: end - start for action, (start, end) in marks.items()}


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class OpBytes:
    """Bytes beyond those alive before the first op of the microbatch."""

    peak: int
    """Most bytes alive during the op."""
    after: int
    """Bytes alive after it, with its result released."""


def op_bytes(stage: MiddleStage, actions: Sequence[Action], device: torch.device) -> dict[str, OpBytes]:
    """Bytes of each of `actions`; gradients exist already."""
    found: dict[str, OpBytes] = {}
    with meter(device) as bytes_:
        for action in actions:
            forget_peak(bytes_, device)
            stage.receive(action)
            stage.run(action)
            stage.send(action)
            found[action] = OpBytes(bytes_.peak, bytes_.live)
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
    size: str
    execution: Execution
    checkpointing: Checkpointing
    layers: Layers
    split: Split
    seconds: Seconds = field(default_factory=dict)
    """Medians of this split's F, I and W, and of the unsplit stage's B."""
    ratio: float | None = None
    """Median over the rounds of (I + W) / B of that round."""
    ratio_quartiles: list[float] = field(default_factory=list)
    """The ratio's first and third quartile."""
    bytes: dict[str, OpBytes] = field(default_factory=dict)
    unsplit_bytes: dict[str, OpBytes] = field(default_factory=dict)
    error: str | None = None
    """First line of the error that the split raised."""


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
    sizes = {c: op_bytes(stage, ACTIONS[c], device) for c, stage in running.items() if can_measure}
    times = race(running, rounds, device)
    results = []
    for split in get_args(Split):
        result = Result(size=name, **mode._asdict(), split=split, error=errors[split])
        if split in running:
            _fill_times(result, times[split], times["unsplit"])
        if split in sizes:
            result.bytes, result.unsplit_bytes = sizes[split], sizes["unsplit"]
        results.append(result)
    return results


def _fill_times(result: Result, split: list[Seconds], unsplit: list[Seconds]) -> None:
    result.seconds = {action: statistics.median(each[action] for each in split) for action in ACTIONS["zbpipe"]}
    result.seconds["B"] = statistics.median(each["B"] for each in unsplit)
    ratios = [(halves["I"] + halves["W"]) / whole["B"] for halves, whole in zip(split, unsplit, strict=True)]
    first, result.ratio, third = statistics.quantiles(ratios, n=4, method="inclusive")
    result.ratio_quartiles = [first, third]


def table(results: Sequence[Result]) -> str:
    """Times in milliseconds; kept between I and W, and peaks, in MiB."""
    heads = ["size", "execution", "checkpointing", "layers", "split", *"FBIW", "(I+W)/B"]
    heads += ["quartiles", "kept", "peak", "peak F+B"]
    return markdown(heads, map(_cells, results), left=5)


def _cells(result: Result) -> list[str]:
    names = [result.size, result.execution, result.checkpointing, result.layers, result.split]
    if result.error is not None:
        return [*names, f"fails: {result.error}"]
    sizes = (result.bytes["I"].after, _peak(result.bytes), _peak(result.unsplit_bytes)) if result.bytes else ()
    return [
        *names,
        *(f"{1e3 * result.seconds[action]:.1f}" for action in get_args(Action)),
        f"{result.ratio:.3f}",
        " to ".join(f"{quartile:.2f}" for quartile in result.ratio_quartiles),
        *(f"{size / 2**20:.1f}" for size in sizes),
    ]


def _peak(ops: Mapping[str, OpBytes]) -> int:
    return max(op.peak for op in ops.values())


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    sizes, kinds, ways = list(SIZES["cpu"]), list(get_args(Checkpointing)), list(get_args(Execution))
    arguments.add_argument("--rounds", type=int, default=21, help="timed rounds, at least 2")
    arguments.add_argument("--sizes", nargs="+", choices=sizes, default=sizes)
    arguments.add_argument("--checkpointing", nargs="+", choices=kinds, default=kinds)
    arguments.add_argument("--execution", nargs="+", choices=ways, default=ways)
    arguments.add_argument("--layers", nargs="+", choices=get_args(Layers), default=["llama"])
    arguments.add_argument("--device", choices=list(SIZES), help="cuda, also for ROCm, if there is one")
    arguments.add_argument("--json", **JSON)
    chosen = arguments.parse_args()
    if chosen.rounds < 2:
        arguments.error("--rounds has to be at least 2")
    return chosen


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


def main() -> int:
    arguments = parse_arguments()
    device = choose_device(arguments.device)
    torch.set_num_threads(1)
    keep_freed_memory()
    gc.disable()
    results: list[Result] = []
    with single_rank():  # all three stages are on it
        for name in arguments.sizes:
            for mode in starmap(Mode, product(arguments.execution, arguments.checkpointing, arguments.layers)):
                print(
                    f"measuring {name}, {mode.execution}, checkpointing {mode.checkpointing}, {mode.layers} ...",
                    file=sys.stderr,
                )
                results += compare(name, SIZES[device.type][name], mode, arguments.rounds, device)
    write_json(arguments.json, device, results)
    print(table(results))
    return int(any(result.error and result.split == "zbpipe" for result in results))


if __name__ == "__main__":
    sys.exit(main())
