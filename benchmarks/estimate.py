"""Steps and memory of a real TorchTitan job, and the estimate from its stages, measured one by one.

`zbpipe measure` runs the stages of Llama 3's debug model one after the other on one core; the other core does the same
at that time, because cores take speed from each other, and in the job both compute. From its cost file
`zbpipe.estimate` predicts the step and the memory of each schedule. Then TorchTitan trains with it on 2 processes of
one core each. The step is the schedule's, without optimizer and input. Memory is all that PyTorch holds for the job at
the worst moment of a step: parameters, optimizer, and allocations of the step by torch's profiler. Both are done
in rounds, in turn, because a virtual machine has faster and slower minutes; medians count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness import JSON, markdown, parser, write_json

import zbpipe
from zbpipe.schedule.registry import resolve

RANKS = 2
SCHEDULES = ("1F1B", "ZBH1", "ZBV")
GOAL = 0.05
METERED, WARM_UP = 3, 4
"""Training steps: the one whose memory is measured, and how many there are before times are."""
TIMEOUT = 1200.0
FOLDER = "ZBPIPE_ESTIMATE_FOLDER"
"""The environment variable with the folder that a rank writes into."""


@dataclass(frozen=True)
class Compared:
    """One schedule: by round, seconds of a step, and bytes of the worst rank."""

    schedule: str
    checkpointing: str
    predicted_steps: tuple[float, ...]
    steps: tuple[float, ...]
    predicted_bytes: tuple[float, ...]
    bytes: tuple[float, ...]

    @property
    def step_off(self) -> float:
        return median(self.predicted_steps) / median(self.steps) - 1

    @property
    def memory_off(self) -> float:
        return median(self.predicted_bytes) / median(self.bytes) - 1


# On a rank.


def train_and_write() -> None:
    """A rank of the job: TorchTitan on one core, with this schedule's steps written down."""
    rank, folder = int(os.environ["LOCAL_RANK"]), Path(os.environ[FOLDER])
    os.sched_setaffinity(0, {rank})
    from zbpipe.frameworks.titan import command_line
    from zbpipe.titan import plug_in

    options, rest = command_line.parse(sys.argv[1:])
    plug_in(options)
    sys.argv[1:] = rest
    from zbpipe.frameworks.titan import plug
    from zbpipe.runtime.measure.recording import Wanted, collect, watch

    complete, found = plug.complete, {"bytes": 0.0}

    def watched(schedule: Any, *args: Any, **kwargs: Any) -> None:
        complete(schedule, *args, **kwargs)
        watch(schedule, _metered(found))
        steps = int(os.environ["ZBPIPE_ESTIMATE_STEPS"])
        collect(schedule, [*[Wanted.NOTHING] * WARM_UP, *[Wanted.TIMES] * steps], done)

    def done(records: list[Any]) -> None:
        figures = found | {"seconds": [record.seconds for record in records]}
        (folder / f"{rank}.json").write_text(json.dumps(figures))

    plug.complete = watched
    plug.train()


def _metered(found: dict[str, float]) -> Any:
    """A watcher of the first steps, which counts bytes in the last of them."""
    from torch.profiler import ProfilerActivity, profile

    from zbpipe.runtime.measure.recording import Wanted, Watcher

    class Metered(Watcher):
        left = METERED

        def before(self) -> Wanted | None:
            return Wanted.STEP if self.left else None

        @contextmanager
        def around(self, schedule: Any) -> Iterator[None]:
            self.left -= 1
            if self.left:
                yield
                return
            before = _bytes_of_weights()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
                yield
            events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
            changes = [each.nbytes() for each in events if each.name() == "[memory]"]
            found["bytes"] = float(before + max(accumulate(changes, initial=0)))

    return Metered()


def _bytes_of_weights() -> int:
    """Of this rank's parameters and optimizers' states."""
    import torch

    optimizers = [each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)]
    held = [each for one in optimizers for group in one.param_groups for each in group["params"]]
    held += [each for one in optimizers for state in one.state.values() for each in state.values()]
    local = {id(each): getattr(each, "_local_tensor", each) for each in held if isinstance(each, torch.Tensor)}
    return sum(each.numel() * each.element_size() for each in local.values())


# The comparison.


