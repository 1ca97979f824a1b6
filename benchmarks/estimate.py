"""Steps and memory of a real TorchTitan job beside what was estimated from its stages, measured one by one.

python benchmarks/estimate.py --json estimate.json  # some ten minutes on two cores with nothing else to do

`zbpipe measure` runs the stages of Llama 3's debug model one after the other on one core. From its cost file the step
and the peak memory of each schedule are predicted. Then TorchTitan trains with it on 2 processes of one core each. The
step is the schedule's, without optimizer and input; memory is what lives beyond what lived before the step, gradients
included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import zbpipe
from zbpipe.memory import peak_bytes
from zbpipe.registry import lookup

RANKS = 2
SCHEDULES = ("1F1B", "ZBH1", "ZBV")
GOAL = 0.05
METERED, WARM_UP = 4, 6
"""Training steps: the one whose memory is measured, and how many there are before times are."""
TIMEOUT = 1200.0
FOLDER = "ZBPIPE_ESTIMATE_FOLDER"
"""The variable of the environment that tells a rank where to write."""


@dataclass(frozen=True)
class Compared:
    """One schedule. Seconds, and bytes by rank."""

    schedule: str
    checkpointing: str
    predicted_step: float
    step: float
    predicted_bytes: tuple[float, ...]
    bytes: tuple[float, ...]

    @property
    def step_off(self) -> float:
        return self.predicted_step / self.step - 1

    @property
    def memory_off(self) -> float:
        """Of the worst rank."""
        return max(self.predicted_bytes) / max(self.bytes) - 1


# On a rank.


def train_and_write() -> None:
    """A rank of the job: TorchTitan on one core, with this schedule's steps written down."""
    rank, folder = int(os.environ["LOCAL_RANK"]), Path(os.environ[FOLDER])
    os.sched_setaffinity(0, {rank})
    from zbpipe.titan import command_line, plug_in, versions

    options, rest = command_line.parse(sys.argv[1:])
    plug_in(options)
    sys.argv[1:] = rest
    from zbpipe.runtime.measure.recording import Wanted, collect, surround
    from zbpipe.titan import plug

    complete, found = plug.complete, {"bytes": 0.0}

    def watched(schedule: Any, *args: Any, **kwargs: Any) -> None:
        complete(schedule, *args, **kwargs)
        surround(schedule, _metered(found), METERED)
        steps = int(os.environ["ZBPIPE_ESTIMATE_STEPS"])
        collect(schedule, [*[Wanted.NOTHING] * WARM_UP, *[Wanted.TIMES] * steps], done)

    def done(records: list[Any]) -> None:
        figures = found | {"seconds": [record.seconds for record in records]}
        (folder / f"{rank}.json").write_text(json.dumps(figures))

    plug.complete = watched
    versions.installed().load().train()


def _metered(found: dict[str, float]) -> Any:
    """A context for each step, which counts live bytes in the last of them."""
    from zbpipe.runtime import _torch

    left = [METERED]

    @contextmanager
    def around(schedule: Any) -> Iterator[None]:
        left[0] -= 1
        if left[0]:
            yield
            return
        with _torch.StorageMeter() as meter:
            yield
        found["bytes"] = float(meter.peak)

    return around


# The comparison.


def arguments_of(schedule: str, checkpointing: str, options: argparse.Namespace) -> list[str]:
    return [
        *("--parallelism.pipeline_parallel_degree", str(RANKS), "--parallelism.pipeline_parallel_schedule", schedule),
        *("--training.seq_len", str(options.sequence), "--training.local_batch_size", str(options.microbatches)),
        *("--training.disable_cuda_graphs", "--training.steps", str(WARM_UP + options.steps + 1)),
        f"activation-checkpoint:{checkpointing}",
    ]


JOB = ("--module", "zbpipe.demo.models03", "--config", "llama3_python_stdlib")


def predict(
    arguments: list[str], schedule: str, folder: Path, options: argparse.Namespace
) -> tuple[float, list[float]]:
    """The step, and bytes by rank, from stages measured on one core."""
    file = folder / "costs.toml"
    command = [sys.executable, "-m", "zbpipe", "measure", *JOB, *arguments, "-o", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(["taskset", "-c", "0", *command], check=True, env=environment, stdout=sys.stderr, timeout=TIMEOUT)
    costs = zbpipe.load_costs(file)
    placement = lookup(schedule).place(RANKS)
    timeline = zbpipe.simulate(zbpipe.generate(schedule, RANKS, options.microbatches), costs.on(placement))
    return timeline.makespan, list(peak_bytes(timeline))


def gradients_of(arguments: list[str], schedule: str) -> list[float]:
    """Bytes of the gradients of each rank's parameters, in float32."""
    from zbpipe.titan import workload

    job = workload.read("zbpipe.demo.models03", "llama3_python_stdlib", RANKS, arguments)
    algorithm = lookup(schedule)
    placement = algorithm.place(RANKS)
    return [4 * count for count in job.parameters_by_rank(placement, job.split(placement, algorithm))]


def run(arguments: list[str], folder: Path, options: argparse.Namespace) -> tuple[float, list[float]]:
    """The median step of a real job, and bytes by rank."""
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
    return median(steps), [each["bytes"] for each in ranks]


def compare(schedule: str, checkpointing: str, options: argparse.Namespace) -> Compared:
    arguments = arguments_of(schedule, checkpointing, options)
    with tempfile.TemporaryDirectory() as name:
        predicted_step, held = predict(arguments, schedule, Path(name), options)
        predicted = [size + more for size, more in zip(held, gradients_of(arguments, schedule), strict=True)]
        step, found = run(arguments, Path(name), options)
    return Compared(schedule, checkpointing, predicted_step, step, tuple(predicted), tuple(found))


def table(found: list[Compared]) -> str:
    lines = [
        "| schedule | checkpointing | step, predicted | step | off | MiB, predicted | MiB | off |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        sizes = [f"{max(sizes) / 2**20:.1f}" for sizes in (each.predicted_bytes, each.bytes)]
        lines.append(
            f"| {each.schedule} | {each.checkpointing} | {each.predicted_step:.3f} | {each.step:.3f} |"
            f" {each.step_off:+.1%} | {sizes[0]} | {sizes[1]} | {each.memory_off:+.1%} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--checkpointing", nargs="+", default=["none", "selective"], metavar="KIND")
    parser.add_argument("--steps", type=int, default=10, help="that are timed (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a microbatch")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    found: list[Compared] = []
    for checkpointing in options.checkpointing:
        for schedule in options.schedules:
            found.append(compare(schedule, checkpointing, options))
            print(found[-1], file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    print(table(found))
    return int(any(abs(off) > GOAL for each in found for off in (each.step_off, each.memory_off)))


if __name__ == "__main__":
    if FOLDER in os.environ:
        train_and_write()
    else:
        sys.exit(main())
