"""What stages, layers and a whole job cost, the limits of their memory, and how costs are read and written."""

from zbpipe.costs.file import dump_costs, load_costs
from zbpipe.costs.job import JobCosts
from zbpipe.costs.layers import Layer, LayerCosts
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.model import CostModel, Link

__all__ = ["CostModel", "JobCosts", "Layer", "LayerCosts", "Link", "MemoryLimit", "dump_costs", "load_costs"]
