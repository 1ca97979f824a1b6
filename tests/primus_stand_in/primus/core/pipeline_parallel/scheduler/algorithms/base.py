"""The class that Primus' schedules (commit fd1eeab) have in common."""

from abc import ABC, abstractmethod
from typing import Any

from primus.core.pipeline_parallel.scheduler.scheduler_node import FuncType, SchedulerNode


class PipelineScheduleAlgo(ABC):
    def __init__(self, pp_size: int, vpp_size: int, micro_batches: int) -> None:
        self.pp_size, self.vpp_size, self.micro_batches = pp_size, vpp_size, micro_batches

    @abstractmethod
    def generate_schedule_table(self) -> list[list[SchedulerNode]]: ...

    @abstractmethod
    def direction_map(self, rank: int, chunk: int, func_type: FuncType) -> dict[str, Any]: ...
