"""Tokens per second of TorchTitan's Llama 3 debug model on two real pipeline ranks, one thread each, on the CPU.

1F1B and ZBVZeroBubble are torch's, ZBV and Auto zbpipe's. A round runs them one after the other, in an order that
turns from round to round, so that a machine that gets slower does so for all. A job's figure is the median of
TorchTitan's own throughput over windows of five steps, without the first ten steps: by then everything is compiled, and
Auto has decided.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torchtitan
from harness import JSON, markdown, parser, write_json

from zbpipe.cli.demo.launch import train_on_cpu

SCHEDULES = ("1F1B", "ZBVZeroBubble", "ZBV", "Auto")
MODES = {
    "none": ("activation-checkpoint:none",),
    "selective": ("activation-checkpoint:selective",),
    "full": ("activation-checkpoint:full",),
    "selective, compiled": ("--compile.enable", "activation-checkpoint:selective"),
}
"""TorchTitan's arguments, the last of a command line."""
SKIPPED, WINDOW = 10, 5
"""Steps."""
TIMEOUT = 900.0


@dataclass(frozen=True)
class Run:
    """One job."""

    mode: str
    schedule: str
    round: int
    tokens_per_second: float | None
    """Of both ranks together; None if it failed."""
    last_loss: float | None
    outcome: str
    """What Auto decided, or the error."""


def run(mode: str, schedule: str, nth: int, options: argparse.Namespace) -> Run:
    arguments = [
        *("--training.steps", str(options.steps), "--training.local_batch_size", str(options.microbatches)),
        *("--training.seq_len", str(options.sequence), "--metrics.log_freq", str(WINDOW)),
        *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", schedule),
        # Six layers on four stages: 2, 2, 1, 1, so that both ranks of a V have three.
        *("--parallelism.pipeline_parallel_first_stage_less_layers", "0"),
        *("--parallelism.pipeline_parallel_last_stage_less_layers", "0"),
        *(("--zbpipe.profile-steps", "2") if schedule == "Auto" else ()),
        *MODES[mode],
    ]
    with tempfile.TemporaryDirectory() as folder:
        outcome = train_on_cpu(arguments, num_ranks=2, folder=Path(folder), timeout=TIMEOUT)
        log = (Path(folder) / "output.log").read_text()
    if outcome.error is not None:
        print(log[-5000:], file=sys.stderr)
        return Run(mode, schedule, nth, None, None, outcome.error)
    windows = [step["throughput(tps)"] for step in outcome.steps if step["step"] > SKIPPED]
    decided = re.findall(r"Auto: (in turn.*|stays.*)", log)
    return Run(mode, schedule, nth, 2 * median(windows), outcome.losses[-1], decided[-1] if decided else "")


def table(runs: list[Run]) -> str:
    """By mode a line of medians, each relative to 1F1B in the same round: median, least and most."""
    rows = (
        [mode, *(cell([each for each in runs if each.mode == mode], schedule) for schedule in SCHEDULES)]
        for mode in dict.fromkeys(each.mode for each in runs)
    )
    return markdown(["checkpointing", *SCHEDULES], rows)


def cell(runs: list[Run], schedule: str) -> str:
    base = {each.round: each.tokens_per_second for each in runs if each.schedule == "1F1B"}
    own = [each for each in runs if each.schedule == schedule]
    rates = [each.tokens_per_second for each in own if each.tokens_per_second]
    if not rates:
        return "fails: " + own[0].outcome.partition(". ")[0][:60] if own else ""
    ratios = sorted(each.tokens_per_second / (base[each.round] or 1) for each in own if each.tokens_per_second)
    percents = [f"{100 * (ratio - 1):+.1f}" for ratio in (median(ratios), ratios[0], ratios[-1])]
    to_base = "" if schedule == "1F1B" else f" ({percents[0]} %; {percents[1]} to {percents[2]})"
    return f"{median(rates):,.0f}{to_base}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=25)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--sequence", type=int, default=128, help="tokens of a microbatch")
    arguments.add_argument("--json", **JSON)
    options = arguments.parse_args()
    if options.steps < SKIPPED + WINDOW:
        arguments.error(f"--steps {options.steps} leaves none to count: give at least {SKIPPED + WINDOW}")
    runs: list[Run] = []
    for mode in options.modes:
        for nth in range(options.rounds):
            order = SCHEDULES[nth % len(SCHEDULES) :] + SCHEDULES[: nth % len(SCHEDULES)]
            for schedule in order:
                runs.append(run(mode, schedule, nth, options))
                print(runs[-1], file=sys.stderr, flush=True)
                write_json(options.json, "cpu", runs)
    print(f"torch {torch.__version__}, torchtitan {torchtitan.__version__}\n")
    print(table(runs))


if __name__ == "__main__":
    main()
