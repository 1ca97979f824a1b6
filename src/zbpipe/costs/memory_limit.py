"""The one type for memory limits: every function, option and file parses its limit here, once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, floor, inf, log10
from typing import Any, Literal, Self

from zbpipe.costs.baseline import CostsOf, memory_of_1f1b, one_stage_a_rank
from zbpipe.costs.layers import LayerCosts
from zbpipe.costs.model import CostModel, LimitTooSmallError, number

RELATIVE = (
    "1.2x (times what 1F1B's worst rank holds under the same costs), '4 microbatches' (of an average rank's share of"
    " the model)"
)
SPELLINGS = (
    f"{RELATIVE}, 6.5GiB (where costs are measured in bytes; also MiB, GB and MB), or a number in the unit of the costs"
)
"""How a memory limit is written. Help texts, errors and docs/costs-file.md say it in these words."""
_WITHOUT_MEASURING = f"write it as {RELATIVE}, or give measured costs (--costs-file, zbpipe.load_costs)"

_Unit = Literal["", "x", "microbatches", "bytes"]
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_WRITTEN = re.compile(r"\s*(.*?)\s*([kmg]i?b|x|microbatch(?:es)?)?\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class MemoryLimit:
    """What one rank may hold of activations, with what ops need while they run.

    It is written as one of

    - `"1.2x"`: times what 1F1B's worst rank holds under the same costs;
    - `"4 microbatches"`: of what F keeps of one microbatch on an average rank, of which 1F1B on p ranks holds p;
    - `"6.5GiB"`, also `KiB`, `MiB`, `KB`, `MB` and `GB`: where the costs are measured in bytes;
    - a number in the unit of the costs' activations: bytes where they are measured, else a rank's share of one
      microbatch. A job that knows no costs refuses a bare number.

    A list has one of these, all of one unit, for each rank.

        >>> MemoryLimit.parse("2KiB")
        MemoryLimit(amount=2048.0, unit='bytes')
        >>> costs = CostModel((1, 1), (1, 1), (1, 1), activations=(3e9, 1e9))
        >>> [MemoryLimit.parse(each).resolve(costs, 2, 8)[0] for each in ("0.5x", "1.5 microbatches", "3GB", 3e9)]
        [3000000000.0, 3000000000.0, 3000000000.0, 3000000000.0]
    """

    amount: float | tuple[float, ...]
    """One for all ranks, or one for each; infinite where there is no limit."""
    unit: _Unit
    """Of the costs (empty), of what 1F1B's worst rank holds, of an average rank's microbatch, or bytes."""
    written: Any = field(default=None, compare=False, repr=False)
    """As it was given, for messages and files; `parse` takes it back."""

    @classmethod
    def parse(cls, given: MemoryLimitLike | None, *, costs_are_known: bool = True) -> Self | None:
        """The limit that is written so; None is no limit. Without known costs, units that need some are refused."""
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
            raise ValueError(f"memory_limit = {given!r} has to have one unit: write a limit for each rank in the same")
        return cls(amounts, units[0], written)

    def require_ranks(self, ranks: int) -> None:
        """Refuse a list with another number of limits."""
        if isinstance(self.amount, tuple) and len(self.amount) != ranks:
            raise ValueError(
                f"memory_limit = {self.written!r} has to be one number or one for each rank, got {len(self.amount)} for"
                f" {ranks} ranks"
            )

    def resolve(self, costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> tuple[float, ...]:
        """By rank what it may hold, in the unit of the costs' activations.

        Raises:
            ValueError: another number of limits than ranks, bytes where nothing is measured in bytes, or a multiple of
                1F1B's memory for stages that cannot be shared equally by the ranks.
        """
        self.require_ranks(ranks)
        amounts = self.amount if isinstance(self.amount, tuple) else (self.amount,) * ranks
        factor = self._factor(costs, ranks, microbatches) if self.unit else 1.0
        return tuple(amount * factor for amount in amounts)

    @contextmanager
    def explain(self, costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> Iterator[None]:
        """Report a limit that is too small in the unit in which this one is written."""
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
            gap = " " if self.unit == "microbatches" else ""
            raise LimitTooSmallError(
                *error.parts, lambda amount: f"{_round_up(amount / factor):.6g}{gap}{suffix}"
            ) from None

    def _factor(self, costs: CostModel | LayerCosts | CostsOf, ranks: int, microbatches: int) -> float:
        if self.unit == "x":
            try:
                return memory_of_1f1b(costs, ranks, microbatches)
            except ValueError as error:
                raise ValueError(
                    f"memory_limit = {self.written!r} is a multiple of 1F1B's memory, which these costs do not show:"
                    f" {error}; write it in another way"
                ) from None
        known = costs if isinstance(costs, CostModel) else one_stage_a_rank(costs, ranks)
        if self.unit == "microbatches":
            return sum(known.activations) / ranks
        if not known.in_bytes:
            raise ValueError(
                f"memory_limit = {self.written!r} is in bytes, but nothing here was measured in bytes:"
                f" {_WITHOUT_MEASURING}"
            )
        return 1.0


LEEWAY = 1.02
"""The factor by which limits are above what 1F1B takes. I needs a little more than B while it runs, without
checkpointing, too: with no leeway, no W could wait on a rank that is full."""
AS_1F1B = MemoryLimit(LEEWAY, "x", f"{LEEWAY}x")
"""What lean schedules and `Auto` hold if nobody gives a limit."""

MemoryLimitLike = MemoryLimit | float | str | Sequence[float | str]
"""How callers give one."""


def _round_up(amount: float) -> float:
    """The amount with four digits, no less."""
    digits = 3 - floor(log10(amount)) if amount > 0 else 0
    return ceil(amount * 10.0**digits * (1 - 1e-9)) / 10.0**digits


def _parse(given: object) -> tuple[float, _Unit, object]:
    """The amount, its unit, and how files have it, which know no infinite numbers."""
    match = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    suffix = (match[2] or "").lower() if match else ""
    refusal = f"memory_limit = {given!r} is no number: write {SPELLINGS}"
    try:
        amount = float(match[1]) if match else number(given, refusal)
    except ValueError:
        amount = -1.0
    if not amount >= 0:
        raise ValueError(f"memory_limit = {given!r} is no amount: write {SPELLINGS}")
    if suffix in _BYTES:
        return amount * _BYTES[suffix], "bytes", given
    unit: _Unit = "x" if suffix == "x" else "microbatches" if suffix else ""
    return amount, unit, given if isinstance(given, (str, int)) else "inf" if amount == inf else amount
