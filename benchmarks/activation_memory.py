"""How many bytes of activations each rank holds at most over a step, beside what the simulator predicts.

Every schedule trains the same Llama blocks, on one process per rank. What a stage keeps of one microbatch is measured
on one stage alone, and the simulator predicts from that. Run it from anywhere:
`python benchmarks/activation_memory.py --help`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from live_bytes import Meter, meter
from llama import Block, Checkpointing, checkpointed
from split_backward import ACTIONS, DTYPES, Contender, MiddleStage, Mode, Size, warm_up
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import zbpipe
from zbpipe import CostModel, Op, OpKind
from zbpipe.registry import lookup
from zbpipe.runtime.build import schedule_class

SCHEDULES = ("1F1B", "ZBVZeroBubble", "ZBV", "ZBH1", "VHalf", "VMin")
YARDSTICK = "1F1B"
TORCHS_OWN: dict[str, Contender] = {"1F1B": "unsplit", "ZBVZeroBubble": "torch"}
SIZES = {
    "cpu": Size(dim=128, seq=512, batch=1, head_dim=64),
    "cuda": Size(dim=4096, seq=4096, batch=1, head_dim=128),
}
METHODS = {"F": "forward_one_chunk", "I or B": "backward_one_chunk", "W": "backward_weight_one_chunk"}
SAVERS = ("VHalf", "VMin")
GOAL = 0.10
"""How far their shares may be from the predicted ones, relative to those."""


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
    max_outstanding_sends: int | None
    """torch's option of that name."""

    def options(self, name: str) -> dict[str, Any]:
        """What to build the schedule with; torch's single-stage classes wait for their sends at once."""
        if self.max_outstanding_sends is None or issubclass(schedule_class(name), PipelineScheduleSingle):
            return {}
        return {"max_outstanding_sends": self.max_outstanding_sends}

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


def op_bytes(size: Size, job: Job, contender: Contender) -> dict[str, OpBytes] | None:
    """Bytes of each op of one microbatch on a stage in the middle; None if this split fails there."""
    device = device_of(job, 0)
    stage = MiddleStage(size, Mode("eager", job.checkpointing), contender, device)
    if warm_up(stage, ACTIONS[contender], device) is not None:
        return None
    gc.collect()
    found: dict[str, OpBytes] = {}
    with meter(device) as bytes_:
        for action in ACTIONS[contender]:
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
    total = zbpipe.generate(name, job.ranks, job.microbatches).placement.num_stages
    size = job.size(total)
    stages = []
    for index in zbpipe.stage_indices(name, rank=rank, num_ranks=job.ranks):
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
    schedule = zbpipe.build_pipeline_schedule(name, stages, job.microbatches, loss_fn, **job.options(name))
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


def rank_main(rank: int, name: str, job: Job, directory: str) -> None:
    """The body of one process; what it found goes into a file."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torch prints a failing schedule whole; the error alone says enough here.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    device = device_of(job, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        # A file as the meeting point needs no port.
        init_method=f"file://{directory}/meeting_point",
        rank=rank,
        world_size=job.ranks,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    found = run_rank(name, job, rank, device)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(name: str, job: Job) -> list[RankBytes] | str:
    """One process per rank, all of them gone when this returns; what they found, or the first one's error."""
    with tempfile.TemporaryDirectory() as directory:
        processes = mp.spawn(rank_main, (name, job, directory), nprocs=job.ranks, join=False, daemon=True)
        deadline = time.monotonic() + job.timeout
        try:
            while not processes.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=1):
                if time.monotonic() > deadline:
                    return f"no end within {job.timeout:.0f} seconds"
        except mp.ProcessRaisedException as error:
            return _innermost(str(error))
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        files = (Path(directory) / f"{rank}.json" for rank in range(job.ranks))
        return [RankBytes(**json.loads(file.read_text())) for file in files]


def _innermost(traceback: str) -> str:
    """The first error of a chain: torch wraps what happened into its own error and a dump of the stage's tensors."""
    errors = [line for line in traceback.splitlines() if line.split(":")[0].endswith(("Error", "Exception"))]
    return errors[0] if errors else traceback.strip().splitlines()[-1]


