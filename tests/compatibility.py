"""docs/compatibility.md, put together from what `test_matrix.py` saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import NamedTuple

SCHEDULES = ("ZBV", "ZBH1", "VHalf")
CHECKPOINTING = ("none", "selective", "full")
COMPILING = ("eager", "compiled")


class Row(NamedTuple):
    """A line of a table."""

    feature: str
    how: str
    outcome: str


def page(matrix: Mapping[tuple[str, str, str], str], works: Iterable[Row], refused: Iterable[Row]) -> str:
    """The whole page; `matrix` holds the outcomes by schedule, checkpointing and compiling."""
    columns = [(checkpointing, compiling) for checkpointing in CHECKPOINTING for compiling in COMPILING]
    return "\n".join(
        [
            _HEAD.format(torch=_release("torch"), torchtitan=_release("torchtitan")),
            *_table(
                ["schedule", *(f"{checkpointing}, {compiling}" for checkpointing, compiling in columns)],
                ([schedule, *(matrix[schedule, *column] for column in columns)] for schedule in SCHEDULES),
            ),
            _WITH_MORE,
            *_table(["feature", "tested how", "outcome"], works),
            _NOT,
            *_table(["feature", "tested how", "outcome"], refused),
            _UNTRIED,
        ]
    )


def _table(names: list[str], lines: Iterable[Iterable[str]]) -> list[str]:
    return [_line(names), "|---" * len(names) + "|", *map(_line, lines)]


def _line(fields: Iterable[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _release(package: str) -> str:
    return version(package).partition("+")[0]


_HEAD = """\
# What works together

`make compatibility` writes this page from what it sees, and `make matrix`, which CI runs, fails when it sees something
else. Seen with torch {torch} and torchtitan {torchtitan} on the CPU, over gloo. Not tried on a GPU.

"Works" means: TorchTitan's debug model, started by `zbpipe.titan.train` from a seed checkpoint, has in each of three
optimizer steps the loss (within 1e-5) and the norm of the gradients (within 1e-4) of the same job without a pipeline
and without a compiler. Two pipeline ranks, four microbatches, float32, unless a row says otherwise. Nothing is compiled
a second time for a later microbatch, no graph breaks, and no weight gradient is computed in I instead of W, unless a
row says so.

## Schedule, activation checkpointing, torch.compile

Llama 3. Compiled means TorchTitan's `--compile.enable`: every block, by Inductor, and the loss.
"""

_WITH_MORE = """
## And more

Selective checkpointing, TorchTitan's default, in all rows. "Ranks" are processes.
"""

_NOT = """
## What does not work

Refused means: at construction, before any message is sent; in TorchTitan's jobs by every rank.
"""

_UNTRIED = """
Not tried: context parallelism, expert parallelism, CUDA graphs, float8, and more than two pipeline ranks within
TorchTitan.
"""
