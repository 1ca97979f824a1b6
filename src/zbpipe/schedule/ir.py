"""The data type that everything in zbpipe passes around: a `Schedule` of `Op`s on a `Placement`.

In the words of `torch.distributed.pipelining`, a *stage* is a global stage index, *F* a forward, *I* the backward for
the stage's input (dI), *W* the backward for its weights (dW) and *B* both in one. The zero-bubble papers write B for I.
"""

from __future__ import annotations

import csv
import io
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, count, pairwise
from operator import index
from typing import NamedTuple

from zbpipe.schedule import tables
from zbpipe.schedule.graph import Graph

_MOST_SHOWN = 64

MOST_STAGES, MOST_WORK = 1024, 2**18
"""Limits of a named or planned schedule: stages, and stages times microbatches."""


def require_size(what: str, num_stages: int, num_microbatches: int = 1) -> None:
    """Raise ValueError for sizes that would take gigabytes or hours, before anything of that size is made."""
    if num_stages > MOST_STAGES:
        raise ValueError(f"{what} has {num_stages} stages, but at most {MOST_STAGES} are possible: use fewer")
    if num_stages * num_microbatches > MOST_WORK:
        raise ValueError(
            f"{what} has {num_stages} stage(s), and {num_microbatches} microbatches are too many for them: use at most"
            f" {MOST_WORK // num_stages}, or fewer ranks"
        )


def count_noun(count: int, thing: str) -> str:
    """A count with its noun: `1 rank`, `8 microbatches`."""
    plural = "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{'' if count == 1 else plural}"


def require_whole(least: int | None = None, /, **numbers: object) -> tuple[int, ...]:
    """The numbers as ints, such as 4 for numpy.int64(4). ValueError for others, or less than `least`.

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
    """The work of one op. The value is its text form.

    F is a forward, I the backward for the input, W the backward for the weights, and B a full backward (I and W).

    The others are copies between a rank and its host, parallel to the computations. OF offloads the activations that F
    left for I (or B), OI the deferred gradients that I left for W. RF and RI reload them. A copy starts when the
    computation before it in the list ends. One stream per direction runs the copies in the list's order.

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

    __hash__ = str.__hash__  # Enum's hash is Python code, and ops are keys everywhere


class Op(NamedTuple):
    """One piece of work: the `kind` of work, its stage and its microbatch. Text form: `3F0`.

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
        """The op with this text in torch's form: stage, kind, microbatch. ValueError for any other text.

        >>> Op.parse("3F0").stage
        3
        """
        action = tables.parse_action(text.strip()) if isinstance(text, str) else None
        if action is None or action[1] not in KINDS:
            raise ValueError(tables.no_op(text))
        return cls(action[0], KINDS[action[1]], action[2])


KINDS = {kind.value: kind for kind in OpKind}

# `inputs` runs for every op, and `OpKind.F` takes longer than all the rest of it.
F, I, W, B, OF, RF, OI, RI = OpKind  # noqa: E741
new_tuple = tuple.__new__
"""`new_tuple(Op, (0, F, 0))` is `Op(0, F, 0)` in two thirds of the time."""

COMPUTATIONS = (F, I, W, B)
OFFLOADS, RELOADS = (OF, OI), (RF, RI)
"""The kinds of copies to the host, and back, in the same order."""
_COPY_FED_BY = {OF: F, RF: OF, OI: I, RI: OI}
_RELOAD_BEFORE = {I: RF, B: RF, W: RI}
_LANE = {**dict.fromkeys(COMPUTATIONS, 0), **dict.fromkeys(OFFLOADS, 1), **dict.fromkeys(RELOADS, 2)}
"""A rank runs one op at a time in each lane: computations, copies to the host, copies back."""


def inputs(op: Op, num_stages: int) -> tuple[tuple[Op, ...], ...]:
    """Dependencies of `op`: one op of each group has to be over before it can start.

    F takes the output of the previous stage, W its I. I and B take their own F and the gradient of the next stage, from
    an I or a B. A copy takes the copied tensors. For reloads see `reload_before`. The planner's flat numbers and the
    lower bound repeat this rule for speed; tests compare them.

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


