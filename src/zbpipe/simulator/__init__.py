"""When ops run, under costs, messages and copies; what a rank holds; and whether lists of ops are valid."""

from zbpipe.simulator.memory import peak_bytes
from zbpipe.simulator.offloading import offload
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import Finding, validate

__all__ = ["Finding", "Timeline", "offload", "peak_bytes", "simulate", "validate"]
