"""Estimates of a job before its launch: `zbpipe estimate`. Knows no torch.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""

from zbpipe.estimation.layers_file import load_layers
from zbpipe.estimation.rows import Estimate
from zbpipe.estimation.workload import Workload

__all__ = ["Estimate", "Workload", "load_layers"]
