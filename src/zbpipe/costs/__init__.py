"""Costs of stages, layers and whole jobs, memory limits, and the reading and writing of cost files.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""

from zbpipe.costs.file import dump_costs, load_costs
from zbpipe.costs.job import JobCosts, MemoryLimit
from zbpipe.costs.layers import Layer, LayerCosts
from zbpipe.costs.model import CostModel, Link
from zbpipe.costs.numbers import Size

__all__ = ["CostModel", "JobCosts", "Layer", "LayerCosts", "Link", "MemoryLimit", "Size", "dump_costs", "load_costs"]
