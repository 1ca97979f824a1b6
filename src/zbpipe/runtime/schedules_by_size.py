"""Which schedule a step runs: the one adopted for its number of microbatches, else one made from the name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.model import CostModel
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import Algorithm
from zbpipe.simulator import passes
from zbpipe.simulator.offloading import Offload
from zbpipe.simulator.offloading import offload as offloaded


@dataclass(eq=False)
class SchedulesBySize:
    """Makes and keeps the schedules of one job, by their number of microbatches; the same on all ranks."""

    algorithm: Algorithm
    placement: Placement
    costs: CostModel | None
    """For the next schedules that are made; None where none are known."""
    limit: MemoryLimit | None
    """What a rank may hold; None for the algorithm's own limit."""
    offload: Offload | None
    transport: Transport
    """What messages wait for."""
    _adopted: dict[int, Schedule] = field(default_factory=dict, init=False)
    _made: dict[int, Schedule] = field(default_factory=dict, init=False)

    @property
    def simulated_costs(self) -> CostModel:
        """The costs, or equal times where none are known."""
        return self.costs or passes.default_costs(self.placement)

    def of(self, number: int, make: Callable[[int], Schedule]) -> Schedule:
        """The schedule of steps with `number` microbatches; `make` makes it if none was adopted or made before."""
        if number in self._adopted:
            return self._adopted[number]
        if number not in self._made:
            self._made[number] = make(number)
        return self._made[number]

    def adopt(self, schedule: Schedule) -> None:
        """From now on, steps with its number of microbatches run `schedule`."""
        self._adopted[schedule.num_microbatches] = schedule

    def use_costs(self, costs: CostModel) -> None:
        """Make schedules for these costs from now on; those that were adopted stay."""
        self.costs = costs
        self._made.clear()

    def make(self, number: int, *, runs_ahead: bool = False) -> Schedule:
        """One for the known costs, perhaps for steps with `zbpipe.OptimizerStep`; ValueError if there is none."""
        made = self.algorithm.make(
            self.placement.num_ranks,
            number,
            stages_per_rank=len(self.placement.stages_on(0)) if self.algorithm.any_stages_per_rank else None,
            costs=self.costs,
            memory_limit=self.limit,
            runs_ahead=runs_ahead,
            transport=self.transport,
        )
        return made if self.offload is None else offloaded(made, self.simulated_costs, what=self.offload)

    def make_to_run_ahead(self, running: Schedule) -> Schedule:
        """`running` made for steps that run ahead; itself if it was adopted, or cannot be made for that."""
        number = running.num_microbatches
        if "runs_ahead" in self.algorithm.keywords and running == self.make(number):
            return self.make(number, runs_ahead=True)
        return running
