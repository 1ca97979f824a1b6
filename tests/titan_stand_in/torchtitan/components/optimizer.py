from collections.abc import Sequence

from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR


class OptimizersContainer:
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.optimizers = [SGD(part.parameters(), lr=1.0) for part in parts]

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


class LRSchedulersContainer:
    def __init__(self, optimizers: OptimizersContainer) -> None:
        self.schedulers = [ConstantLR(each, factor=1.0) for each in optimizers.optimizers]

    def step(self) -> None:
        for each in self.schedulers:
            each.step()
