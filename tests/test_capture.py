"""What a CUDA graph could capture: a steady step waits for nothing and does the same operations every time."""

from typing import Any

import pytest
from models import Checkpointing, batch, build_stage
from pipelines import on_one_rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MICROBATCHES = 3
_WAITS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "_unique2", "masked_select"}
"""Operations that wait for the device, or whose result has a size that the device knows."""

Operation = tuple[str, tuple[Any, ...]]


class Steady(TorchDispatchMode):
    """Writes down every operation and what its tensors look like; refuses those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _WAITS, f"{name} waits for the device"
        if func.namespace != "profiler":
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self.operations.append((name, tuple((each.dtype, each.shape, each.stride()) for each in tensors)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("checkpointing", "set_to_none"), [("none", False), ("full", False), ("selective", True)])
def test_a_steady_step(one_rank: None, checkpointing: Checkpointing, set_to_none: bool) -> None:
    modules = [build_stage(index, 2, checkpointing) for index in range(2)]
    schedule = on_one_rank(modules, MICROBATCHES)
    tokens, targets = batch(MICROBATCHES)
    for _ in range(2):  # infer shapes, look at all that could be put off, and check what waits
        schedule.step(tokens, target=targets)
    steps: list[list[Operation]] = []
    places: list[list[int]] = []
    for _ in range(3):
        for module in modules:
            module.zero_grad(set_to_none=set_to_none)
        with Steady() as steady:
            schedule.step(tokens, target=targets)
        steps.append(steady.operations)
        gradients = [each.grad for module in modules for each in module.parameters() if each.grad is not None]
        places.append([each.data_ptr() for each in gradients])
    assert [name for name, _ in steps[0]].count("mm") > 0
    assert steps[0] == steps[1] == steps[2]
    if not set_to_none:
        assert places[0] == places[1] == places[2]
