"""Bytes that each rank holds at most over a step, without weights, and the prediction of `zbpipe.simulator.peak_bytes`.

Every schedule trains the same Llama blocks, on one process per rank. The prediction knows the bytes of each op, which
are measured on one stage.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import split_backward
import torch
import torch.distributed as dist
from harness import JSON, choose_device, markdown, meter, parser, single_rank, write_json
from llama import Block, Checkpointing, checkpointed
from ranks import RankError, run_ranks
from split_backward import ACTIONS, DTYPES, Contender, MiddleStage, Mode, OpBytes, Size, warm_up
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import CostModel, OpKind, Placement, Schedule
from zbpipe.costs.transformer import typical_times
from zbpipe.simulator import peak_bytes
from zbpipe.simulator.actions import Action
from zbpipe.simulator.memory import rows_of
from zbpipe.simulator.passes import default_costs, wait_of

SCHEDULES = ("1F1B", "ZBV", "ZBH1", "VHalf", "VMin", "plan")
BASELINE = "1F1B"
PLAN = "plan"
"""The best schedule within the baseline's bytes, by `zbpipe.plan`."""
SIZES = {
    "cpu": Size(dim=128, seq=512, batch=1, head_dim=64),
    "cuda": Size(dim=4096, seq=4096, batch=1, head_dim=128),
}
TIMEOUT = 300
"""Seconds for one schedule."""
GOAL = 0.05
"""Largest deviation of the worst rank from its prediction."""
KEEPS_OUTPUTS = not hasattr(PipelineStage, "release_fwd_send_outputs")
"""Whether torch (before 2.15) keeps what a stage has sent until its backward."""


