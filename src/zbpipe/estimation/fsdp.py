"""The job without a pipeline: FSDP over all GPUs outside TP gathers each layer before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zbpipe.costs.layers import join_stages, split_of
from zbpipe.costs.model import CostModel
from zbpipe.estimation.rates import HOST, Rates
from zbpipe.estimation.rows import Memory
from zbpipe.estimation.workload import Workload

_AHEAD = 2
"""Number of layers with gathered parameters: the running one, and the next."""
_GRADIENT = 2.0 + 4.0
"""Bytes of a gradient before its reduction: in bfloat16, and in float32 for the reduction."""
_SLOWER = 0.19
"""Slowdown of computation during a collective: 18.9 % on average, arXiv 2507.03114."""
_REDUCED = 4.0
"""Bytes of a gradient that are sent."""


class Sharded(NamedTuple):
    seconds: float
    exposed: float
    """Seconds of the step in which only communication runs."""
    memory: Memory
    batch: tuple[int, int, int]
    """Sequences of a GPU at a time, of the whole job, and of a GPU in the step."""


def step_without_pipeline(workload: Workload, rates: Rates) -> Sharded:
    """A step with the same tokens and GPUs, with as many sequences at a time as fit, so that FSDP gathers least."""
    degrees = workload.degrees
    job = workload.on(degrees.without_pipeline)
    costs = rates.layer_costs(job)
    sizes = [size for size in range(job.microbatches, 0, -1) if job.microbatches % size == 0]
    memories = {size: memory_without_pipeline(job, costs, size) for size in sizes}
    fitting = (size for size in sizes if memories[size].total <= rates.device.usable_bytes)
    size = next(fitting, 1)
    rounds = job.microbatches // size * job.rounds
    computing = rounds * size * sum(map(sum, (costs.f, costs.i, costs.w)))
    launches = HOST[job.compiled][0] * job.launches_by_stage((range(len(job.layers)),))[0]
    seconds = rounds * max(launches, sum(_round(job, rates, costs, size)))
    own = job.parameters / job.degrees.gpus
    of_gpu = job.microbatches * job.microbatch_size * job.rounds
    batch = (size * job.microbatch_size, of_gpu * job.degrees.data, of_gpu)
    return Sharded(rates.with_overheads(seconds, job, own), seconds - computing, memories[size], batch)


def _round(workload: Workload, rates: Rates, costs: CostModel, size: int) -> Iterator[float]:
    """Seconds of one forward and backward, layer by layer, with `size` microbatches at a time."""
    held = [workload.held([layer]) for layer in range(costs.num_stages)]

    def seconds(size: float) -> list[float]:
        collective = rates.device.collective
        return [sum(collective(size * each.number, each.shards, each.apart) for each in parts) for parts in held]

    gather, reduce = seconds(workload.parameter_bytes.gathered), seconds(_REDUCED)
    yield gather[0]
    for layer in range(costs.num_stages):
        for computing, communicating in (
            (size * costs.f[layer], gather[layer]),
            (size * (costs.i[layer] + costs.w[layer]), gather[layer] + reduce[layer]),
        ):
            yield max(computing, communicating) + _SLOWER * min(computing, communicating)
    yield reduce[0]


def memory_without_pipeline(workload: Workload, costs: CostModel, size: int) -> Memory:
    """Memory of a GPU that runs `size` microbatches at a time."""
    each = workload.parameter_bytes
    whole = join_stages(costs, split_of((costs.num_stages,)))
    held = [workload.held([layer]) for layer in range(costs.num_stages)]
    largest = sorted(sum(part.number for part in parts) for parts in held)[-_AHEAD:]
    shards = each.stored * sum(part.own for parts in held for part in parts)
    of_head, of_backward = (size * whole.of(0, kind).working for kind in "FB")
    return Memory(
        weights=shards + each.gathered * sum(largest),
        optimizer=3 * shards + _GRADIENT * largest[-1],
        activations=size * whole.activations[0],
        waiting=0.0,
        buffers=0.0,
        working=of_backward if of_backward >= of_head else 0.0,
        logits=of_head if of_head > of_backward else 0.0,
    )
