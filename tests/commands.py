"""The command line in this process, and processes."""

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from zbpipe import cli


def run(line: str) -> Result:
    return CliRunner().invoke(cli.main, shlex.split(line), prog_name="zbpipe")


def answer(line: str, code: int = 0) -> str:
    """What it prints, errors among it only where it has to fail."""
    result = run(line)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def at_small_size(words: list[str]) -> list[str]:
    """A command of the documents with a fifth of the ops, which takes a tenth of the time."""
    smaller = {("-p", "8"): "4", ("-m", "32"): "12", ("-m", "16"): "12"}
    return [smaller.get((option, word), word) for option, word in pairwise(["", *words])]


def json_of(line: str) -> Any:
    return json.loads(answer(f"{line} --json"))


def process(
    *command: str | Path,
    folder: Path | None = None,
    code: int | None = 0,
    clean: bool = False,
    timeout: float = 240,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with more variables in the environment, or hardly any others. None of it is left."""
    kept = ("PATH", "HOME", "LANG", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not clean or name in kept}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen(command, cwd=folder, env=environment | more, start_new_session=True, **pipes)
    try:
        out, error = started.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert code in (None, started.returncode), f"{out}\n{error}"
    return subprocess.CompletedProcess(command, started.returncode, out, error)
