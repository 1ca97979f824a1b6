"""Views of a module: the same children, parameters and buffers, with some replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


def view_of(module: nn.Module, replacements: Mapping[str, nn.Module], name: str = "") -> nn.Module:
    """A view of `module`, called `name`, with other modules under these names. Their children may be replaced, too."""
    module = replacements.get(name, module)
    if not any(each.startswith(f"{name}." if name else "") for each in replacements if each != name):
        return module
    view = _copy(module)
    for key, child in module._modules.items():
        if child is not None:
            view._modules[key] = view_of(child, replacements, f"{name}.{key}".lstrip("."))
    return view


def without_own_state(module: _Module, device: torch.device) -> _Module:
    """A view of `module` with an empty state dict of its own, to run for its children and for shapes. Its own
    parameters are plain NaN tensors without memory, so that a use by mistake shows. Its buffers are copies, so that NaN
    reaches no other view."""
    view = _copy(module)
    for name, buffer in module._buffers.items():
        view._buffers[name] = None if buffer is None else buffer.clone()
        view._non_persistent_buffers_set.add(name)
    constants = {}
    for name, parameter in module.named_parameters(recurse=False):
        del view._parameters[name]
        number = torch.tensor(float("nan") if parameter.is_floating_point() else 0, dtype=parameter.dtype)
        constants[name] = number.to(device).expand(parameter.shape)
    # Class attributes, because a module's attributes and buffers would be copied and moved with it.
    kind = type(module)
    if constants:
        view.__class__ = type(kind.__name__, (kind,), {"__module__": __name__, **constants})
    return view


def release_parameters(module: nn.Module) -> None:
    """Move the module's own parameters to the meta device. Views keep theirs."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def move(module: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers that are not on the meta device. Parameters stay the same objects."""
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in each._buffers.items():
            if buffer is not None and not buffer.is_meta:
                each._buffers[name] = buffer.to(device)


def _copy(module: _Module) -> _Module:
    view = module.__new__(type(module))
    vars(view).update(vars(module))
    for kept in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        vars(view)[kept] = vars(module)[kept].copy()
    return view
