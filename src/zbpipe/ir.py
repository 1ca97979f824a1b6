"""The one data type that everything in zbpipe passes around: a `Schedule` of `Op`s on a `Placement`.

The words are those of `torch.distributed.pipelining`: a *stage* is a global stage index, *F* is a forward, *I* the
backward for the stage's input (dI), *W* the backward for its weights (dW) and *B* both in one. The zero-bubble papers
write B for what is called I here.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

_OP = re.compile(r"(?P<stage>\d+)(?P<kind>[FIWB])(?P<microbatch>\d+)")


class OpKind(StrEnum):
    """What a rank computes in one op; the value is the letter of the text form."""

    F = "F"
    I = "I"  # noqa: E741 -- torch's letter for the input gradient
    W = "W"
    B = "B"


class Op(NamedTuple):
    """One piece of computation: what `kind` of work on which stage for which microbatch. Text form: `3F0`."""

    stage: int
    kind: OpKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """The op written as `text`, as torch writes it: stage, kind, microbatch, for instance `3F0`.

        Raises:
            ValueError: `text` is anything else.
        """
        match = _OP.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not an op: expected stage, one of F, I, W, B, and microbatch, for example 3F0"
            )
        return cls(int(match["stage"]), OpKind(match["kind"]), int(match["microbatch"]))


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage: `rank_of[stage]` is a pipeline rank; ranks count from 0 without a gap."""

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of or set(self.rank_of) != set(range(max(self.rank_of) + 1)):
            raise ValueError(f"a placement needs a stage on every rank, got the ranks {self.rank_of}")

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Round and round: stage s on rank s modulo `num_ranks`."""
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Down the ranks and up again, as often as `stages_per_rank` says: the last stage meets the first on rank 0."""
        down = tuple(range(num_ranks))
        return cls(tuple(rank for leg in range(stages_per_rank) for rank in (down, down[::-1])[leg % 2]))

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, in ascending order."""
        return self._stages_by_rank[rank]


@dataclass(frozen=True)
class Schedule:
    """For every rank the list of ops that it runs, in order.

    A `Schedule` can be built with any lists at all; `zbpipe.validate` tells whether they make sense.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ops: tuple[tuple[Op, ...], ...]
    """One tuple per rank."""

    @property
    def num_ranks(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[tuple[Op, ...]]:
        return iter(self.ops)

    def __str__(self) -> str:
        """One line per rank: `rank 0: 0F0 0F1 ...`."""
        return "\n".join(f"rank {rank}: {' '.join(map(str, ops))}" for rank, ops in enumerate(self.ops))

    def to_csv(self) -> str:
        """The table that torch's `_load_csv(..., format="compute_only")` reads: a row per rank, a cell per op."""
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(self.ops)
        return table.getvalue()

    @classmethod
    def from_csv(cls, table: str, name: str = "csv") -> Schedule:
        """Read torch's compute-only table. Empty cells (torch's bubbles) carry no meaning and are dropped.

        Placement and number of microbatches come from the table itself: a stage is on the rank in whose row it first
        appears.

        Raises:
            ValueError: a cell is no op, a row or the whole table is empty, or a stage appears in no row.
        """
        rows = [row for row in csv.reader(io.StringIO(table)) if row]
        if not rows:
            raise ValueError(f"schedule {name}: the table is empty")
        return cls.from_rows([_parse_row(rank, row) for rank, row in enumerate(rows)], name)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Op]], name: str) -> Schedule:
        """A schedule from one sequence of ops per rank, with the placement that the ops show."""
        rank_of: dict[int, int] = {}
        for rank, ops in enumerate(rows):
            if not ops:
                raise ValueError(f"schedule {name}: rank {rank} has no ops")
            for op in ops:
                rank_of.setdefault(op.stage, rank)
        missing = set(range(max(rank_of, default=-1) + 1)) - rank_of.keys()
        if missing or not rank_of:
            raise ValueError(f"schedule {name}: no rank runs stage {min(missing, default=0)}")
        return cls(
            name=name,
            placement=Placement(tuple(rank_of[stage] for stage in range(len(rank_of)))),
            num_microbatches=1 + max(op.microbatch for ops in rows for op in ops),
            ops=tuple(map(tuple, rows)),
        )


def _parse_row(rank: int, row: Sequence[str]) -> list[Op]:
    try:
        return [Op.parse(cell) for cell in row if cell.strip()]
    except ValueError as error:
        raise ValueError(f"row {rank + 1} (rank {rank}): {error}") from None