# Predictions.


def predicted(name: str, job: Job, ops: Mapping[str, OpBytes]) -> list[float]:
    """The simulator's peak in bytes by rank, from what one stage keeps after F and after I.

    The order of a rank's ops is fixed, so their times make no difference.
    """
    schedule = zbpipe.generate(name, job.ranks, job.microbatches)
    ones = (1.0,) * schedule.placement.num_stages
    activations = tuple(float(ops["F"].after) for _ in ones)
    freed_by_i = 1 - ops["I"].after / ops["F"].after if "I" in ops else 0.0
    return list(zbpipe.simulate(schedule, CostModel(ones, ones, ones, activations, freed_by_i)).peak_memory)


def replayed(name: str, job: Job, ops: Mapping[str, OpBytes]) -> list[float]:
    """The peak in bytes by rank if each op did what it did on the stage alone, its needs while it runs included."""
    schedule = zbpipe.generate(name, job.ranks, job.microbatches)
    return [_replay(rank, ops) for rank in schedule]


def _replay(rank: Sequence[Op], ops: Mapping[str, OpBytes]) -> float:
    before = {OpKind.F: 0, OpKind.I: ops["F"].after, OpKind.B: ops["F"].after}
    if "I" in ops:
        before[OpKind.W] = ops["I"].after
    held = peak = 0
    for op in rank:
        found = ops[op.kind.value]
        peak = max(peak, held + found.peak - before[op.kind])
        held += found.after - before[op.kind]
    return float(peak)


@dataclass(kw_only=True)
class Result:
    """One line of the table; shares are relative to 1F1B's worst rank."""

    schedule: str
    checkpointing: Checkpointing
    ranks: list[RankBytes] = field(default_factory=list)
    share: float | None = None
    """Of the worst ranks' measured peaks."""
    kept_share: float | None = None
    """Of what the worst ranks keep between ops."""
    predicted: list[float] | None = None
    """The simulator's peak by rank, in bytes."""
    predicted_share: float | None = None
    """By the simulator."""
    replayed: list[float] | None = None
    """Bytes by rank with what each op needs while it runs."""
    replayed_share: float | None = None
    error: str | None = None

    @property
    def deviation(self) -> float | None:
        """Of the measured share from the predicted one, relative to it."""
        return self.share / self.predicted_share - 1 if self.share and self.predicted_share else None


def fill_shares(results: Sequence[Result]) -> None:
    yardstick = next(result for result in results if result.schedule == YARDSTICK)
    for result in results:
        if not result.error:
            result.share = max(r.peak for r in result.ranks) / max(r.peak for r in yardstick.ranks)
            result.kept_share = max(r.kept for r in result.ranks) / max(r.kept for r in yardstick.ranks)
        if result.predicted and yardstick.predicted:
            result.predicted_share = max(result.predicted) / max(yardstick.predicted)
        if result.replayed and yardstick.replayed:
            result.replayed_share = max(result.replayed) / max(yardstick.replayed)


StageBytes = dict[Contender, dict[int, dict[str, OpBytes] | None]]
"""By contender and by blocks of the stage."""


def measure_stages(names: Sequence[str], job: Job) -> StageBytes:
    """One stage alone, cut as the schedules cut the model, with every backward that they use and with all three."""
    found: StageBytes = {contender: {} for contender in get_args(Contender)}
    totals = {zbpipe.generate(name, job.ranks, job.microbatches).placement.num_stages for name in names}
    for total in sorted(totals):
        size = job.size(total)
        for contender, by_blocks in found.items():
            by_blocks[size.blocks] = op_bytes(size, job, contender)
    return found


def measure(name: str, job: Job, stages: StageBytes) -> Result:
    """Run one schedule, and predict what it did."""
    result = Result(schedule=name, checkpointing=job.checkpointing)
    found = run_ranks(name, job)
    if isinstance(found, str):
        result.error = found
    else:
        result.ranks = found
    total = zbpipe.generate(name, job.ranks, job.microbatches).placement.num_stages
    ops = stages[TORCHS_OWN.get(name, "zbpipe")][job.size(total).blocks]
    if ops:
        result.predicted = predicted(name, job, ops)
        result.replayed = replayed(name, job, ops)
    return result


