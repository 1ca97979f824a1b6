"""Costs of a job: its stages or layers, their placement, the transport of its messages, and memory limits.

Every function, option and file parses its memory limit by `MemoryLimit`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, floor, inf, log10
from os import PathLike
from typing import Any, Literal, Self

from zbpipe.costs.layers import LayerCosts, merge_stages
from zbpipe.costs.model import ROUNDING, CostModel, Transport, highest
from zbpipe.costs.numbers import number, set_fields
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement

CostsOf = Callable[[Placement], CostModel]
"""Function from a placement to the costs of its stages. It raises ValueError if there are none."""
RELATIVE = (
    "1.2x (times the memory of 1F1B's worst rank under the same costs), '4 microbatches' (of an average rank's share of"
    " the model)"
)
SPELLINGS = (
    f"{RELATIVE}, 6.5GiB (where costs are measured in bytes; also MiB, GB and MB), or a number in the unit of the costs"
)
"""Syntax of a memory limit, as quoted in help texts, errors and docs/costs-file.md."""
_WITHOUT_MEASURING = f"write it as {RELATIVE}, or give measured costs (--costs-file, zbpipe.load_costs)"

_Unit = Literal["", "x", "microbatches", "bytes"]
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_WRITTEN = re.compile(r"\s*(.*?)\s*([kmg]i?b|b|x|microbatch(?:es)?)?\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit of a rank for activations, deferred gradients and working memory.

        >>> MemoryLimit.parse("2KiB")
        MemoryLimit(amount=2048.0, unit='bytes')
        >>> costs = CostModel((1, 1), (1, 1), (1, 1), activations=(3e9, 1e9))
        >>> [MemoryLimit.parse(each).resolve(costs, 2, 8)[0] for each in ("0.5x", "1.5 microbatches", "3GB", 3e9)]
        [3000000000.0, 3000000000.0, 3000000000.0, 3000000000.0]

    - `"1.2x"`: multiple of the peak of 1F1B's worst rank under the same costs;
    - `"4 microbatches"`: multiple of an average rank's activations of one microbatch;
    - `"6.5GiB"`, also `KiB`, `MiB`, `KB`, `MB`, `GB` and `B`: for costs that are measured in bytes;
    - a number in the unit of the costs' activations: bytes if measured, else one microbatch on one rank;
    - a list with one limit per rank, all of one unit.
    """

    amount: float | tuple[float, ...]
    """One number for all ranks, or one per rank. Infinite means no limit."""
    unit: _Unit
    """Unit: that of the costs (empty), the peak of 1F1B's worst rank, an average rank's microbatch, or bytes."""
    written: Any = field(default=None, compare=False, repr=False)
    """The limit as given, for messages and files. `parse` reads it back."""

    def __post_init__(self) -> None:
        if self.written is None:
            given = self.amount
            written = tuple(map(self._write, given)) if isinstance(given, (tuple, list)) else self._write(given)
            set_fields(self, **vars(self._new(written)))

    def _write(self, amount: object) -> object:
        suffix = {"bytes": "B", "microbatches": " microbatches"}.get(self.unit, self.unit)
        return f"{amount}{suffix}" if suffix else amount

    @classmethod
    def parse(cls, given: MemoryLimitLike | None, *, costs_are_known: bool = True) -> Self | None:
        """Parse a limit; None means no limit. Without known costs, units that need them are refused."""
        if given is None:
            return None
        found = given if isinstance(given, cls) else cls._new(given)
        if not costs_are_known and found.unit in ("", "bytes"):
            unit = "in bytes" if found.unit else "in the unit of the costs"
            raise ValueError(
                f"memory_limit = {found.written!r} is {unit}, but no costs are known here: {_WITHOUT_MEASURING}"
            )
        return found

    @classmethod
    def _new(cls, given: object) -> Self:
        if not isinstance(given, (tuple, list)):
            return cls(*_parse(given))
        amounts, units, written = zip(*map(_parse, given), strict=True) if given else ((), (), ())
        if len(set(units)) != 1:
            raise ValueError(f"memory_limit = {given!r} mixes units: write the limits of all ranks in the same unit")
        return cls(amounts, units[0], written)

    def require_ranks(self, ranks: int) -> None:
        if isinstance(self.amount, tuple) and len(self.amount) != ranks:
            raise ValueError(
                f"memory_limit = {self.written!r} has to be one number or one for each rank, got {len(self.amount)} for"
                f" {ranks} ranks"
            )

    def resolve(self, costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> tuple[float, ...]:
        """Memory limit of each rank, in the unit of the costs' activations. ValueError if the costs do not give it."""
        self.require_ranks(ranks)
        amounts = self.amount if isinstance(self.amount, tuple) else (self.amount,) * ranks
        factor = self._factor(costs, ranks, microbatches) if self.unit else 1.0
        return tuple(inf if amount == inf else amount * factor for amount in amounts)

    @contextmanager
    def explain(self, costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> Iterator[None]:
        """Convert the error for a limit that is too small to the unit of this limit."""
        try:
            yield
        except LimitTooSmallError as error:
            if not self.unit:
                raise
            first = self.written[0] if isinstance(self.written, tuple) else self.written
            match = _WRITTEN.fullmatch(str(first))
            assert match is not None, "it was parsed"
            suffix = match[2]
            factor = _BYTES.get(suffix.lower()) or self._factor(costs, ranks, microbatches)
            if not factor:  # F keeps nothing, and only working memory is too large
                raise
            suffix = f" {suffix}" if self.unit == "microbatches" else suffix

            def spell(amount: float) -> str:
                digits = 3 - floor(log10(amount)) if amount > 0 else 0
                return f"{ceil(amount * 10.0**digits * (1 - 1e-9)) / 10.0**digits:.6g}{suffix}"

            raise LimitTooSmallError(*(spell(each / factor) for each in error.args[:2]), *error.args[2:]) from None

    def _factor(self, costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> float:
        if self.unit == "x":
            try:
                return memory_of_1f1b(costs, ranks, microbatches)
            except ValueError as error:
                raise ValueError(
                    f"memory_limit = {self.written!r} is a multiple of 1F1B's memory, which these costs do not give:"
                    f" {error}; write it in another form"
                ) from None
        known = costs if isinstance(costs, CostModel) else one_stage_a_rank(costs, ranks)
        if self.unit == "microbatches":
            return sum(known.alike.activations) / ranks
        if not known.in_bytes:
            raise ValueError(
                f"memory_limit = {self.written!r} is in bytes, but nothing here was measured in bytes:"
                f" {_WITHOUT_MEASURING}"
            )
        return 1.0


AS_1F1B = MemoryLimit(1.0, "x", "1x")
"""Default limit of `ZB`, `ZBLoop` and `Auto`, unless their step would be longer than Interleaved1F1B's."""


def resolve_limits(
    limit: MemoryLimit | None, placement: Placement, costs: CostModel, microbatches: int, strict_for: str = ""
) -> tuple[float, ...]:
    """Memory limit of each rank: the given one, or the peak of 1F1B's worst rank, or what one microbatch needs.
    ValueError if the given limit is too small for one microbatch of the schedule `strict_for`."""
    limits = (limit or AS_1F1B).resolve(costs, placement.num_ranks, microbatches)
    if limit and strict_for:
        with limit.explain(costs, placement.num_ranks, microbatches):
            require_room(placement, costs, limits, f" for {strict_for}")
    return tuple(map(max, limits, least_room(placement, costs)))


MemoryLimitLike = MemoryLimit | float | str | Sequence[float | str]


def one_stage_a_rank(costs: CostModel | LayerCosts | CostsOf, ranks: int) -> CostModel:
    """Costs of 1F1B's stages: joined neighbouring stages, or TorchTitan's even split of the layers."""
    if isinstance(costs, CostModel):
        return merge_stages(costs, ranks)
    return (costs.even if isinstance(costs, LayerCosts) else costs)(Placement.loop(ranks))


def memory_of_1f1b(costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> float:
    """The peak memory of 1F1B's worst rank, in the unit of the costs.

    >>> memory_of_1f1b(CostModel.uniform, 4, 8)
    4.0
    """
    of_ranks = one_stage_a_rank(costs, ranks)

    # The peak is in the warm-up, or in the first backward after it.
    kinds = ([*[OpKind.F] * min(ranks - rank, microbatches), OpKind.B] for rank in range(ranks))
    return max(highest(of_ranks, [(rank, kind) for kind in row]) for rank, row in enumerate(kinds))


def _parse(given: object) -> tuple[float, _Unit, object]:
    """The amount, its unit, and its form in files (which have no infinite numbers)."""
    match = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    suffix = (match[2] or "").lower() if match else ""
    refusal = f"memory_limit = {given!r} is not a number: write {SPELLINGS}"
    try:
        amount = float(match[1]) if match else number(given, refusal)
    except ValueError:
        amount = -1.0
    if not amount >= 0:
        raise ValueError(f"memory_limit = {given!r} is not an amount: write {SPELLINGS}")
    if suffix in _BYTES:
        return amount * _BYTES[suffix], "bytes", given
    unit: _Unit = "x" if suffix == "x" else "microbatches" if suffix else ""
    return amount, unit, given if isinstance(given, (str, int)) else "inf" if amount == inf else amount


def least_room(placement: Placement, costs: CostModel) -> tuple[float, ...]:
    """Peak memory of each rank for one microbatch that runs alone, in the unit of `costs.activations`. It is the peak
    of F of all stages, then each backward. No other order needs less."""

    def peak(stages: tuple[int, ...]) -> float:
        backward = [(stage, kind) for stage in reversed(stages) for kind in costs.least_backward(stage)]
        return highest(costs, [*((stage, OpKind.F) for stage in stages), *backward])

    return tuple(map(peak, map(placement.stages_on, range(placement.num_ranks))))


class LimitTooSmallError(ValueError):
    """A memory limit cannot hold even one microbatch. Arguments, which pickle copies: the limit and the least
    sufficient one (numbers, or text in the user's unit), the rank, and an addition to the message."""

    def __str__(self) -> str:
        limit, least, rank, more = self.args
        limit, least = (each if isinstance(each, str) else f"{each:.12g}" for each in (limit, least))
        return (
            f"memory_limit = {limit} is too small{more}: one microbatch peaks at {least} on rank {rank}; give at least"
            " that, or cut the batch into more microbatches"
        )


def require_room(placement: Placement, costs: CostModel, limits: Sequence[float], more: str = "") -> None:
    """Raise LimitTooSmallError, with `more` in its message, if a rank's limit is too small for one microbatch."""
    least = least_room(placement, costs)
    if short := [rank for rank, needed in enumerate(least) if not limits[rank] >= needed * (1 - ROUNDING)]:
        rank = max(short, key=least.__getitem__)
        raise LimitTooSmallError(limits[rank], least[rank], rank, more)


def most_room(placement: Placement, costs: CostModel, num_microbatches: int) -> tuple[float, ...]:
    """Upper bound of each rank's memory in any order of its ops, in the unit of `costs.activations`."""

    def most(stages: tuple[int, ...]) -> float:
        kept = sum(max(costs.of(stage, OpKind.F).adds, costs.of(stage, OpKind.W).frees) for stage in stages)
        return num_microbatches * kept + max(costs.of(stage, kind).needs for stage in stages for kind in COMPUTATIONS)

    return tuple(most(placement.stages_on(rank)) for rank in range(placement.num_ranks))


ENOUGH = 0.8
"""Warn below this share of weight gradients in W."""


@dataclass(frozen=True)
class JobCosts:
    """Costs as `zbpipe.Profiler` measures them, a cost file stores them, and `zbpipe.plan` takes them.

        >>> stages = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(2e9, 1e9))
        >>> job = JobCosts(stages, Placement.loop(2), memory_limit=4e9, transport="one queue")
        >>> job.transport
        <Transport.ONE_QUEUE: 'one queue'>

    Raises TypeError or ValueError for invalid fields, and for those that do not fit the placement.
    """

    costs: CostModel | LayerCosts
    """Costs of the stages, or of the layers from which stages are cut."""
    placement: Placement | None = None
    """Placement of the stages, if the costs are those of one placement."""
    memory_limit: MemoryLimitLike | None = None
    """Memory limit of each rank, a `MemoryLimit` once parsed. None means no limit."""
    transport: Transport | None = None
    """Transport of messages, None if unknown."""

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "costs": ((CostModel, LayerCosts), "a zbpipe.CostModel or zbpipe.costs.LayerCosts"),
            "placement": ((Placement, type(None)), "a zbpipe.Placement, or None"),
            "transport": ((str, type(None)), f"one of {Transport.names()}, or None"),
        }
        for name, (kind, expected) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"a job cannot have {name} = {value!r}: give {expected}")
        transport = None if self.transport is None else Transport.parse(self.transport)
        set_fields(self, memory_limit=MemoryLimit.parse(self.memory_limit), transport=transport)
        if self.placement is None:
            return
        placed = f"rank_of = {list(self.placement.rank_of)} places"
        if isinstance(self.costs, LayerCosts):
            raise ValueError(f"{placed} stages, but the costs are of layers: omit the placement")
        if self.placement.num_stages != self.costs.num_stages:
            raise ValueError(
                f"{placed} {self.placement.num_stages} stages, but the costs are of {self.costs.num_stages}"
            )
        self.require_ranks(self.placement.num_ranks)

    def require_ranks(self, ranks: int) -> None:
        """Raise for a placement or limits with another number of ranks, and for links to unknown ranks."""
        if self.placement is not None and self.placement.num_ranks != ranks:
            raise ValueError(
                f"the costs have the placement rank_of = {list(self.placement.rank_of)}, which is for"
                f" {self.placement.num_ranks} ranks, got {ranks}: use {self.placement.num_ranks}, or omit"
                " the placement from the costs"
            )
        if limit := MemoryLimit.parse(self.memory_limit):
            limit.require_ranks(ranks)
        for sender, receiver in self.costs.links:
            if max(sender, receiver) >= ranks:
                raise ValueError(f"links has one from {sender} to {receiver}, but the ranks are 0 to {ranks - 1}")

    def on(self, placement: Placement) -> CostModel:
        """Costs of the stages on a placement. Layers are split evenly, as in TorchTitan."""
        if isinstance(self.costs, LayerCosts):
            return self.costs.even(placement)
        return as_cost_model(self.costs, placement)


def as_cost_model(
    costs: CostModel | JobCosts | Sequence[float], placement: Placement, microbatches: int | None = None
) -> CostModel:
    """`costs` itself, those of a job on this placement, or for `(f, i, w)` equal costs on every rank. ValueError for
    another number of stages, or of `microbatches` that have sizes."""
    if isinstance(costs, JobCosts):
        costs = costs.on(placement)
    if isinstance(costs, CostModel):
        costs.require_microbatches(microbatches or len(costs.sizes))
        if costs.num_stages != placement.num_stages:
            raise ValueError(
                f"the costs are for {costs.num_stages} stages, but the placement has {placement.num_stages}: give one"
                " number per stage"
            )
        return costs
    # A TypeError with the way out, for untyped values from callers.
    numbers = tuple(costs) if isinstance(costs, (tuple, list)) else ()
    if len(numbers) != 3 or not all(isinstance(each, (int, float)) and type(each) is not bool for each in numbers):
        if isinstance(costs, (str, PathLike)):
            raise TypeError(f"costs = {costs!r} names a file: read it with zbpipe.load_costs({str(costs)!r})")
        raise TypeError(
            "costs have to be a zbpipe.CostModel, a zbpipe.costs.JobCosts, or three numbers (f, i, w), for example"
            f" (1, 1, 1), got {costs!r}; zbpipe.plan also takes zbpipe.costs.LayerCosts"
        )
    return CostModel.uniform(placement, *numbers)
