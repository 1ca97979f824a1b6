"""Faults that tests have to find: `python tests/mutants.py` puts each into a copy of the package, and runs its test.

A fault is one place in the code. It is caught if its test fails within a minute, where it passes without the fault.
`--part 3/10` takes a tenth of the faults; `--name` those whose description has this text.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 60.0
"""Limit of a test, with the start of its process."""


class Mutant(NamedTuple):
    """A fault."""

    what: str
    file: str
    """Within the package."""
    old: str
    """In the file once."""
    new: str
    test: str
    """What pytest is given: a file of tests, with options."""


class Outcome(NamedTuple):
    """What the test said."""

    caught: bool
    words: str


def read() -> list[Mutant]:
    """The faults in mutants.txt: under a line for each test, the file and the fault, with lines to take and to put."""
    found: list[Mutant] = []
    test = ""
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line.startswith("== "):
            test = line.removeprefix("== ")
        elif line[0] in "-+":
            name = "old" if line[0] == "-" else "new"
            before = getattr(found[-1], name)
            found[-1] = found[-1]._replace(**{name: f"{before}\n{line[1:]}" if before else line[1:]})
        else:
            file, _, what = line.partition(": ")
            found.append(Mutant(what, file, "", "", test))
    return found


MUTANTS = read()


def try_out(mutant: Mutant) -> Outcome:
    """Run the mutant's test on a copy of the package with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        # With what is compiled, which is valid but for the fault; without what others are writing there.
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.pyc.*", "*.tmp.*"))
        file = source / "zbpipe" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return Outcome(False, f"{mutant.file} has {text.count(mutant.old)} places like {mutant.old!r}")
        file.write_text(text.replace(mutant.old, mutant.new))
        return run_test(mutant.test, source)


def run_test(test: str, source: Path) -> Outcome:
    """Caught if the test fails in time. All its processes have ended then."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *shlex.split(test)]
    process = subprocess.Popen(
        command,
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(False, f"no end within {SECONDS:.0f} s")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failed = re.findall(r"^(?:FAILED|ERROR) (test_.+?)(?: - .*)?$", said, re.MULTILINE)
    return Outcome(process.returncode == 1, ", ".join(failed) or said.strip()[-300:])


def parse_arguments(arguments: Sequence[str] | None = None) -> list[Mutant]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", metavar="N/OF", default="1/1", help="of the faults, counted from 1")
    parser.add_argument("--name", default="", help="only faults whose description has this text")
    parsed = parser.parse_args(arguments)
    number, of = map(int, parsed.part.split("/"))
    found = [each for each in MUTANTS[number - 1 :: of] if parsed.name in each.what]
    if not found:
        parser.error(f"no fault of part {parsed.part} has {parsed.name!r} in its description")
    return found


def main() -> int:
    """Print what caught each fault; returns how many escaped."""
    escaped, mutants = 0, parse_arguments()
    for mutant in mutants:
        began = time.monotonic()
        outcome = try_out(mutant)
        escaped += not outcome.caught
        verdict = "caught" if outcome.caught else "ESCAPED"
        print(f"{verdict:8} {time.monotonic() - began:4.0f} s  {mutant.what}: {outcome.words}", flush=True)
    print(f"{len(mutants) - escaped} of {len(mutants)} faults caught")
    return escaped


if __name__ == "__main__":
    sys.exit(min(main(), 1))