# Tables.


def _mib(number: float) -> str:
    return f"{number / 2**20:.1f}"


def _share(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def schedule_table(results: Sequence[Result]) -> str:
    """Bytes in MiB."""
    ranks = max(len(result.ranks) for result in results)
    heads = ["checkpointing", "schedule", *(f"rank {rank}" for rank in range(ranks)), "kept", "share", "of kept"]
    heads += ["predicted", "deviation", "replayed"]
    return _aligned([heads, *map(_cells, results)], left=2)


def _cells(result: Result) -> list[str]:
    names = [result.checkpointing, result.schedule]
    if result.error is not None:
        return [*names, f"fails: {result.error}"]
    deviation = "-" if result.deviation is None else f"{100 * result.deviation:+.1f} %"
    shares = [_share(result.share), _share(result.kept_share), _share(result.predicted_share)]
    kept = _mib(max(rank.kept for rank in result.ranks))
    return [
        *names,
        *(_mib(rank.peak) for rank in result.ranks),
        kept,
        *shares,
        deviation,
        _share(result.replayed_share),
    ]


def stage_table(checkpointing: Checkpointing, stages: StageBytes) -> str:
    """Bytes in MiB."""
    heads = ["checkpointing", "blocks", "backward", "in F", "after F", "in I or B", "after I or B", "in W", "after W"]
    rows = [heads]
    for contender, by_blocks in stages.items():
        for blocks, ops in by_blocks.items():
            names = [checkpointing, str(blocks), contender]
            numbers = [_mib(n) for found in (ops or {}).values() for n in (found.peak, found.after)]
            rows.append([*names, *(numbers or ["fails"])])
    return _aligned(rows, left=3)


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
    parser.add_argument("--checkpointing", nargs="+", choices=modes, default=["none"], help="default: none")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=16, help="blocks of the whole model (default: %(default)s)")
    parser.add_argument(
        "--max-outstanding-sends", type=int, metavar="N", help="torch's option, for all but 1F1B (default: torch's)"
    )
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
    names = [lookup(name).name for name in arguments.schedules]
    names = [YARDSTICK, *(name for name in names if name != YARDSTICK)]
    torch.set_num_threads(1)
    # For the stages that are measured alone: all of them are on this process, and nothing is ever sent.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    results: list[Result] = []
    alone: dict[Checkpointing, StageBytes] = {}
    for checkpointing in arguments.checkpointing:
        job = Job(
            checkpointing,
            arguments.ranks,
            arguments.microbatches,
            arguments.layers,
            device,
            arguments.timeout,
            arguments.max_outstanding_sends,
        )
        alone[checkpointing] = measure_stages(names, job)
        of_this: list[Result] = []
        for name in names:
            print(f"measuring {name}, checkpointing {checkpointing} ...", file=sys.stderr)
            of_this.append(measure(name, job, alone[checkpointing]))
        fill_shares(of_this)
        results += of_this
    print("\n\n".join([schedule_table(results), *(stage_table(mode, found) for mode, found in alone.items())]))
    if arguments.json:
        figures = {"torch": torch.__version__, "device": device, "results": [asdict(r) for r in results]}
        stages = {m: {c: {b: _plain(o) for b, o in by.items()} for c, by in f.items()} for m, f in alone.items()}
        arguments.json.write_text(json.dumps(figures | {"stages": stages}, indent=2) + "\n")
    return int(any(missed(result) for result in results))


def missed(result: Result) -> bool:
    """Whether a schedule that is there to save memory does not save what the simulator predicts."""
    return result.schedule in SAVERS and result.deviation is not None and abs(result.deviation) > GOAL


def _plain(ops: Mapping[str, OpBytes] | None) -> Any:
    return None if ops is None else {action: asdict(found) for action, found in ops.items()}


if __name__ == "__main__":
    sys.exit(main())
