"""What an optimizer step changes, kept until it is known whether the step counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zbpipe.runtime._torch import autograd


class Scheduler(Protocol):
    """A learning-rate scheduler of torch, or a container of some."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class RandomState:
    """The present one of the CPU, and of the device that the job computes on."""

    def __init__(self, device: torch.device) -> None:
        self._cpu, self._device = torch.get_rng_state(), device
        self._on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Make it the present one again."""
        torch.set_rng_state(self._cpu)
        if self._on_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device, self._device)


class _Copy:
    """A tensor that is changed in place, and what was in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.content = tensor, tensor.detach().clone()

    def restore(self) -> Tensor:
        """The tensor, with its old content: whoever refers to it sees it again."""
        self.tensor.detach().copy_(self.content)
        return self.tensor


class Backup:
    """Parameters, gradients, optimizers, learning rates, buffers and random state, as they are before a step.

    It takes the memory of the parameters, of the optimizers' state and of the modules' buffers. Gradients are kept as
    they are, so `zero_grad()` in between does no harm, unless it is `zero_grad(set_to_none=False)`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Scheduler],
        modules: Iterable[nn.Module],
        device: torch.device,
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        parameters = [each for optimizer in optimizers for each in parameters_of(optimizer)]
        buffers = [buffer for module in modules for buffer in module.buffers()]
        self._tensors = [_Copy(each) for each in (*parameters, *buffers)]
        self._gradients = [(each, each.grad) for each in parameters]
        self._states = [_save(dict(optimizer.state)) for optimizer in optimizers]
        self._groups = [
            [{name: _save(value) for name, value in group.items() if name != "params"} for group in each.param_groups]
            for each in optimizers
        ]
        self._of_schedulers = [deepcopy(each.state_dict()) for each in schedulers]
        self._random = RandomState(device)

    def restore(self) -> None:
        """Make everything as it was."""
        for copy in self._tensors:
            copy.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for optimizer, state, groups in zip(self._optimizers, self._states, self._groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(autograd.tree_map_only(_Copy, _Copy.restore, state))
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(autograd.tree_map_only(_Copy, _Copy.restore, saved))
        for scheduler, saved in zip(self._schedulers, self._of_schedulers, strict=True):
            scheduler.load_state_dict(saved)
        self._random.restore()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All that it steps."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _save(state: Any) -> Any:
    """`state` with copies of all tensors in it."""
    return autograd.tree_map(lambda each: _Copy(each) if isinstance(each, Tensor) else deepcopy(each), state)
