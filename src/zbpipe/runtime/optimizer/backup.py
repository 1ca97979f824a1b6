"""Backup of the state that an optimizer step changes, until the step is validated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from zbpipe.runtime._torch import autograd, tensor_data
from zbpipe.runtime.device import RandomState
from zbpipe.runtime.module_state import Buffers


class Scheduler(Protocol):
    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _Copy:
    """A tensor that changes in place, and its old content."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.content = tensor, tensor.detach().clone()

    def restore(self) -> Tensor:
        self.tensor.detach().copy_(self.content)
        return self.tensor


class Backup:
    """Parameters, gradients, optimizers, learning rates, buffers and random state before a step. It takes as much
    memory as the parameters, the optimizers' state and the modules' buffers. Gradients are kept by reference, unless
    the optimizer writes into them."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Scheduler],
        modules: Sequence[nn.Module],
        device: torch.device,
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        parameters = [each for optimizer in optimizers for each in parameters_of(optimizer)]
        self._parameters = [_Copy(each) for each in parameters]
        self._buffers = Buffers(modules)
        self._gradients = [
            (each, _save(each.grad) if _writes_gradients(optimizer) else each.grad)
            for optimizer in optimizers
            for each in parameters_of(optimizer)
        ]
        self._states = [_save(dict(optimizer.state)) for optimizer in optimizers]
        self._groups = [[_save(_settings_of(group)) for group in each.param_groups] for each in optimizers]
        self._of_schedulers = [deepcopy(each.state_dict()) for each in schedulers]
        self._random = RandomState(device)
        self._versions: list[int] = []
        self._results: list[list[dict[str, Any]]] = []

    def note_result(self) -> None:
        """Note parameters and settings after the step, to detect later changes by the job."""
        self._versions = [tensor_data.version_of(each.tensor) for each in self._parameters]
        self._results = [[deepcopy(_settings_of(group)) for group in each.param_groups] for each in self._optimizers]

    def require_unchanged(self) -> None:
        """Refuse changes of parameters and gradients since the step, which `restore` would undo."""
        for copy, version in zip(self._parameters, self._versions, strict=True):
            if copy.tensor.grad is not None or tensor_data.version_of(copy.tensor) != version:
                raise ValueError(
                    f"a parameter of shape {tuple(copy.tensor.shape)}, or its gradient, has changed before its last"
                    " optimizer step was validated, and a repeated step would undo that: call the finish() of"
                    " zbpipe.OptimizerStep first"
                )

    def save_new_settings(self) -> Callable[[], None]:
        """A function that restores the settings, such as learning rates, that the job has changed since the step."""
        changed = []
        for optimizer, results in zip(self._optimizers, self._results, strict=True):
            for group, result in zip(optimizer.param_groups, results, strict=False):
                settings = _settings_of(group).items()
                new = {
                    name: value
                    for name, value in settings
                    if name not in result or not bool(torch.as_tensor(value == result[name]).all())
                }
                changed.append((group, _save(new)))

        def restore() -> None:
            for group, saved in changed:
                group.update(_restore(saved))

        return restore

    def restore(self) -> None:
        self._buffers.restore()
        for copy in self._parameters:
            copy.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.restore() if isinstance(gradient, _Copy) else gradient
        for optimizer, state, groups in zip(self._optimizers, self._states, self._groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(_restore(state))
            for group, saved in zip(optimizer.param_groups, groups, strict=False):  # the job may have added a group
                group.update(_restore(saved))
        for scheduler, saved in zip(self._schedulers, self._of_schedulers, strict=True):
            scheduler.load_state_dict(saved)
        self._random.restore()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _writes_gradients(optimizer: Optimizer) -> bool:
    """Whether a step may change `.grad`, as torch's SGD with Nesterov's momentum and `foreach` does."""
    return isinstance(optimizer, SGD) and any(
        group["nesterov"] and group["foreach"] is not False for group in optimizer.param_groups
    )


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _restore(saved: Any) -> Any:
    return autograd.tree_map_only(_Copy, _Copy.restore, saved)


def _save(state: Any) -> Any:
    return autograd.tree_map(lambda each: _Copy(each) if isinstance(each, Tensor) else deepcopy(each), state)
