"""Times of ops under costs, messages and copies, memory of each rank, and validation of lists of ops.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""

from zbpipe.simulator.memory import peak_bytes
from zbpipe.simulator.offloading import offload
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import Finding, validate

__all__ = ["Finding", "Timeline", "offload", "peak_bytes", "simulate", "validate"]