@dataclass(frozen=True)
class Job:
    checkpointing: Checkpointing
    ranks: int
    microbatches: int
    layers: int
    """Blocks in all stages together."""
    device: str

    @property
    def message_bytes(self) -> int:
        """What one stage sends to the next of one microbatch."""
        whole = SIZES[self.device]
        return whole.batch * whole.seq * whole.dim * DTYPES[self.device].itemsize

    def size(self, stages: int) -> Size:
        whole = SIZES[self.device]
        return Size(whole.dim, whole.seq, whole.batch, whole.head_dim, blocks=self.layers // stages)


def device_of(job: Job, rank: int) -> torch.device:
    return torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")


def op_bytes(
    size: Size, job: Job, contender: Contender, actions: Sequence[split_backward.Action] | None = None
) -> dict[str, OpBytes] | None:
    """Bytes of each op of one microbatch on a stage in the middle; None if this split fails there."""
    device = device_of(job, 0)
    stage = MiddleStage(size, Mode("eager", job.checkpointing), contender, device)
    actions = actions or ACTIONS[contender]
    if warm_up(stage, actions, device) is not None:
        return None
    gc.collect()
    return split_backward.op_bytes(stage, actions, device)


# One rank of a pipeline.


def build_stages(placement: Placement, job: Job, rank: int, device: torch.device) -> list[PipelineStage]:
    """This rank's stages, all of them Llama blocks and nothing else."""
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


def rank_main(made: Schedule, job: Job) -> int:
    """Most bytes alive in the second step of a training. The first one makes the stages ready, and every `.grad`."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    # torch prints a failing schedule whole; the error alone says enough here.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    device = device_of(job, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stages = build_stages(made.placement, job, rank, device)
    schedule = zbpipe.build_pipeline_schedule(made, stages, job.microbatches, loss_fn)
    size = SIZES[job.device]
    batch = torch.randn(job.microbatches * size.batch, size.seq, size.dim).to(device, DTYPES[device.type])
    arguments = [batch] if any(stage.is_first for stage in stages) else []
    target = batch.clone() if any(stage.is_last for stage in stages) else None
    schedule.step(*arguments, target=target, return_outputs=False)
    gc.collect()
    # As in a training that collects garbage between steps only: tensors die because nothing refers to them.
    gc.disable()
    with meter(device) as bytes_:
        schedule.step(*arguments, target=target, return_outputs=False)
        return bytes_.peak


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
    return CostModel(f, i, w, tuple(activations), freed_by_i=freed, message_bytes=message, working=working)


def schedule_of(name: str, job: Job, stages: StageBytes) -> tuple[Schedule, CostModel]:
    """The schedule for what was measured on one stage, and these costs."""

    def costs(placement: Placement) -> CostModel:
        return costs_of(job, placement, stages[job.size(placement.num_stages).blocks])

    if name == PLAN:
        limit = max(zbpipe.simulate(*schedule_of(BASELINE, job, stages)).peak_memory)
        placement = Placement.v(job.ranks)
        found = zbpipe.plan(job.ranks, job.microbatches, costs(placement), limit, placements=[placement])
        return found.schedule, costs(placement)
    placement = zbpipe.schedule.registry.resolve(name).place(job.ranks)
    return zbpipe.generate(name, job.ranks, job.microbatches, costs=costs(placement)), costs(placement)


def predicted(schedule: Schedule, costs: CostModel) -> list[float]:
    # The runtime knows no costs when it places the receives.
    rows = rows_of(zbpipe.simulate(schedule, default_costs(schedule.placement)))
    if KEEPS_OUTPUTS:  # so what is under way counts already
        rows = tuple(tuple(_without_forward_sends(row)) for row in rows)
    return list(peak_bytes(zbpipe.simulate(schedule, costs), rows))


def _without_forward_sends(row: Sequence[Action]) -> Iterator[Action]:
    """With the wait for each right behind it."""
    for action in row:
        if action.kind != "WAIT_SEND_F":
            yield action
        if action.kind == "SEND_F":
            yield wait_of(action)


@dataclass(kw_only=True)
class Result:
    schedule: str
    checkpointing: Checkpointing
    ranks: list[int] = field(default_factory=list)
    """Most bytes of each."""
    seconds: float = 0.0
    """Of a step, simulated with typical times."""
    predicted: list[float] = field(default_factory=list)
    """Bytes by rank."""
    error: str | None = None

    @property
    def peak(self) -> int:
        return max(self.ranks, default=0)

    @property
    def deviation(self) -> float | None:
        """Of the worst rank's measured peak from the predicted one; None if the schedule did not run."""
        return self.peak / max(self.predicted) - 1 if self.ranks else None


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
    result = Result(schedule=name, checkpointing=job.checkpointing)
    try:
        schedule, costs = schedule_of(name, job, stages)
    except ValueError as error:  # a limit that is too small
        result.error = str(error)
        return result
    result.seconds = zbpipe.simulate(schedule, costs).makespan
    result.predicted = predicted(schedule, costs)
    backend = "nccl" if job.device == "cuda" else "gloo"
    try:  # not by name, so that torch's schedules send and receive as zbpipe's do
        result.ranks = run_ranks(job.ranks, rank_main, schedule, job, timeout=TIMEOUT, backend=backend)
    except RankError as error:
        result.error = _innermost(str(error))
    return result


# The table.


def _mib(number: float) -> str:
    return f"{number / 2**20:.1f}"


def schedule_table(results: Sequence[Result]) -> str:
    ranks = [f"rank {rank}" for rank in range(max(len(result.ranks) for result in results))]
    heads = ["checkpointing", "schedule", *ranks, "share", "predicted", "deviation", "step"]
    return markdown(heads, (_cells(result, results) for result in results), left=2)


def _cells(result: Result, results: Sequence[Result]) -> list[str]:
    names = [result.checkpointing, result.schedule]
    if result.error is not None:
        return [*names, f"fails: {result.error}"]
    baseline = next(r for r in results if (r.schedule, r.checkpointing) == (BASELINE, result.checkpointing))
    return [
        *names,
        *map(_mib, result.ranks),
        f"{result.peak / baseline.peak:.3f}" if baseline.peak else "-",
        _mib(max(result.predicted)),
        f"{100 * (result.deviation or 0):+.1f} %",
        f"{result.seconds:.1f}",
    ]


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    modes = list(get_args(Checkpointing))
    arguments.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME", help="1F1B always runs")
    arguments.add_argument("--checkpointing", nargs="+", choices=modes, default=modes)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--layers", type=int, default=16, help="blocks of the whole model")
    arguments.add_argument("--device", choices=list(SIZES), help="cuda if there is a GPU for each rank")
    arguments.add_argument("--json", **JSON)
    chosen = arguments.parse_args()
    if chosen.ranks < 1 or chosen.layers % (2 * chosen.ranks):
        arguments.error("--layers has to be a multiple of twice the --ranks, so that every schedule can cut the model")
    return chosen


def main() -> int:
    arguments = parse_arguments()
    device = choose_device(arguments.device, arguments.ranks).type
    names = [name if name == PLAN else zbpipe.schedule.registry.resolve(name).name for name in arguments.schedules]
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    torch.set_num_threads(1)
    results: list[Result] = []
    stages: dict[Checkpointing, StageBytes] = {}
    with single_rank():  # for the stages that are measured alone
        for checkpointing in arguments.checkpointing:
            job = Job(checkpointing, arguments.ranks, arguments.microbatches, arguments.layers, device)
            stages[checkpointing] = measure_stages(job)
            for name in names:
                print(f"measuring {name}, checkpointing {checkpointing} ...", file=sys.stderr)
                results.append(measure(name, job, stages[checkpointing]))
    print(schedule_table(results))
    write_json(arguments.json, device, {"schedules": results, "stages": stages})
    return int(any(missed(result) for result in results))


def missed(result: Result) -> bool:
    return result.deviation is not None and abs(result.deviation) > GOAL


if __name__ == "__main__":
    sys.exit(main())
