"""The one data type that everything in zbpipe passes around: a `Schedule` of `Op`s on a `Placement`.

The words are those of `torch.distributed.pipelining`: a *stage* is a global stage index, *F* is a forward, *I* the
backward for the stage's input (dI), *W* the backward for its weights (dW) and *B* both in one. The zero-bubble papers
write B for what is called I here.
"""

from __future__ import annotations

import csv
import io
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import NamedTuple

NUMBER = "[0-9]{1,15}"
"""A stage or a microbatch in a table, as a regular expression; what is longer is a mistake, or worse."""
_OP = re.compile(rf"(?P<stage>{NUMBER})(?P<kind>[FIWB])(?P<microbatch>{NUMBER})")

MOST_STAGES = 1024
"""In a schedule that is made by name or planned."""
MOST_WORK = 2**18
"""Microbatches times stages in such a schedule: a table of some megabytes."""


def require_size(what: str, num_stages: int, num_microbatches: int = 1) -> None:
    """Refuse what would take gigabytes or hours, before anything is made of that size.

    Args:
        what: for the message.
        num_stages: on all ranks together.
        num_microbatches: from 1 on.

    Raises:
        ValueError: more than 1024 stages, or microbatches times stages beyond 2**18.
    """
    if num_stages > MOST_STAGES:
        raise ValueError(f"{what} has {num_stages} stages, but at most {MOST_STAGES} are possible: use fewer")
    if num_stages * num_microbatches > MOST_WORK:
        raise ValueError(
            f"{what} has {num_stages} stage(s), and {num_microbatches} microbatches are too many for them: use at most"
            f" {MOST_WORK // num_stages}, or fewer ranks"
        )


def require_whole(**numbers: object) -> None:
    """Refuse what is no whole number.

    Raises:
        ValueError: the first of them, by its name.
    """
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"{name} has to be a whole number, got {number!r}")


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
                f"{reprlib.repr(text)} is not an op: expected stage, one of F, I, W, B, and microbatch, for example 3F0"
            )
        return cls(int(match["stage"]), OpKind(match["kind"]), int(match["microbatch"]))


F, I, W, B = OpKind  # noqa: E741 -- `inputs` runs for every op, and `OpKind.F` takes longer than all else in it


def inputs(op: Op, num_stages: int) -> tuple[tuple[Op, ...], ...]:
    """What has to be over before `op` can start: one op of each group.

    F takes the output of the stage before, W what I left behind; I and B take their own F and the gradient of the stage
    after, which comes out of an I or out of a B. This is the rule for all of zbpipe. The planner's flat numbers and the
    bound repeat it for speed, and tests hold them against it.

        >>> [[str(choice) for choice in group] for group in inputs(Op.parse("1I0"), num_stages=4)]
        [['1F0'], ['2I0', '2B0']]

    Args:
        op: of any stage and microbatch.
        num_stages: of the whole pipeline.
    """
    stage, kind, microbatch = op
    if kind is F:
        return ((Op(stage - 1, F, microbatch),),) if stage > 0 else ()
    if kind is W:
        return ((Op(stage, I, microbatch),),)
    forward = (Op(stage, F, microbatch),)
    if stage == num_stages - 1:
        return (forward,)
    return (forward, (Op(stage + 1, I, microbatch), Op(stage + 1, B, microbatch)))


