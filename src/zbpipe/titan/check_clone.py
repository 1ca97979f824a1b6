"""`python -m zbpipe.titan.check_clone`: check that zbpipe works with the TorchTitan on Python's path, in about a
minute.

For a clone of TorchTitan, whose main branch changes every day:

    PYTHONPATH=/path/to/torchtitan python -m zbpipe.titan.check_clone

It looks for the names that zbpipe uses from TorchTitan. Then it trains TorchTitan's debug model for three steps on two
CPU processes, with 1F1B and with ZBV, from the same weights. Losses and gradient norms have to be equal.
"""

from __future__ import annotations

import sys
import tempfile
from math import isclose
from pathlib import Path

from zbpipe.cli.demo.command import run_demo
from zbpipe.cli.demo.launch import DemoError, JobOutcome
from zbpipe.frameworks.titan import cpu, versions

_LINES = 40
"""Number of log lines shown of a failed job."""
_TOLERANCES = {"loss_metrics/global_avg_loss": 1e-5, "grad_norm": 1e-4}
"""Relative tolerances: float32 sums depend on their order."""


def main() -> int:
    """Run the check and print the findings; returns the exit code."""
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
    try:
        outcomes = run_demo(3, folder, ("1F1B", "ZBV"), rounds=1)
    except DemoError as error:
        return str(error)
    for schedule, (outcome,) in outcomes.items():
        if outcome.error is not None:
            log = folder / f"{schedule}-0" / "output.log"
            print(*log.read_text().splitlines()[-_LINES:], sep="\n", flush=True)
            return f"{schedule} does not train: {outcome.error}"
        print(f"{schedule}: losses {', '.join(f'{loss:.6f}' for loss in outcome.losses)}", flush=True)
    return find_difference(outcomes["1F1B"][0], outcomes["ZBV"][0])


def find_difference(expected: JobOutcome, found: JobOutcome) -> str | None:
    """The first differing metric of a step, in words; None if all agree."""
    if len(found.steps) != len(expected.steps):
        return f"ZBV has {len(found.steps)} steps and 1F1B {len(expected.steps)}"
    for one, other in zip(expected.steps, found.steps, strict=True):
        for name, tolerance in _TOLERANCES.items():
            if not isclose(one[name], other[name], rel_tol=tolerance):
                return f"in step {one['step']} {name} is {one[name]} with 1F1B and {other[name]} with ZBV"
    return None


if __name__ == "__main__":
    sys.exit(main())
