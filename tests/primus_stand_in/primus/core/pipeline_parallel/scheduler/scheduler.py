"""What runs a rank's list in Primus (commit fd1eeab): one handler per kind of node."""

from collections.abc import Callable
from typing import Any

from primus.core.pipeline_parallel.scheduler.scheduler_node import FuncType


class ScheduleRunner:
    def __init__(self, handle_func_dict: dict[FuncType, Callable[..., None]]) -> None:
        self.handle_func_dict = handle_func_dict

    def run(self, scheduler_table: list[list[Any]], rank: int) -> None:
        row = scheduler_table[rank]
        for index, node in enumerate(row):
            self.handle_func_dict[node.func_type](node, index, row)