def users(op: Op, num_stages: int) -> tuple[Op, ...]:
    """The ops that `op` feeds, `inputs` the other way round. Of an I and a B a schedule has one.

        >>> [str(user) for user in users(Op.parse("1I0"), num_stages=4)]
        ['1W0', '0I0', '0B0']

    Args:
        op: of any stage and microbatch.
        num_stages: of the whole pipeline.
    """
    stage, kind, microbatch = op
    found: list[Op] = []
    if kind is F:
        found = [Op(stage + 1, F, microbatch)] if stage < num_stages - 1 else []
        found += [Op(stage, each, microbatch) for each in (I, B)]
    if kind is I:
        found = [Op(stage, W, microbatch)]
    if kind in (I, B) and stage > 0:
        found += [Op(stage - 1, each, microbatch) for each in (I, B)]
    return tuple(found)


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage: `rank_of[stage]` is a pipeline rank; ranks count from 0 without a gap."""

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = set(self.rank_of)
        if not ranks or min(ranks) < 0 or max(ranks) >= len(ranks):
            raise ValueError(f"a placement needs a stage on every rank, got the ranks {self.rank_of}")

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Round and round: stage s on rank s modulo `num_ranks`. Not for more than 1024 stages."""
        require_size(
            f"a placement on {num_ranks} ranks with {stages_per_rank} stage(s) each", num_ranks * stages_per_rank
        )
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Down the ranks and up again, as often as `stages_per_rank` says: the last stage meets the first on rank 0.

        Not for more than 1024 stages.
        """
        require_size(
            f"a placement on {num_ranks} ranks with {stages_per_rank} stage(s) each", num_ranks * stages_per_rank
        )
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
            ValueError: a cell is no op, a row or the whole table is empty, a stage appears in no row, or there are
                far too few ops for a microbatch that a cell names.
        """
        rows = cells(table)
        if not rows:
            raise ValueError(f"schedule {name}: the table is empty")
        return cls.from_rows([_parse_row(rank, row) for rank, row in enumerate(rows)], name)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Op]], name: str) -> Schedule:
        """A schedule from one sequence of ops per rank, with the placement that the ops show.

        Raises:
            ValueError: as `from_csv`, or a number below zero.
        """
        rank_of: dict[int, int] = {}
        for rank, ops in enumerate(rows):
            if not ops:
                raise ValueError(f"schedule {name}: rank {rank} has no ops")
            for op in ops:
                rank_of.setdefault(op.stage, rank)
        everything = [(rank, op) for rank, ops in enumerate(rows) for op in ops]
        num_stages = next(stage for stage in count() if stage not in rank_of)
        for rank, op in everything:
            if not 0 <= op.stage < num_stages:
                raise ValueError(f"schedule {name}: rank {rank} runs {op}, but no rank runs stage {num_stages}")
            if op.microbatch < 0:
                raise ValueError(f"schedule {name}: rank {rank} runs {op}, but microbatches count from 0")
        if not everything:
            raise ValueError(f"schedule {name}: there are no ranks")
        rank, last = max(everything, key=lambda each: each[1].microbatch)
        num_microbatches = last.microbatch + 1
        # Otherwise what is missing would be listed, and a single wrong cell can make that endless.
        if num_stages * num_microbatches > len(everything):
            raise ValueError(
                f"schedule {name}: rank {rank} runs {last}, but {len(everything)} op(s) are far too few for"
                f" {num_microbatches} microbatches on {num_stages} stage(s): mend that microbatch, or add the ops that"
                " are missing"
            )
        placement = Placement(tuple(rank_of[stage] for stage in range(num_stages)))
        return cls(name, placement, num_microbatches, tuple(map(tuple, rows)))


def cells(table: str) -> list[list[str]]:
    """The cells of a CSV table, row by row. Takes what Excel adds: a byte order mark, other ends of lines.

    Raises:
        ValueError: the table is no CSV, or other characters than commas separate its cells.
    """
    if "," not in table and "(" not in table and (separator := re.search("[;\t]", table)):
        raise ValueError(f"{separator[0]!r} separates the cells of the table: save it with commas")
    try:
        return [row for row in csv.reader(table.removeprefix("\ufeff").splitlines()) if row]
    except csv.Error as error:
        raise ValueError(f"the table is no CSV: {error}") from None


def _parse_row(rank: int, row: Sequence[str]) -> list[Op]:
    try:
        return [Op.parse(cell) for cell in row if cell.strip()]
    except ValueError as error:
        raise ValueError(f"row {rank + 1} (rank {rank}): {error}") from None
