"""The one data type that everything in zbpipe passes around: a `Schedule` of `Op`s on a `Placement`.

The words are those of `torch.distributed.pipelining`: a *stage* is a global stage index, *F* is a forward, *I* the
backward for the stage's input (dI), *W* the backward for its weights (dW) and *B* both in one. The zero-bubble papers
write B for what is called I here.
"""

from __future__ import annotations

import csv
import io
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import count, pairwise
from operator import index
from typing import NamedTuple, TypeAlias

from zbpipe.schedule import tables
from zbpipe.schedule.event_loop import EventLoop
from zbpipe.schedule.painter import painter

_MOST_SHOWN = 64
"""Ops in the `repr` of a schedule."""

MOST_STAGES = 1024
"""In a schedule that is made by name or planned."""
MOST_WORK = 2**18
"""Microbatches times stages in such a schedule: a table of some megabytes."""


def require_size(what: str, num_stages: int, num_microbatches: int = 1) -> None:
    """Raise ValueError for what would take gigabytes or hours, before anything is made of that size.

    >>> require_size("a plan", num_stages=4096)
    Traceback (most recent call last):
    ValueError: a plan has 4096 stages, but at most 1024 are possible: use fewer
    """
    if num_stages > MOST_STAGES:
        raise ValueError(f"{what} has {num_stages} stages, but at most {MOST_STAGES} are possible: use fewer")
    if num_stages * num_microbatches > MOST_WORK:
        raise ValueError(
            f"{what} has {num_stages} stage(s), and {num_microbatches} microbatches are too many for them: use at most"
            f" {MOST_WORK // num_stages}, or fewer ranks"
        )


def require_whole(least: int | None = None, /, **numbers: object) -> tuple[int, ...]:
    """The numbers as Python's own, such as 4 for numpy.int64(4); ValueError for others, or less than `least`.

    >>> require_whole(1, ranks=2.5)
    Traceback (most recent call last):
    ValueError: ranks has to be a whole number from 1 on, got 2.5
    """
    found = []
    for name, number in numbers.items():
        try:
            value = None if isinstance(number, bool) else index(number)  # type: ignore[arg-type]
        except TypeError:
            value = None
        if value is None or (least is not None and value < least):
            lower = "" if least is None else f" from {least} on"
            raise ValueError(f"{name} has to be a whole number{lower}, got {number!r}")
        found.append(value)
    return tuple(found)


class OpKind(StrEnum):
    """What a rank does in one op; the value is what the text form has for it.

    F is a forward, I the backward for the input, W the backward for the weights, and B a full backward (I and W).

    The others are copies between a rank and its host, parallel to the computations. OF offloads the activations that F
    has left for I (or B), and RF reloads them; OI offloads the deferred gradients that I has left for W, and RI reloads
    them. A copy is in its rank's list where it is issued: it starts when the computation before it is over, and one
    stream for each direction runs the copies in the order of the list.

        >>> OpKind("I") is OpKind.I
        True
    """

    F = "F"
    I = "I"  # noqa: E741 -- torch's letter for the input gradient
    W = "W"
    B = "B"
    OF = "OF"
    RF = "RF"
    OI = "OI"
    RI = "RI"

    __hash__ = str.__hash__  # that of Enum is Python code, and ops are keys everywhere


class Op(NamedTuple):
    """One piece of work: what `kind` of work on which stage for which microbatch. Text form: `3F0`.

    >>> str(Op(stage=3, kind=OpKind.F, microbatch=0))
    '3F0'
    """

    stage: int
    kind: OpKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """The op written as `text`, as torch writes it: stage, kind, microbatch. ValueError for anything else.

        >>> Op.parse("3F0").stage
        3
        """
        action = tables.parse_action(text.strip()) if isinstance(text, str) else None
        if action is None or action[0] is None or action[1] not in KINDS:
            raise ValueError(tables.no_op(text))
        return cls(action[0], KINDS[action[1]], action[2])


KINDS = {kind.value: kind for kind in OpKind}
"""By text form."""

# `inputs` runs for every op, and `OpKind.F` takes longer than all else in it.
F, I, W, B, OF, RF, OI, RI = OpKind  # noqa: E741
new_tuple = tuple.__new__
"""`new_tuple(Op, (0, F, 0))` is `Op(0, F, 0)` in two thirds of the time."""

