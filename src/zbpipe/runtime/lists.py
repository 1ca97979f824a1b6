"""The lists of a job's steps, one schedule for each number of microbatches, and the transport."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zbpipe.costs.job import MemoryLimit
from zbpipe.costs.model import CostModel, Receives, Transport
from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.schedule.garbage import without_collections
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import Algorithm
from zbpipe.simulator import passes
from zbpipe.simulator.offloading import Offload
from zbpipe.simulator.offloading import offload as offloaded
from zbpipe.simulator.simulation import RunAhead, ahead_of, best_receives, gain, simulate


@dataclass
class Lowered:
    schedule: Schedule
    lists: pipelining.Lists
    receives: Receives
    is_agreed: bool = False
    """Whether all ranks are known to have the same lists."""
    cut: RunAhead | None = None
    """The lists, cut at the validation of an optimizer step, if that was asked for."""


@dataclass(eq=False)
class Lists:
    """Makes, lowers and keeps the schedules of one job, the same on all ranks."""

    algorithm: Algorithm
    placement: Placement
    costs: CostModel | None
    """Costs of the next schedules; None if unknown."""
    limit: MemoryLimit | None
    """Memory limit of a rank; None for the algorithm's own limit."""
    offload: Offload | None
    transport: Transport
    receives: Receives | None
    """When ranks post receives; None for the shortest simulated step."""
    frees_sends_early: bool
    """Whether sent tensors are freed as soon as they have surely been received."""
    running: Lowered = field(init=False)
    _adopted: dict[int, Schedule] = field(default_factory=dict, init=False)
    _made: dict[int, Schedule] = field(default_factory=dict, init=False)
    _lowered: dict[Schedule, Lowered] = field(default_factory=dict, init=False)

    @property
    def simulated_costs(self) -> CostModel:
        """The costs, or equal times if unknown."""
        return self.costs or passes.default_costs(self.placement)

    @without_collections()
    def of(self, number: int) -> Schedule:
        """The schedule for `number` microbatches: the adopted one, or one made for it. ValueError if there is none."""
        if number in self._adopted:
            return self._adopted[number]
        if number not in self._made:
            self._made[number] = self.make(number)
        return self._made[number]

    def adopt(self, schedule: Schedule) -> None:
        """Run `schedule` from now on in steps with its number of microbatches."""
        self._adopted[schedule.num_microbatches] = schedule
        # Another rank may have adopted a new schedule, where this one returns to a known one. So all ranks compare the
        # lists of each schedule again before its next run.
        for lowered in self._lowered.values():
            lowered.is_agreed = False

    def use_costs(self, costs: CostModel | None, transport: Transport | None = None) -> None:
        """Use these costs, and this transport, for schedules from now on. Adopted schedules stay."""
        self.costs, self.transport = costs, transport or self.transport
        for lowered in self._lowered.values():
            lowered.is_agreed = False
        self._made.clear()
        self._lowered.clear()

    def make(self, number: int) -> Schedule:
        costs = self.costs
        if costs is not None and self.offload is not None:  # copies leave nothing to fill
            costs = replace(costs, fill_waits="off")
        made = self.algorithm.make(
            self.placement.num_ranks,
            number,
            stages_per_rank=len(self.placement.stages_on(0)) if self.algorithm.any_stages_per_rank else None,
            costs=costs,
            memory_limit=self.limit,
            transport=self.transport,
        )
        return made if self.offload is None else offloaded(made, self.simulated_costs, what=self.offload)

    def gain_of_running_ahead(self) -> float:
        """Simulated share of a step saved by running ahead. 0 with copies to the host, which cannot be undone."""
        schedule = self.running.schedule
        return 0.0 if schedule.has_copies else gain(schedule, self.simulated_costs)

    def cut(self, runtime: pipelining.ScheduleRuntime) -> RunAhead | None:
        """The running lists, cut at the validation of an optimizer step. None if no rank runs an op before it."""
        running, schedule = self.running, self.running.schedule
        # Copies to the host cannot be undone.
        if schedule.has_copies:
            return None
        if running.cut is None:
            rows = passes.add_waits(pipelining.rows_of(runtime))
            running.cut = RunAhead.of(rows, ahead_of(schedule, self.simulated_costs))
        return running.cut if any(each.kind == "F" for row in running.cut.before for each in row) else None

    def use(self, runtime: pipelining.ScheduleRuntime, lowered: Lowered) -> None:
        """Run these lists from the next step on."""
        self.running = lowered
        runtime.pipeline_order, runtime.pipeline_order_with_comms = lowered.lists

    @without_collections()
    def lower(self, runtime: pipelining.ScheduleRuntime, schedule: Schedule) -> Lowered:
        """The schedule as `runtime` runs it. May replace the lists of `runtime`."""
        if schedule in self._lowered:
            return self._lowered[schedule]
        checks.require_runnable(schedule)
        computations, costs = schedule.computations, self.simulated_costs
        costs = replace(costs, fill_waits="off") if schedule.has_copies else costs  # copies leave nothing to fill
        pipelining.lower(runtime, computations)
        receives = self.receives or best_receives(computations, costs, self.transport)
        rows = passes.place_receives(pipelining.rows_of(runtime), receives, simulate(computations, costs))
        if self.frees_sends_early:
            rows = passes.free_sends_early(passes.add_waits(rows), schedule.placement)
        checks.require_sound_messages(rows, computations)
        runtime.pipeline_order_with_comms = dict(enumerate(map(pipelining.actions_of, rows)))
        lists = runtime.pipeline_order, runtime.pipeline_order_with_comms
        self._lowered[schedule] = lowered = Lowered(schedule, lists, receives)
        return lowered
