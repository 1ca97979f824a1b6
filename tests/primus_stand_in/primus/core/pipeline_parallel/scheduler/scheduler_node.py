"""A node of Primus' tables (commit fd1eeab), with its names."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

FuncType = Enum("FuncType", ["F", "B", "W", "BW", "FB", "SF", "SB", "RF", "RB", "O", "R"])


@dataclass
class SchedulerNode:
    func_type: FuncType
    mini_batch: int
    chunk: int
    args: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
