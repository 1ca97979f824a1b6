"""How many bytes each rank holds at most over a step, weights apart, beside what `zbpipe.peak_bytes` predicts.

Every schedule trains the same Llama blocks, on one process per rank. What ops keep and need of one microbatch is
measured on one stage alone, and predicted from that. Run it from anywhere:
`python benchmarks/activation_memory.py --help`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # what knows the backend "fake" before torch 2.15
from live_bytes import Meter, meter
from llama import Block, Checkpointing, checkpointed
from ranks import RankError, run_ranks
from split_backward import ACTIONS, DTYPES, Contender, MiddleStage, Mode, Size, warm_up
from split_backward import Action as Kind
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import CostModel, OpKind, Placement, Schedule
from zbpipe.actions import Action
from zbpipe.memory import rows_of
from zbpipe.passes import default_costs, wait_of
from zbpipe.transformer import typical_times

SCHEDULES = ("1F1B", "ZBVZeroBubble", "ZBV", "ZBH1", "VHalf", "VMin", "plan")
YARDSTICK = "1F1B"
PLAN = "plan"
"""The best schedule within the yardstick's bytes, by `zbpipe.plan`."""
TORCHS_OWN = ("ZBVZeroBubble",)
"""What torch's own class runs. All others run from a table by zbpipe's, so that they send and receive alike."""
SIZES = {
    "cpu": Size(dim=128, seq=512, batch=1, head_dim=64),
    "cuda": Size(dim=4096, seq=4096, batch=1, head_dim=128),
}
METHODS = {"F": "forward_one_chunk", "I or B": "backward_one_chunk", "W": "backward_weight_one_chunk"}
GOAL = 0.05
"""How far the worst rank may be from its prediction."""
KEEPS_OUTPUTS = not hasattr(PipelineStage, "release_fwd_send_outputs")
"""Whether torch (before 2.15) keeps what a stage has sent until its backward."""