COMPUTATIONS = (F, I, W, B)
"""The kinds of ops that compute."""
OFFLOADS = (OF, OI)
"""The kinds of copies to the host."""
RELOADS = (RF, RI)
"""The kinds of copies back: of what `OFFLOADS` copies, in this order."""
_COPY_FED_BY = {OF: F, RF: OF, OI: I, RI: OI}
_COPIES_FED = {feeder: copy for copy, feeder in _COPY_FED_BY.items()}
_RELOAD_BEFORE = {I: RF, B: RF, W: RI}


def inputs(op: Op, num_stages: int) -> tuple[tuple[Op, ...], ...]:
    """What has to be over before `op` can start: one op of each group.

    F takes the output of the stage before, W its I; I and B take their own F and the gradient of the stage after,
    which comes from an I or from a B. A copy takes what it copies, and an op whose input was offloaded waits
    for the reload, too: see `reload_before`. This is the rule for all of zbpipe. The planner's flat numbers and the
    bound repeat it for speed, and tests hold them against it.

        >>> [[str(choice) for choice in group] for group in inputs(Op.parse("1I0"), num_stages=4)]
        [['1F0'], ['2I0', '2B0']]
    """
    stage, kind, microbatch = op
    if kind is F:
        return ((new_tuple(Op, (stage - 1, F, microbatch)),),) if stage > 0 else ()
    if kind is W:
        return ((new_tuple(Op, (stage, I, microbatch)),),)
    if kind in _COPY_FED_BY:
        return ((new_tuple(Op, (stage, _COPY_FED_BY[kind], microbatch)),),)
    forward = (new_tuple(Op, (stage, F, microbatch)),)
    if stage == num_stages - 1:
        return (forward,)
    return (forward, (new_tuple(Op, (stage + 1, I, microbatch)), new_tuple(Op, (stage + 1, B, microbatch))))


