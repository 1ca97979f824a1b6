"""`python -m zbpipe.titan.check_clone`: check that zbpipe works with the TorchTitan on Python's path, in some
minutes.

For a clone of TorchTitan, whose main branch changes every day:

    PYTHONPATH=/path/to/torchtitan python -m zbpipe.titan.check_clone

It looks for the names that zbpipe uses from TorchTitan. Then it trains TorchTitan's debug model for five steps on two
CPU processes, from the same weights: with 1F1B, ZBV, ZB, Auto, a CSV file, and validated optimizer steps. Losses and
gradient norms have to be equal.
"""

from __future__ import annotations

import sys
import tempfile
from math import isclose
from pathlib import Path

from zbpipe import generate
from zbpipe.cli.demo.command import MICROBATCHES, RANKS, run_demo
from zbpipe.cli.demo.launch import DemoError, JobOutcome
from zbpipe.frameworks.titan import versions
from zbpipe.schedule.user_code import require_torch

_STEPS = 5
"""Auto measures in the first three, and then runs ZB for the measured costs."""
_LINES = 40
"""Number of a failed job's log lines to show."""
_TOLERANCES = {"loss_metrics/global_avg_loss": 1e-5, "grad_norm": 1e-4}
"""Relative tolerances, because float32 sums depend on their order."""


def main() -> int:
    require_torch("python -m zbpipe.titan.check_clone")
    from zbpipe.frameworks.titan import cpu

    try:
        version = versions.find_installed()
        print(f"{versions.describe_installed()}: zbpipe treats it as {version.name}", flush=True)
        cpu.stand_in()
        versions.require_names()
    except ImportError as error:
        print(f"failed: {error}")
        return 1
    print(f"names and signatures: all {len(versions.NEEDED)} found", flush=True)
    with tempfile.TemporaryDirectory(prefix="zbpipe-check-") as folder:
        wrong = _compare_losses(Path(folder))
    print("zbpipe works with this TorchTitan" if wrong is None else f"failed: {wrong}")
    return int(wrong is not None)


def _compare_losses(folder: Path) -> str | None:
    table = folder / "wave.csv"
    table.write_text(generate("ZB", RANKS, MICROBATCHES, stages_per_rank=4).to_csv())
    jobs = {name: (name,) for name in ("1F1B", "ZBV", "ZB")} | {
        "Auto": ("Auto", "--zbpipe.profile-steps", "1"),
        "CSV": (str(table),),
        "validated": ("ZBV", "--zbpipe.optimizer-step", "validated"),
    }
    try:
        outcomes = run_demo(_STEPS, folder, jobs)
    except DemoError as error:
        return str(error)
    for name, outcome in outcomes.items():
        if outcome.error is not None:
            log = folder / name / "output.log"
            print(*log.read_text().splitlines()[-_LINES:], sep="\n", flush=True)
            return f"{name} does not train: {outcome.error}"
        print(f"{name}: losses {', '.join(f'{loss:.6f}' for loss in outcome.losses)}", flush=True)
    usual, *_ = outcomes.values()
    return next(filter(None, (find_difference(usual, found, name) for name, found in outcomes.items())), None)


def find_difference(expected: JobOutcome, found: JobOutcome, name: str) -> str | None:
    """The first metric of a step that differs from 1F1B's, as text. None if all agree."""
    if len(found.steps) != len(expected.steps):
        return f"{name} has {len(found.steps)} steps and 1F1B {len(expected.steps)}"
    for one, other in zip(expected.steps, found.steps, strict=True):
        for metric, tolerance in _TOLERANCES.items():
            if not isclose(one[metric], other[metric], rel_tol=tolerance):
                return f"in step {one['step']} {metric} is {one[metric]} with 1F1B and {other[metric]} with {name}"
    return None


if __name__ == "__main__":
    sys.exit(main())
