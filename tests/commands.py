"""The command line in this process."""

import json
import shlex
from itertools import pairwise
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