def users(op: Op, num_stages: int) -> tuple[Op, ...]:
    """The ops that `op` feeds, `inputs` the other way round. Of an I and a B a schedule has one.

    >>> [str(user) for user in users(Op.parse("1I0"), num_stages=4)]
    ['1W0', '0I0', '0B0', '1OI0']
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
    if kind in _COPIES_FED:
        found.append(Op(stage, _COPIES_FED[kind], microbatch))
    return tuple(found)


def reload_before(op: Op) -> Op | None:
    """The copy back from the host for which `op` waits, if the schedule has that copy.

    >>> str(reload_before(Op.parse("3W0"))), str(reload_before(Op.parse("3B0"))), reload_before(Op.parse("3F0"))
    ('3RI0', '3RF0', None)
    """
    kind = _RELOAD_BEFORE.get(op.kind)
    return None if kind is None else Op(op.stage, kind, op.microbatch)


Turn: TypeAlias = tuple[int, Op, list[Op]]
"""A rank, its op, and the ops on which that depends."""


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage: `rank_of[stage]` is a pipeline rank; ranks count from 0 without a gap.

        >>> Placement((0, 1, 1, 0)).stages_on(0)
        (0, 3)

    Raises:
        TypeError: `rank_of` holds no whole numbers.
        ValueError: a rank without a stage.
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        given: object = self.rank_of
        if not isinstance(given, (tuple, list)) or any(type(rank) is not int for rank in given):
            raise TypeError(
                "a placement takes the rank of each stage, for example zbpipe.Placement((0, 1, 1, 0)), got"
                f" {reprlib.repr(given)}"
            )
        ranks = set(given)
        if not ranks or min(ranks) < 0 or max(ranks) >= len(ranks):
            raise ValueError(f"a placement needs a stage on every rank, got the ranks {given}")
        object.__setattr__(self, "rank_of", tuple(given))

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Round and round: stage s on rank s modulo `num_ranks`, with at most 1024 stages.

        >>> Placement.loop(2, stages_per_rank=2).rank_of
        (0, 1, 0, 1)
        """
        _require_placeable(num_ranks, stages_per_rank)
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Down the ranks and up again, in turn; with an even `stages_per_rank` rank 0 has the first and the last stage.

        >>> Placement.v(3).rank_of
        (0, 1, 2, 2, 1, 0)
        """
        _require_placeable(num_ranks, stages_per_rank)
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
        """The stages of one rank, in ascending order; a ValueError if there is no such rank."""
        (rank,) = require_whole(rank=rank)
        if not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank {rank} is outside a placement on {self.num_ranks} ranks: use 0 to {self.num_ranks - 1}"
            )
        return self._stages_by_rank[rank]

    @property
    def hops(self) -> list[tuple[int, int]]:
        """The pairs of ranks (from, to) between which messages go."""
        return sorted({hop for a, b in pairwise(self.rank_of) if a != b for hop in ((a, b), (b, a))})

    def sum_by_rank(self, values: Sequence[float]) -> tuple[float, ...]:
        """By rank, the sum of what its stages have in `values`."""
        return tuple(sum(values[stage] for stage in stages) for stages in self._stages_by_rank)


def _require_placeable(num_ranks: int, stages_per_rank: int) -> None:
    require_whole(1, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    require_size(f"a placement on {num_ranks} ranks with {stages_per_rank} stage(s) each", num_ranks * stages_per_rank)


@dataclass(frozen=True)
class Schedule:
    """For every rank the list of ops that it runs, in order.

    A `Schedule` can be built with any lists of ops at all; `zbpipe.validate` checks them.

        >>> mine = Schedule.from_csv("0F0,0F1,0B0,0B1", name="mine")
        >>> mine
        Schedule('mine', p=1, m=2, ops='0F0 0F1 0B0 0B1')
        >>> mine.ops[0][-1]
        Op(stage=0, kind=<OpKind.B: 'B'>, microbatch=1)

    Raises:
        TypeError: something else than ops in the lists, or another field of the wrong type.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ops: tuple[tuple[Op, ...], ...]
    """One tuple per rank."""

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise TypeError(
                f"schedule {self.name}: the placement has to be a zbpipe.Placement, for example Placement.v(4), got"
                f" {reprlib.repr(self.placement)}"
            )
        if type(self.num_microbatches) is not int:
            raise TypeError(
                f"schedule {self.name}: num_microbatches has to be a whole number, got {self.num_microbatches!r}"
            )
        object.__setattr__(self, "ops", _freeze(self.ops, self.name))

    @property
    def num_ranks(self) -> int:
        return len(self.ops)

    @cached_property
    def computations(self) -> Schedule:
        """The same without copies to the host and back: what torch runs, and whose table torch reads.

        >>> print(*Schedule.from_csv("0F0,0OF0,0RF0,0B0").computations)
        (Op(stage=0, kind=<OpKind.F: 'F'>, microbatch=0), Op(stage=0, kind=<OpKind.B: 'B'>, microbatch=0))
        """
        if all(op.kind in COMPUTATIONS for row in self.ops for op in row):
            return self
        rows = tuple(tuple(op for op in row if op.kind in COMPUTATIONS) for row in self.ops)
        return replace(self, ops=rows)

    @property
    def has_copies(self) -> bool:
        """Whether it offloads anything."""
        return self.computations is not self

    @cached_property
    def order(self) -> tuple[Turn, ...]:
        """Its ops in an order in which ranks can run them, each with its rank and the ops on which it depends.

        Ops that can never run are not in it.

        >>> [str(op) for _, op, _ in Schedule.from_csv("0F0,0B0\\n1F0,1B0").order]
        ['0F0', '1F0', '1B0', '0B0']
        """
        num_stages = self.placement.num_stages
        reloads = {op for row in self.ops for op in row if op.kind in RELOADS}

        def with_reload(op: Op) -> tuple[tuple[Op, ...], ...]:
            needed, reload = inputs(op, num_stages), reload_before(op)
            return (*needed, (reload,)) if reload in reloads else needed

        return tuple(EventLoop(self.ops, with_reload if reloads else lambda op: inputs(op, num_stages)))

    def __iter__(self) -> Iterator[tuple[Op, ...]]:
        return iter(self.ops)

    def __str__(self) -> str:
        """One line per rank: `rank 0: 0F0 0F1 ...`."""
        return "\n".join(f"rank {rank}: {' '.join(map(str, ops))}" for rank, ops in enumerate(self.ops))

    def __repr__(self) -> str:
        """One line, with the ops only if they are few."""
        size = f"{self.name!r}, p={self.num_ranks}, m={self.num_microbatches}"
        num_ops = sum(map(len, self.ops))
        ops = f"ops='{' | '.join(' '.join(map(str, row)) for row in self.ops)}'"
        return f"Schedule({size}, {ops if num_ops <= _MOST_SHOWN else f'{num_ops} ops'})"

    def _repr_html_(self) -> str:
        """The picture with a second for each of F, I and W, in notebooks."""
        page: str = painter().draw_in_notebook(self)
        return page

    def to_csv(self) -> str:
        """The table that torch's `_load_csv(..., format="compute_only")` reads: a row per rank, a cell per op.

        torch does not know copies: of a schedule that has some, it reads the table of `computations`.

        >>> print(zbpipe.generate("1F1B", 2, 2).to_csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
        """
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(self.ops)
        return table.getvalue()

    @classmethod
    def from_csv(cls, table: str, name: str = "csv") -> Schedule:
        """Read a table of computations, or the computations of a table with communication.

        It takes what torch's `_dump_csv` writes in both formats, and the same without stages where each rank has one
        (see `zbpipe.schedule.tables`). Bubbles, sends, receives and gathers of weights are left out: jobs place their
        own, and `zbpipe.simulator.actions.check_table` checks them. Placement and number of microbatches come from the
        table itself: a stage is on the rank in whose row it first appears.

            >>> Schedule.from_csv("0F0,,0B0\\n1F0,1B0").placement.rank_of
            (0, 1)
            >>> print(Schedule.from_csv("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0B1"))
            rank 0: 0F0 0F1 0B0 0B1

        Args:
            table: the text, not the path of a file: `zbpipe.generate` takes that.
            name: of the schedule.

        Raises:
            TypeError: the table is no text.
            ValueError: a cell is no action, a row or the whole table is empty, a stage appears in no row, or there are
                far too few ops for a microbatch that a cell names.
        """
        return cls.from_actions(tables.read(table), name)

    @classmethod
    def from_actions(cls, rows: Sequence[Sequence[tuple[int, str, int]]], name: str) -> Schedule:
        """The ops among the actions (stage, kind, microbatch) of each rank; refused as in `from_csv`."""
        if not rows:
            raise ValueError(f"schedule {name}: the table is empty")
        return cls.from_rows(
            [[Op(stage, KINDS[kind], number) for stage, kind, number in row if kind in KINDS] for row in rows], name
        )

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Op]], name: str) -> Schedule:
        """A schedule from one sequence of ops per rank, with the placement that the ops show; refused as in `from_csv`.

        >>> Schedule.from_rows([[Op(0, OpKind.F, 0), Op(0, OpKind.B, 0)]], name="mine").num_microbatches
        1
        """
        rows = _freeze(rows, name)
        rank_of: dict[int, int] = {}
        for rank, ops in enumerate(rows):
            if not ops:
                raise ValueError(
                    f"schedule {name}: rank {rank} has no ops: leave its row out, or add the ops of its stages"
                )
            for op in ops:
                rank_of.setdefault(op.stage, rank)
        everything = [(rank, op) for rank, ops in enumerate(rows) for op in ops]
        num_stages = next(stage for stage in count() if stage not in rank_of)
        for rank, op in everything:
            if not 0 <= op.stage < num_stages:
                raise ValueError(
                    f"schedule {name}: rank {rank} runs {op}, but no rank runs stage {num_stages}: mend that stage, or"
                    " add the ops of all stages from 0 on"
                )
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
        return cls(name, placement, num_microbatches, rows)


def _freeze(rows: Iterable[Iterable[Op]], name: str) -> tuple[tuple[Op, ...], ...]:
    """The rows as tuples of ops, nothing else: an op whose kind is text would compare as equal and run as another."""
    try:
        frozen = tuple(map(tuple, rows))
    except TypeError:
        raise TypeError(f"schedule {name}: ops has to be one list of ops a rank, got {reprlib.repr(rows)}") from None
    for rank, row in enumerate(frozen):
        for position, op in enumerate(row):
            if fault := _find_fault(op):
                raise TypeError(
                    f"schedule {name}: rank {rank}, position {position} has {op!r:.80}, {fault}: make one with"
                    " zbpipe.Op.parse('3F0')"
                )
    return frozen


def _find_fault(op: object) -> str | None:
    if type(op) is not Op:
        return "which is no zbpipe.Op"
    if type(op.kind) is not OpKind:
        return "whose kind is no zbpipe.OpKind"
    if type(op.stage) is not int or type(op.microbatch) is not int:
        return f"whose {'microbatch' if type(op.stage) is int else 'stage'} is not a Python int"
    return None