@dataclass(frozen=True)
class Job:
    """What all schedules train."""

    checkpointing: Checkpointing
    ranks: int
    microbatches: int
    layers: int
    """Blocks in all stages together."""
    device: str
    timeout: float
    """Seconds for one schedule."""

    @property
    def message_bytes(self) -> int:
        """What one stage sends to the next of one microbatch."""
        whole = SIZES[self.device]
        return whole.batch * whole.seq * whole.dim * DTYPES[self.device].itemsize

    def size(self, stages: int) -> Size:
        """One of so many stages."""
        whole = SIZES[self.device]
        return Size(whole.dim, whole.seq, whole.batch, whole.head_dim, blocks=self.layers // stages)


@dataclass(frozen=True)
class OpBytes:
    """What lives beyond what lived before the first op of the microbatch."""

    peak: int
    """At most during the op."""
    after: int
    """After it, with its result let go."""


@dataclass
class RankBytes:
    """What lives on one rank beyond what lived before the step."""

    peak: int = 0
    """At most, at any time."""
    peak_in: str = ""
    """The op during which that was, or "between"."""
    kept: int = 0
    """At most between two ops, so without what an op needs only while it runs."""


def device_of(job: Job, rank: int) -> torch.device:
    """One GPU for each rank, or the CPU for all."""
    return torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")


def forget_peak(bytes_: Meter, device: torch.device) -> None:
    """Let `bytes_.peak` begin anew from what lives now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        bytes_.peak = bytes_.live  # type: ignore[misc]


# One stage.


def op_bytes(
    size: Size, job: Job, contender: Contender, actions: Sequence[Kind] | None = None
) -> dict[str, OpBytes] | None:
    """Bytes of each op of one microbatch on a stage in the middle; None if this split fails there."""
    device = device_of(job, 0)
    stage = MiddleStage(size, Mode("eager", job.checkpointing), contender, device)
    actions = actions or ACTIONS[contender]
    if warm_up(stage, actions, device) is not None:
        return None
    gc.collect()
    found: dict[str, OpBytes] = {}
    with meter(device) as bytes_:
        for action in actions:
            forget_peak(bytes_, device)
            stage.receive(action)
            stage.run(action)
            stage.send(action)
            found[action] = OpBytes(bytes_.peak, bytes_.live)
    return found


# One rank of a pipeline.


class Diary:
    """Follows what lives on a rank from op to op."""

    def __init__(self, bytes_: Meter, device: torch.device) -> None:
        self._bytes = bytes_
        self._device = device
        self.found = RankBytes()

    def follow(self, stage: PipelineStage) -> None:
        """Write down the ops of `stage` from now on."""
        for kind, method in METHODS.items():
            # The stage is about to end with its process, so nobody needs its own methods again.
            setattr(stage, method, self._followed(f"{kind} on stage {stage.stage_index}", getattr(stage, method)))

    def end(self, name: str) -> None:
        """What came since the last call was `name`."""
        if self._bytes.peak > self.found.peak:
            self.found.peak, self.found.peak_in = self._bytes.peak, name
        forget_peak(self._bytes, self._device)

    def _followed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def followed(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            self.end("between")
            result = run(microbatch, *args, **kwargs)
            self.end(f"{name}, microbatch {microbatch}")
            self.found.kept = max(self.found.kept, self._bytes.live)
            return result

        return followed


def build_stages(name: str, job: Job, rank: int, device: torch.device) -> list[PipelineStage]:
    """This rank's stages, all of them Llama blocks and nothing else."""
    placement = zbpipe.generate(name, job.ranks, job.microbatches).placement
    total = placement.num_stages
    size = job.size(total)
    stages = []
    for index in placement.stages_on(rank):
        shape = (size.dim, size.heads, size.kv_heads, size.seq)
        blocks = [checkpointed(Block(*shape), job.checkpointing) for _ in range(size.blocks)]
        module = nn.Sequential(*blocks).to(device=device, dtype=DTYPES[device.type])
        stages.append(PipelineStage(module, index, total, device))
    return stages


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """A loss that keeps little: no head, no vocabulary.

    Not `mse_loss`: on the CPU its mean lies in a storage of the output's size, and torch keeps all losses of a step.
    """
    return (output - target).square().mean()


def run_rank(name: str, job: Job, rank: int, device: torch.device) -> RankBytes:
    """The second step of a training. The first one makes the stages ready, and a `.grad` in every weight."""
    stages = build_stages(name, job, rank, device)
    last = max(stage.num_stages for stage in stages) - 1
    indices = [stage.stage_index for stage in stages]
    schedule = zbpipe.build_pipeline_schedule(name, stages, job.microbatches, loss_fn)
    size = SIZES[job.device]
    batch = torch.randn(job.microbatches * size.batch, size.seq, size.dim).to(device, DTYPES[device.type])
    arguments = [batch] if 0 in indices else []
    target = batch.clone() if last in indices else None
    schedule.step(*arguments, target=target, return_outputs=False)
    gc.collect()
    # As in a training that collects garbage between steps only: what dies, dies because nothing refers to it.
    gc.disable()
    with meter(device) as bytes_:
        diary = Diary(bytes_, device)
        for stage in stages:
            diary.follow(stage)
        schedule.step(*arguments, target=target, return_outputs=False)
        diary.end("between")
    return diary.found


def rank_main(name: str, job: Job) -> RankBytes:
    """The body of one process."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    # torch prints a failing schedule whole; the error alone says enough here.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    device = device_of(job, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return run_rank(name, job, rank, device)


def measured(name: str, job: Job) -> list[RankBytes] | str:
    """What the ranks found, one process each, or the first one's error."""
    backend = "nccl" if job.device == "cuda" else "gloo"
    try:
        return run_ranks(job.ranks, rank_main, name, job, timeout=job.timeout, backend=backend)
    except RankError as error:
        return _innermost(str(error))


def _innermost(traceback: str) -> str:
    """The first error of a chain: torch wraps what happened into its own error and a dump of the stage's tensors."""
    errors = [line for line in traceback.splitlines() if line.split(":")[0].endswith(("Error", "Exception"))]
    return errors[0] if errors else traceback.strip().splitlines()[-1]


# Predictions.

Ops = Mapping[str, OpBytes]
"""By action: F, I and W of one microbatch, and B."""


def costs_of(job: Job, placement: Placement, ops: Ops) -> CostModel:
    """What the ops of a placement's stages cost in bytes; times are typical ones."""
    stages, message = placement.num_stages, job.message_bytes
    activations = [float(ops["F"].after)] * stages
    # The batch is there all the time. The loss keeps a difference instead of what it sends.
    activations[0] -= message
    activations[-1] += message * (1 if KEEPS_OUTPUTS else 2)
    kept, waits = ops["F"].after, ops["I"].after
    working = {
        OpKind.F: ops["F"].peak - kept,
        OpKind.I: ops["I"].peak - max(kept, waits),
        OpKind.W: ops["W"].peak - waits,
        OpKind.B: ops["B"].peak - kept,
    }
    parts = [len(placement.stages_on(rank)) for rank in placement.rank_of]
    f, i, w = (tuple(time / part for part in parts) for time in typical_times(job.checkpointing))
    freed = tuple(1 - waits / each for each in activations)
    return CostModel(f, i, w, tuple(activations), freed, message_bytes=message, working=working)


def schedule_of(name: str, job: Job, stages: StageBytes) -> tuple[Schedule, CostModel]:
    """The schedule for what was measured on one stage, and these costs."""

    def costs(placement: Placement) -> CostModel:
        return costs_of(job, placement, stages[job.size(placement.num_stages).blocks])

    if name == PLAN:
        limit = max(zbpipe.simulate(*schedule_of(YARDSTICK, job, stages)).peak_memory)
        placement = Placement.v(job.ranks)
        found = zbpipe.plan(job.ranks, job.microbatches, costs(placement), limit, placements=[placement])
        return found.schedule, costs(placement)
    placement = zbpipe.registry.resolve(name).place(job.ranks)
    return zbpipe.generate(name, job.ranks, job.microbatches, costs=costs(placement)), costs(placement)


def predicted(schedule: Schedule, costs: CostModel) -> list[float]:
    """Bytes by rank."""
    # The runtime knows no costs when it places the receives.
    rows = rows_of(zbpipe.simulate(schedule, default_costs(schedule.placement)))
    if KEEPS_OUTPUTS:  # so what is under way counts already
        rows = tuple(tuple(_without_forward_sends(row)) for row in rows)
    return list(zbpipe.peak_bytes(zbpipe.simulate(schedule, costs), rows))


def _without_forward_sends(row: Sequence[Action]) -> Iterator[Action]:
    """With the wait for each right behind it."""
    for action in row:
        if action.kind != "WAIT_SEND_F":
            yield action
        if action.kind == "SEND_F":
            yield wait_of(action)


@dataclass(kw_only=True)
class Result:
    """One line of the table."""

    schedule: str
    checkpointing: Checkpointing
    ranks: list[RankBytes] = field(default_factory=list)
    seconds: float = 0.0
    """Of a step, simulated with typical times."""
    share: float | None = None
    """Of the worst rank's measured peak, in that of the yardstick."""
    predicted: list[float] | None = None
    """Bytes by rank."""
    error: str | None = None

    @property
    def peak(self) -> int:
        """Of the worst rank."""
        return max((rank.peak for rank in self.ranks), default=0)

    @property
    def deviation(self) -> float | None:
        """Of the worst rank's measured peak from what is predicted for the worst rank."""
        return self.peak / max(self.predicted) - 1 if self.ranks and self.predicted else None


def fill_shares(results: Sequence[Result]) -> None:
    yardstick = next(result for result in results if result.schedule == YARDSTICK)
    for result in results:
        if not result.error and yardstick.peak:
            result.share = result.peak / yardstick.peak


StageBytes = dict[int, dict[str, OpBytes]]
"""By blocks of the stage, with zbpipe's split and without a split."""


def measure_stages(job: Job) -> StageBytes:
    """One stage alone, cut as the schedules cut the model."""
    found: StageBytes = {}
    for total in (job.ranks, 2 * job.ranks):
        size = job.size(total)
        split, whole = op_bytes(size, job, "zbpipe"), op_bytes(size, job, "zbpipe", ("F", "B"))
        assert split is not None
        assert whole is not None
        found[size.blocks] = split | {"B": whole["B"]}
    return found


def measure(name: str, job: Job, stages: StageBytes) -> Result:
    """Run one schedule, and predict what it did."""
    result = Result(schedule=name, checkpointing=job.checkpointing)
    try:
        schedule, costs = schedule_of(name, job, stages)
    except ValueError as error:  # a limit that is too small
        result.error = str(error)
        return result
    result.seconds = zbpipe.simulate(schedule, costs).makespan
    with tempfile.TemporaryDirectory() as directory:
        runs = name
        if name not in TORCHS_OWN:
            result.predicted = predicted(schedule, costs)
            runs = f"{directory}/{name}.csv"
            Path(runs).write_text(schedule.to_csv())
        found = measured(runs, job)
    if isinstance(found, str):
        result.error = found
    else:
        result.ranks = found
    return result


# Tables.


def _mib(number: float) -> str:
    return f"{number / 2**20:.1f}"


def _share(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def schedule_table(results: Sequence[Result]) -> str:
    """Bytes in MiB."""
    ranks = max(len(result.ranks) for result in results)
    heads = ["checkpointing", "schedule", *(f"rank {rank}" for rank in range(ranks)), "share", "predicted", "deviation"]
    return _aligned([[*heads, "step"], *map(_cells, results)], left=2)


def _cells(result: Result) -> list[str]:
    names = [result.checkpointing, result.schedule]
    if result.error is not None:
        return [*names, f"fails: {result.error}"]
    return [
        *names,
        *(_mib(rank.peak) for rank in result.ranks),
        _share(result.share),
        _mib(max(result.predicted)) if result.predicted else "-",
        "-" if result.deviation is None else f"{100 * result.deviation:+.1f} %",
        f"{result.seconds:.1f}",
    ]


def stage_table(checkpointing: Checkpointing, stages: StageBytes) -> str:
    """Bytes in MiB."""
    actions = ("F", "I", "W", "B")
    heads = ["checkpointing", "blocks", *(f"{when} {action}" for action in actions for when in ("in", "after"))]
    rows = [heads]
    for blocks, ops in stages.items():
        numbers = [_mib(n) for action in actions for n in (ops[action].peak, ops[action].after)]
        rows.append([checkpointing, str(blocks), *numbers])
    return _aligned(rows, left=2)


def _aligned(rows: Sequence[Sequence[str]], left: int) -> str:
    # A failure's text goes beyond its column.
    widths = [
        max(len(row[c]) for row in rows if len(row) > c and not row[-1].startswith("fails"))
        for c in range(len(rows[0]))
    ]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if c < left or cell.startswith("fails") else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    modes = list(get_args(Checkpointing))
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME", help="1F1B is always run")
    parser.add_argument("--checkpointing", nargs="+", choices=modes, default=modes, help="default: all")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=16, help="blocks of the whole model (default: %(default)s)")
    parser.add_argument("--device", choices=list(SIZES), help="default: cuda if there is one for each rank")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one schedule (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, in bytes")
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.layers % (2 * arguments.ranks):
        parser.error("--layers has to be a multiple of twice the --ranks, so that every schedule can cut the model")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    device = arguments.device or ("cuda" if torch.cuda.device_count() >= arguments.ranks else "cpu")
    names = [name if name == PLAN else zbpipe.registry.resolve(name).name for name in arguments.schedules]
    names = [YARDSTICK, *(name for name in names if name != YARDSTICK)]
    torch.set_num_threads(1)
    # For the stages that are measured alone: all of them are on this process, and nothing is ever sent.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    results: list[Result] = []
    alone: dict[Checkpointing, StageBytes] = {}
    for checkpointing in arguments.checkpointing:
        sizes = (arguments.ranks, arguments.microbatches, arguments.layers)
        job = Job(checkpointing, *sizes, device, arguments.timeout)
        alone[checkpointing] = measure_stages(job)
        of_this: list[Result] = []
        for name in names:
            print(f"measuring {name}, checkpointing {checkpointing} ...", file=sys.stderr)
            of_this.append(measure(name, job, alone[checkpointing]))
            print("  " + "  ".join(_cells(of_this[-1])[2:]), file=sys.stderr)
        fill_shares(of_this)
        results += of_this
    print("\n\n".join([schedule_table(results), *(stage_table(mode, found) for mode, found in alone.items())]))
    if arguments.json:
        figures = {"torch": torch.__version__, "device": device, "results": [asdict(r) for r in results]}
        stages = {mode: {blocks: _plain(ops) for blocks, ops in found.items()} for mode, found in alone.items()}
        arguments.json.write_text(json.dumps(figures | {"stages": stages}, indent=2) + "\n")
    return int(any(missed(result) for result in results))


def missed(result: Result) -> bool:
    """Whether a schedule takes something else than was predicted."""
    return result.deviation is not None and abs(result.deviation) > GOAL


def _plain(ops: Ops) -> dict[str, dict[str, int]]:
    return {action: asdict(found) for action, found in ops.items()}


if __name__ == "__main__":
    sys.exit(main())
