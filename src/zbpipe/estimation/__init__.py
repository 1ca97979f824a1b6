"""What a job would take before it is launched: `zbpipe estimate`. Knows no torch."""

from zbpipe.estimation.layers_file import load_layers
from zbpipe.estimation.result import Estimate
from zbpipe.estimation.workload import Workload

__all__ = ["Estimate", "Workload", "load_layers"]
