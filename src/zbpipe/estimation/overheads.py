"""Parts of a step that no schedule changes: the optimizer, and waiting for the slowest GPU."""

from __future__ import annotations

from math import log2

from zbpipe.estimation.devices import Device
from zbpipe.estimation.workload import Workload

_OPTIMIZER_BYTES = 32.0
"""Bytes that AdamW in float32 moves for each parameter: it reads and writes the parameter and both moments, and reads
the gradient, once more for its norm."""
_STRAGGLERS = {False: 0.006, True: 0.003}
"""Growth of the step with each doubling of GPUs beyond a node, by whether there is a pipeline.

Published: 0.6 to 1.1 % without a pipeline (TorchTitan from 8 to 128 H100, MaxText from 64 to 256), 0.3 to 0.5 % with
one (NeMo from 64 to 2048).
"""


def with_overheads(seconds: float, workload: Workload, device: Device, parameters: float) -> float:
    """A step of `seconds`, with the optimizer for this number of parameters on each GPU, and stragglers."""
    degrees = workload.degrees
    doublings = max(log2(degrees.gpus / device.gpus_per_node), 0.0)
    optimizer = _OPTIMIZER_BYTES * parameters / device.memory
    return (seconds + optimizer) * (1 + _STRAGGLERS[degrees.pipeline > 1] * doublings)
