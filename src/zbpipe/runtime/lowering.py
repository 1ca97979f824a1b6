"""Schedules as torch runs them, with sends and receives, lowered once and kept; and the transport of their messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zbpipe.costs.model import CostModel
from zbpipe.costs.transport import Receives, Transport
from zbpipe.runtime import checks
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator import passes
from zbpipe.simulator.post_validation import RunAhead, ahead_of
from zbpipe.simulator.simulation import best_receives, simulate

ON_ROCM = torch.version.hip is not None
"""Whether this torch was built for AMD's GPUs."""


@dataclass
class Lowered:
    """A schedule as torch runs it."""

    schedule: Schedule
    lists: pipelining.Lists
    receives: Receives
    is_agreed: bool = False
    """Whether all ranks are known to have the same lists."""
    _cut: RunAhead | None = None

    def cut(self, runtime: pipelining.ScheduleRuntime, costs: CostModel) -> RunAhead | None:
        """The lists cut at the validation of an optimizer step; None if no rank runs any op before it."""
        # Copies to the host cannot be undone.
        if self.schedule.has_copies:
            return None
        if self._cut is None:
            rows = passes.add_waits(pipelining.rows_of(runtime))
            self._cut = RunAhead.of(rows, ahead_of(self.schedule, costs))
            if findings := self._cut.findings():
                raise RuntimeError(f"{self.schedule.name} cannot run ahead: {findings[0]}")
        return self._cut if any(each.kind == "F" for row in self._cut.before for each in row) else None


@dataclass(eq=False)
class Lowering:
    """Has torch lower schedules, and keeps the results."""

    receives: Receives | None
    """When ranks post receives; None for the shortest simulated step."""
    transport: Transport
    frees_sends_early: bool
    """Whether sent tensors are freed as soon as they have surely been received."""
    _known: dict[Schedule, Lowered] = field(default_factory=dict, init=False)

    def forget(self) -> None:
        """Discard lowered schedules, because the costs have changed."""
        self.forget_agreement()
        self._known.clear()

    def forget_agreement(self) -> None:
        """Let all ranks compare the lists of each schedule again, before they next run it."""
        for lowered in self._known.values():
            lowered.is_agreed = False

    def lower(self, runtime: pipelining.ScheduleRuntime, schedule: Schedule, costs: CostModel) -> Lowered:
        """The schedule as `runtime` runs it. `costs` place receives. This may replace the lists of `runtime`."""
        if schedule in self._known:
            return self._known[schedule]
        checks.require_runnable(schedule)
        computations = schedule.computations
        pipelining.lower(runtime, computations)
        receives = self.receives or best_receives(computations, costs, self.transport)
        rows = passes.place_receives(pipelining.rows_of(runtime), receives, simulate(computations, costs))
        if self.frees_sends_early:
            rows = passes.free_sends_early(passes.add_waits(rows), schedule.placement)
        checks.require_sound_messages(rows, computations)
        pipelining.use_rows(runtime, rows)
        lists = runtime.pipeline_order, runtime.pipeline_order_with_comms
        self._known[schedule] = lowered = Lowered(schedule, lists, receives)
        return lowered


def find_usual_transport(stage: pipelining.Stage) -> Transport:
    """Usual transport of messages between `stage` and others on its device."""
    # NCCL has one queue for all messages of a process group. torch >= 2.15 can give each edge of the pipeline its own
    # group. On AMD's GPUs streams may share hardware queues, so this assumes the worst case.
    if pipelining.device_of(stage).type == "cpu":
        return Transport.IDEAL
    if ON_ROCM:
        return Transport.SHARED
    return Transport.QUEUE_PER_PEER if getattr(stage, "p2p_per_edge", False) else Transport.ONE_QUEUE


def find_messages(schedule: pipelining.PipelineSchedule) -> tuple[Transport, Receives]:
    """Transport of the messages, and when ranks post receives, in a schedule of zbpipe or torch."""
    usual = find_usual_transport(hooks.stages_of(schedule)[0])
    by_torch = Receives.LATE if pipelining.receives_late(schedule) else Receives.EARLY
    return getattr(schedule, "transport", usual), getattr(schedule, "receives", by_torch)
