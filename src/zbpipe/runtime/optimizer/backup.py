"""What an optimizer step changes, kept until it is known whether the step counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Scheduler(Protocol):
    """A learning-rate scheduler of torch, or a container of some."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RandomState:
    """Of the CPU, and of the device that the job computes on."""

    cpu: Tensor
    device: torch.device
    on_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The present one."""
        has_own = device.type != "cpu"
        on_device = torch.get_device_module(device).get_rng_state(device) if has_own else None
        return cls(torch.get_rng_state(), device, on_device)

    def restore(self) -> None:
        """Make it the present one again."""
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)


@dataclass(frozen=True)
class _Copy:
    """A tensor that is changed in place, and what was in it."""

    tensor: Tensor
    content: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Copy:
        return cls(tensor, tensor.detach().clone())

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
        self._tensors = [_Copy.of(each) for each in (*parameters, *buffers)]
        self._gradients = [(each, each.grad) for each in parameters]
        self._states = [_save(dict(optimizer.state)) for optimizer in optimizers]
        self._groups = [
            [{name: _save(value) for name, value in group.items() if name != "params"} for group in each.param_groups]
            for each in optimizers
        ]
        self._of_schedulers = [deepcopy(each.state_dict()) for each in schedulers]
        self._random = RandomState.now(device)

    def restore(self) -> None:
        """Make everything as it was."""
        for copy in self._tensors:
            copy.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for optimizer, state, groups in zip(self._optimizers, self._states, self._groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(_restore(state))
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(_restore(saved))
        for scheduler, saved in zip(self._schedulers, self._of_schedulers, strict=True):
            scheduler.load_state_dict(saved)
        self._random.restore()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All that it steps."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _save(value: Any) -> Any:
    """`value` with copies of all tensors in it."""
    if isinstance(value, Tensor):
        return _Copy.of(value)
    if isinstance(value, dict):
        return {key: _save(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_save, value))
    return deepcopy(value)


def _restore(saved: Any) -> Any:
    if isinstance(saved, _Copy):
        return saved.restore()
    if isinstance(saved, dict):
        return {key: _restore(each) for key, each in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(map(_restore, saved))
    return saved