def arguments_of(schedule: str, checkpointing: str, options: argparse.Namespace) -> list[str]:
    return [
        *("--parallelism.pipeline_parallel_degree", str(RANKS), "--parallelism.pipeline_parallel_schedule", schedule),
        *("--training.seq_len", str(options.sequence), "--training.local_batch_size", str(options.microbatches)),
        *("--training.disable_cuda_graphs", "--training.steps", str(WARM_UP + options.steps + 1)),
        f"activation-checkpoint:{checkpointing}",
    ]


JOB = ("--module", "zbpipe.cli.demo.models03", "--config", "llama3_python_stdlib")


def predict(arguments: list[str], schedule: str, folder: Path) -> tuple[float, float]:
    """The step, and bytes of the worst rank, from stages measured on each of the cores; the mean of their steps."""
    from zbpipe.frameworks.titan import command_line

    files = [folder / f"costs{core}.toml" for core in range(RANKS)]
    running = [measure(arguments, core, file) for core, file in enumerate(files)]
    try:
        for each in running:
            if each.wait(TIMEOUT):
                raise subprocess.CalledProcessError(each.returncode, each.args)
    finally:
        for each in running:
            each.kill()
    on_cpu = ["--training.mixed_precision_param", "float32", *arguments]
    job = command_line.read_workload([*JOB, *on_cpu], RANKS)
    steps = []
    for file in files:
        found = zbpipe.estimate(job, costs=zbpipe.load_costs(file), only=[schedule], plans=False)
        steps += [each for each in found.steps if each.stages_per_rank == resolve(schedule).stages_per_rank]
    return fmean(each.seconds for each in steps), max(each.memory.total for each in steps)


def measure(arguments: list[str], core: int, file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "zbpipe", "measure", *JOB, *arguments, "-o", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["taskset", "-c", str(core), *command], env=environment, stdout=sys.stderr)


def run(arguments: list[str], folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """The median step of a real job, and bytes of the worst rank."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *(__file__, *JOB, "--dump_folder", str(folder), *arguments),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        FOLDER: str(folder),
        "ZBPIPE_ESTIMATE_STEPS": str(options.steps),
    }
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr, timeout=TIMEOUT)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    steps = [max(step) for step in zip(*(each["seconds"] for each in ranks), strict=True)]
    return median(steps), max(each["bytes"] for each in ranks)


def compare(schedule: str, checkpointing: str, options: argparse.Namespace) -> Compared:
    arguments = arguments_of(schedule, checkpointing, options)
    predicted, found = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            predicted.append(predict(arguments, schedule, Path(name)))
            found.append(run(arguments, Path(name), options))
    (predicted_steps, predicted_bytes), (steps, sizes) = zip(*predicted, strict=True), zip(*found, strict=True)
    return Compared(schedule, checkpointing, predicted_steps, steps, predicted_bytes, sizes)


def table(found: list[Compared]) -> str:
    heads = ["schedule", "checkpointing", "step, predicted", "step", "off", "MiB, predicted", "MiB", "off"]
    return markdown(heads, map(_cells, found), left=2)


def _cells(row: Compared) -> list[str]:
    steps = [f"{median(steps):.3f}" for steps in (row.predicted_steps, row.steps)]
    sizes = [f"{median(sizes) / 2**20:.1f}" for sizes in (row.predicted_bytes, row.bytes)]
    return [row.schedule, row.checkpointing, *steps, f"{row.step_off:+.1%}", *sizes, f"{row.memory_off:+.1%}"]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME")
    arguments.add_argument("--checkpointing", nargs="+", default=["none", "selective"], metavar="KIND")
    arguments.add_argument("--steps", type=int, default=6, help="that are timed")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--sequence", type=int, default=1024, help="tokens of a microbatch")
    arguments.add_argument("--json", **JSON)
    options = arguments.parse_args()
    found: list[Compared] = []
    for checkpointing in options.checkpointing:
        for schedule in options.schedules:
            found.append(compare(schedule, checkpointing, options))
            print(found[-1], file=sys.stderr, flush=True)
            write_json(options.json, "cpu", found)
    print(table(found))
    return int(any(abs(off) > GOAL for each in found for off in (each.step_off, each.memory_off)))


if __name__ == "__main__":
    if FOLDER in os.environ:
        train_and_write()
    else:
        sys.exit(main())