def reload_before(op: Op) -> Op | None:
    """The reload for which `op` waits, if the schedule has it."""
    kind = _RELOAD_BEFORE.get(op.kind)
    return None if kind is None else Op(op.stage, kind, op.microbatch)


@dataclass(frozen=True)
class Placement:
    """Placement of stages: `rank_of[stage]` is a pipeline rank. Ranks count from 0 without gaps.

        >>> Placement((0, 1, 1, 0)).stages_on(0)
        (0, 3)

    TypeError for values other than integers, ValueError for a rank without a stage.
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
        """Loop placement: stage s on rank s modulo `num_ranks`, with at most 1024 stages.

        >>> Placement.loop(2, stages_per_rank=2).rank_of
        (0, 1, 0, 1)
        """
        _require_placeable(num_ranks, stages_per_rank)
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Down and up the ranks alternately. With even `stages_per_rank`, rank 0 has the first and last stage.

        >>> Placement.v(3).rank_of
        (0, 1, 2, 2, 1, 0)
        """
        _require_placeable(num_ranks, stages_per_rank)
        down = tuple(range(num_ranks))
        return cls(tuple(rank for leg in range(stages_per_rank) for rank in (down, down[::-1])[leg % 2]))

    @classmethod
    def wave(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Like `v` for even `stages_per_rank`, and a loop for odd ones."""
        return (cls.loop if stages_per_rank % 2 else cls.v)(num_ranks, stages_per_rank)

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
        """The stages of one rank, in ascending order. ValueError if there is no such rank."""
        (rank,) = require_whole(rank=rank)
        if not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank {rank} is outside a placement on {self.num_ranks} ranks: use 0 to {self.num_ranks - 1}"
            )
        return self._stages_by_rank[rank]

    @property
    def hops(self) -> list[tuple[int, int]]:
        """The pairs of ranks (from, to) that exchange messages."""
        return sorted({hop for a, b in pairwise(self.rank_of) if a != b for hop in ((a, b), (b, a))})

    def sum_by_rank(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[stage] for stage in stages) for stages in self._stages_by_rank)


def _require_placeable(num_ranks: int, stages_per_rank: int) -> None:
    require_whole(1, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    each = f"{num_ranks} ranks with {count_noun(stages_per_rank, 'stage')} each"
    require_size(f"a placement on {each}", num_ranks * stages_per_rank)


@dataclass(frozen=True)
class Schedule:
    """A list of ops for each rank, in the order in which they run. `zbpipe.validate` checks them.

        >>> mine = Schedule.from_csv("0F0,0F1,0B0,0B1", name="mine")
        >>> mine
        Schedule('mine', p=1, m=2, ops='0F0 0F1 0B0 0B1')
        >>> mine.ops[0][-1]
        Op(stage=0, kind=<OpKind.B: 'B'>, microbatch=1)

    TypeError for lists with values other than ops, ValueError for fewer lists than ranks.
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
        if len(self.ops) < self.placement.num_ranks:
            raise ValueError(
                f"schedule {self.name}: ops has to be one list of ops per rank, got {len(self.ops)} for"
                f" {self.placement.num_ranks} ranks"
            )

    @property
    def num_ranks(self) -> int:
        return len(self.ops)

    @cached_property
    def kinds(self) -> frozenset[OpKind]:
        return frozenset(op.kind for row in self.ops for op in row)

    @cached_property
    def computations(self) -> Schedule:
        """The schedule without copies to the host and back. torch runs it and reads its table.

        >>> Schedule.from_csv("0F0,0OF0,0RF0,0B0").computations
        Schedule('csv', p=1, m=1, ops='0F0 0B0')
        """
        if self.kinds.issubset(COMPUTATIONS):
            return self
        rows = tuple(tuple(op for op in row if op.kind in COMPUTATIONS) for row in self.ops)
        return replace(self, ops=rows)

    @property
    def has_copies(self) -> bool:
        return self.computations is not self

    @cached_property
    def graph(self) -> Graph[tables.Cell]:
        """What its ops wait for. The nodes are the ops, rank by rank, then the messages, named like torch's sends.

        An op waits for the previous one of its rank and for its `inputs`, a copy for the computation before it and the
        previous copy in its direction. An op that cannot run, or is doubled, waits for itself.

        >>> graph = Schedule.from_csv("0F0,0B0\n1F0,1B0").graph
        >>> ["".join(map(str, graph.nodes[each])) for each in graph.order]
        ['0F0', '0SEND_F0', '1F0', '1B0', '1SEND_B0', '0B0']
        """
        rank_of, num_stages, has_copies = self.placement.rank_of, self.placement.num_stages, self.has_copies
        ops = list(chain.from_iterable(self.ops))
        number: dict[tables.Cell, int] = dict(zip(ops, count(), strict=False))
        needed: dict[tuple[int, str], list[list[tuple[int, str]]]] = {
            (stage, kind): [[each[:2] for each in group] for group in inputs(Op(stage, kind, 0), num_stages)]
            for stage in range(num_stages)
            for kind in self.kinds
        }
        before: list[list[int]] = []
        messages: list[tables.Cell] = []
        givers: list[list[int]] = []
        for rank, row in enumerate(self.ops):
            first, last = len(before), [-1, -1, -1]
            for stage, kind, microbatch in row:
                place, lane = len(before), _LANE[kind]
                waits = [last[0]] if last[0] >= 0 else []
                # An op of an unknown stage waits for one of no ops.
                for group in needed.get((stage, kind), ((),)):
                    for giver_stage, giver_kind in group:
                        giver = number.get((giver_stage, giver_kind, microbatch))
                        if giver is not None:
                            break
                    else:
                        waits.append(place)
                        continue
                    if rank_of[giver_stage] != rank:
                        waits.append(len(ops) + len(messages))
                        messages.append((giver_stage, "SEND_F" if giver_kind is F else "SEND_B", microbatch))
                        givers.append([giver])
                    elif lane or not first <= giver < place:  # else it is before the previous op
                        waits.append(giver)
                if has_copies:
                    if lane and last[lane] >= 0:
                        waits.append(last[lane])
                    if kind in _RELOAD_BEFORE and (stage, _RELOAD_BEFORE[kind], microbatch) in number:
                        waits.append(number[stage, _RELOAD_BEFORE[kind], microbatch])
                last[lane] = place
                before.append(waits)
        if len(number) < len(ops):
            before = [
                [place] if number[op] != place else waits
                for place, (op, waits) in enumerate(zip(ops, before, strict=True))
            ]
        return Graph([*ops, *messages], before + givers)

    def __iter__(self) -> Iterator[tuple[Op, ...]]:
        return iter(self.ops)

    def __str__(self) -> str:
        """One line per rank: `rank 0: 0F0 0F1 ...`."""
        return "\n".join(f"rank {rank}: {' '.join(map(str, ops))}" for rank, ops in enumerate(self.ops))

    def __repr__(self) -> str:
        size = f"{self.name!r}, p={self.num_ranks}, m={self.num_microbatches}"
        num_ops = sum(map(len, self.ops))
        ops = f"ops='{' | '.join(' '.join(map(str, row)) for row in self.ops)}'"
        return f"Schedule({size}, {ops if num_ops <= _MOST_SHOWN else f'{num_ops} ops'})"

    def to_csv(self) -> str:
        """The table of `computations` that torch's `_load_csv(..., format="compute_only")` reads: a row per rank.

        >>> print(zbpipe.generate("1F1B", 2, 2).to_csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
        """
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(self.ops)
        return table.getvalue()

    @classmethod
    def from_csv(cls, table: str, name: str = "csv") -> Schedule:
        """Read the text of a table of computations, or the computations of a table with communication.

        It reads both formats of torch's `_dump_csv`. Bubbles, sends, receives and gathers are omitted, because jobs
        place their own. A stage is on the rank in whose row it first appears.

            >>> Schedule.from_csv("0F0,,0B0\\n1F0,1B0").placement.rank_of
            (0, 1)
            >>> print(Schedule.from_csv("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0B1"))
            rank 0: 0F0 0F1 0B0 0B1

        TypeError if the table is not a string. ValueError if a cell is not an action, a row or the table is empty, no
        row has a stage, or there are far too few ops for a microbatch that a cell names.
        """
        return cls.from_actions(tables.read(table), name)

    @classmethod
    def from_actions(cls, rows: Sequence[Sequence[tuple[int, str, int]]], name: str) -> Schedule:
        """The ops among the actions (stage, kind, microbatch) of each rank. Raises as `from_csv` does."""
        return cls.from_rows(
            [[Op(stage, KINDS[kind], number) for stage, kind, number in row if kind in KINDS] for row in rows], name
        )

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Op]], name: str) -> Schedule:
        """A schedule from one sequence of ops per rank, with the placement from the ops. Raises as `from_csv` does."""
        rows = _freeze(rows, name)
        if not rows:
            raise ValueError(f"schedule {name}: the table is empty")
        rank_of: dict[int, int] = {}
        for rank, ops in enumerate(rows):
            if not ops:
                raise ValueError(f"schedule {name}: rank {rank} has no ops: omit its row, or add the ops of its stages")
        everything = [(rank, op) for rank, ops in enumerate(rows) for op in ops]
        for rank, op in everything:
            rank_of.setdefault(op.stage, rank)
        num_stages = next(stage for stage in count() if stage not in rank_of)
        for rank, op in everything:
            if not 0 <= op.stage < num_stages:
                raise ValueError(
                    f"schedule {name}: rank {rank} runs {op}, but no rank runs stage {num_stages}: correct that stage,"
                    " or add the ops of all stages from 0 on"
                )
            if op.microbatch < 0:
                raise ValueError(f"schedule {name}: rank {rank} runs {op}, but microbatches count from 0")
        rank, last = max(everything, key=lambda each: each[1].microbatch)
        num_microbatches = last.microbatch + 1
        # Otherwise all missing ops would be listed, and one wrong cell can make that list endless.
        if num_stages * num_microbatches > len(everything):
            raise ValueError(
                f"schedule {name}: rank {rank} runs {last}, but {len(everything)} op(s) are far too few for"
                f" {num_microbatches} microbatches on {num_stages} stage(s): correct that microbatch, or add the"
                " missing ops"
            )
        placement = Placement(tuple(rank_of[stage] for stage in range(num_stages)))
        return cls(name, placement, num_microbatches, rows)


def _freeze(rows: Iterable[Iterable[Op]], name: str) -> tuple[tuple[Op, ...], ...]:
    """The rows as tuples of ops. An op whose kind is text would compare as equal but run as another."""
    try:
        frozen = tuple(map(tuple, rows))
    except TypeError:
        raise TypeError(f"schedule {name}: ops has to be one list of ops per rank, got {reprlib.repr(rows)}") from None
    for rank, row in enumerate(frozen):
        for position, op in enumerate(row):
            if type(op) is Op and type(op.kind) is OpKind and type(op.stage) is type(op.microbatch) is int:
                continue
            fault = "which is not a zbpipe.Op"
            if type(op) is Op and type(op.kind) is not OpKind:
                fault = "whose kind is not a zbpipe.OpKind"
            elif type(op) is Op:
                fault = f"whose {'microbatch' if type(op.stage) is int else 'stage'} is not a Python int"
            raise TypeError(
                f"schedule {name}: rank {rank}, position {position} has {op!r:.80}, {fault}: make one with"
                " zbpipe.Op.parse('3F0')"
            )
    return frozen
