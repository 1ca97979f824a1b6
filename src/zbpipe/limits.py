"""A memory limit as people write it: in the unit of the costs, as a multiple of what 1F1B holds, or in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from zbpipe.costs import MOST, is_amount

_UNITS = {"": 1.0, "x": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}


@dataclass(frozen=True)
class Limit:
    """What one rank may hold.

    >>> Limit.parse("1.2x"), Limit.parse("2KiB").amount
    (Limit(amount=1.2, unit='x', text='1.2x'), 2048.0)
    """

    amount: float
    unit: Literal["", "x", "bytes"]
    """Of the costs, of what 1F1B's worst rank holds under the same costs, or bytes."""
    text: str
    """As it was written."""

    @classmethod
    def parse(cls, text: str) -> Limit:
        """The limit that is written so.

        Raises:
            ValueError: it is none.
        """
        match = re.fullmatch(r"\s*(.*?)\s*([kmg]i?b|x)?\s*", text, re.IGNORECASE)
        number, suffix = match.groups() if match else (text, None)
        suffix = (suffix or "").lower()
        try:
            amount = float(number) * _UNITS[suffix]
        except ValueError:
            amount = -1.0
        if not is_amount(amount):
            raise ValueError(
                f"{text!r} is no amount; write a number from zero to {MOST:g}, for example 5.5, or a multiple of 1F1B's"
                " memory, for example 1.0x"
            )
        return cls(amount, "x" if suffix == "x" else "bytes" if suffix else "", text)
