"""Memory of each rank with the job's own schedule, to check before launch whether the job fits.

It counts weights, gradients, optimizer, and the peak of the schedule: activations, deferred gradients, messages, and
working memory. Compiled modules need less. It does not count buffers of the communication library, copies that FSDP
makes to reduce gradients at the end of a step, or fragmentation. `USABLE` leaves room for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zbpipe.costs.layers import join_stages
from zbpipe.costs.memory_limit import AS_1F1B, MemoryLimit
from zbpipe.costs.model import CostModel, least_room
from zbpipe.estimation.devices import DEVICES
from zbpipe.estimation.estimate import memories_by_rank
from zbpipe.estimation.result import Memory
from zbpipe.estimation.workload import Workload
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import Algorithm, resolve
from zbpipe.simulator.simulation import simulate


@dataclass(frozen=True)
class JobMemory:
    """Memory of a job's GPUs, by pipeline rank."""

    parameters: tuple[float, ...]
    """Number of parameters in each rank's stages, over all GPUs that share them."""
    memories: tuple[Memory, ...]
    """Memory of each GPU."""
    unit: float
    """Bytes that F keeps of one microbatch in an average rank's layers: a memory limit of 1 microbatch."""

    @property
    def worst(self) -> float:
        return max(memory.total for memory in self.memories)

    @property
    def fits(self) -> list[str]:
        """Devices of the table that are large enough."""
        return [name for name, device in DEVICES.items() if self.worst <= device.usable_bytes]


def memory_by_rank(workload: Workload, limit: MemoryLimit | None = None) -> JobMemory:
    """Memory of each rank with the job's own schedule. With `Auto` a plan may use all of the limit."""
    algorithm = resolve(workload.schedule)
    placement = algorithm.place(workload.degrees.pipeline)
    split = workload.split(placement, algorithm)
    costs = join_stages(workload.layer_costs(lambda layer: (1.0, 1.0, 1.0)), split)  # times make no difference
    timeline = simulate(_schedule(algorithm, placement, workload, limit), costs)
    memories = tuple(memories_by_rank(workload, timeline, split))
    if algorithm.name == "Auto":
        memories = tuple(_add_plan(memories, placement, costs, workload, limit or AS_1F1B))
    parameters = workload.parameters_by_rank(placement, split)
    return JobMemory(parameters, memories, sum(costs.activations) / placement.num_ranks)


def _schedule(algorithm: Algorithm, placement: Placement, workload: Workload, limit: MemoryLimit | None) -> Schedule:
    """The job's schedule before any measurement."""
    made_for = workload.usual_costs(algorithm, placement)
    return algorithm.make(workload.degrees.pipeline, workload.microbatches, costs=made_for, memory_limit=limit)


def _add_plan(
    memories: tuple[Memory, ...], placement: Placement, costs: CostModel, workload: Workload, limit: MemoryLimit
) -> Iterator[Memory]:
    """The memory with the full limit of a plan, if that is more. The excess counts as activations."""
    rooms = limit.resolve(costs, placement.num_ranks, workload.microbatches)
    for memory, least, room in zip(memories, least_room(placement, costs), rooms, strict=True):
        empty = replace(memory, waiting=0.0, buffers=0.0, working=0.0, logits=0.0)
        yield max(memory, replace(empty, activations=max(room, least)), key=lambda each: each.total)
