"""Snapshots of modules, to run their forwards again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zbpipe.runtime._torch.autograd import own_buffers
from zbpipe.runtime._torch.tensor_data import is_expanded, own_part
from zbpipe.runtime.device import RandomState


class Buffers:
    """The buffers of modules, by value and by assignment: a forward may write into them, or replace them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = [own_buffers(part) for module in modules for part in module.modules()]
        self._owners = [(own, dict(own)) for own in owners]
        found = {id(each): each for own in owners for each in own.values() if each is not None and not is_lazy(each)}
        local = [own_part(each).detach() for each in found.values() if not each.is_inference()]
        self._values = [(each, each.clone()) for each in local if not is_expanded(each)]

    def restore(self) -> None:
        for own, before in self._owners:
            own.update(before)
        for buffer, value in self._values:
            buffer.copy_(value)


class ModuleState:
    """Snapshot of the state that a module's forward depends on besides its inputs.

    Keeps parameters, buffers and other tensors in attributes by value, other attributes by assignment, and random
    states, including those of generators in attributes. Contents of containers and objects are not kept. Without
    `weights`, parameters are not copied, for callers that do not write to them.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, weights: bool = True) -> None:
        held = [value for part in module.modules() for value in vars(part).values()]
        self._values: list[tuple[Tensor, Tensor]] = []
        tensors = [each for each in held if isinstance(each, Tensor)]
        for tensor in (*(module.parameters() if weights else ()), *module.buffers(), *tensors):
            local = own_part(tensor).detach()
            if type(local) is Tensor and local.layout is torch.strided and not local.is_nested:
                self._values.append((local, local.clone()))
        attributes = (own for part in module.modules() for own in (vars(part), own_buffers(part)))
        self._attributes = [(own, dict(own)) for own in attributes]
        self._random = RandomState(device)
        self._generators = [(each, each.get_state()) for each in held if isinstance(each, torch.Generator)]

    def restore(self) -> None:
        for own, before in self._attributes:
            for name in own.keys() - before.keys():
                del own[name]
            own.update({name: value for name, value in before.items() if own.get(name, self) is not value})
        for local, copy in self._values:
            # Write only differences: tensors from inference take no writes outside of it. A parameter that FSDP2 has
            # resharded since has no memory.
            if local.untyped_storage().size() and not torch.equal(local, copy):
                local.copy_(copy)
        self._random.restore()
        for generator, state in self._generators:
            generator.set_state(state)
