"""What a CUDA graph can capture: a steady step waits for nothing, and does the same operations every time.

Without a GPU the device only says that it captures, while calls that would wait for it are errors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from models import Checkpointing, batch, build_stage
from pipelines import on_one_rank
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo.case import stage

import zbpipe
from zbpipe import Op, OpKind
from zbpipe.runtime.device import Accelerator, Cpu
from zbpipe.simulator.offloading import Offload, copy_all

MICROBATCHES = 3
_WAITS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
"""Operations that wait for the device, or whose result has a size that the device knows."""
_ON_HOST = ("tolist", "item", "nonzero", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Methods of a tensor that need its content on the host; not all of them dispatch an operation."""
_OF_DEVICE = ("synchronize", "new_event", "new_stream", "copy_to_host", "copy_from_host", "random_state", "reset_peak")
_REFUSED = {
    **{Tensor: _ON_HOST, Accelerator: _OF_DEVICE, Cpu: _OF_DEVICE, torch.accelerator: ["synchronize"]},
    torch.cuda: ["synchronize", "current_stream", "get_rng_state", "set_rng_state"],
}
"""All that waits, or that is no part of a graph."""

Operation = tuple[str, tuple[Any, ...]]


class Steady(TorchDispatchMode):
    """Writes down every operation and what its tensors look like; refuses those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _WAITS, f"{name} waits for the device"
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name.lstrip("_").startswith("index"):
            assert torch.bool not in {each.dtype for each in tree_leaves(args[1:]) if isinstance(each, Tensor)}, name
        if func.namespace != "profiler":
            self.operations.append((name, tuple((each.dtype, each.shape, each.stride()) for each in given)))
        result = func(*args, **(kwargs or {}))
        devices = {each.device.type for each in tree_leaves((given, result)) if isinstance(each, Tensor)}
        assert name not in ("_to_copy", "copy_") or len(devices) == 1, "copies between host and device wait"
        return result


def refused(name: str) -> Mock:
    return Mock(side_effect=AssertionError(f"{name} waits for the device, or is no part of a graph"))


@contextmanager
def capturing() -> Iterator[Steady]:
    """The device captures, and may not be waited for."""
    with pytest.MonkeyPatch.context() as patch, Steady() as steady:
        for owner, name in ((owner, name) for owner, names in _REFUSED.items() for name in names):
            patch.setattr(owner, name, refused(name))
        patch.setattr(Cpu, "is_capturing", lambda device: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield steady


@pytest.mark.parametrize(("checkpointing", "set_to_none"), [("none", False), ("full", False), ("selective", True)])
def test_a_steady_step(one_rank: None, checkpointing: Checkpointing, set_to_none: bool) -> None:
    modules = [build_stage(index, 2, checkpointing) for index in range(2)]
    schedule = on_one_rank(modules, MICROBATCHES, scale_grads=set_to_none)
    tokens, targets = batch(MICROBATCHES)
    for _ in range(2):  # infer shapes, look at all that could be put off, and check what waits
        schedule.step(tokens, target=targets)
    steps: list[list[Operation]] = []
    places: list[list[int]] = []
    for _ in range(3):
        for module in modules:
            module.zero_grad(set_to_none=set_to_none)
        with capturing() as steady:
            schedule.step(tokens, target=targets)
        steps.append(steady.operations)
        gradients = [each.grad for module in modules for each in module.parameters() if each.grad is not None]
        places.append([each.data_ptr() for each in gradients])
    assert [name for name, _ in steps[0]].count("mm") > 0
    assert steps[0] == steps[1] == steps[2]
    if not set_to_none:
        assert places[0] == places[1] == places[2]


MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the weight of a child that is never called": lambda own, x: F.linear(x.relu(), own.b.weight),
    "the same behind a layer": lambda own, x: F.linear(own.a(x).relu(), own.b.weight),
    "a layer that runs from the second step on": lambda own, x: own.b(own.a(x)) if own.number else own.a(x),
    "a shared cast of x": lambda own, x: own.a(x) * own.b(x),
}


def half_whole(microbatches: int) -> zbpipe.Schedule:
    """The first of two stages has no I."""
    kinds = [(0, OpKind.F), (1, OpKind.F), (1, OpKind.I), (0, OpKind.B), (1, OpKind.W)]
    row = tuple(Op(stage, kind, microbatch) for microbatch in range(microbatches) for stage, kind in kinds)
    return zbpipe.Schedule("HalfWhole", zbpipe.Placement.v(1), microbatches, (row,))


@pytest.mark.parametrize("name", ["ZBV", "ZB", "ZBH1", "InterleavedZeroBubbleSplit", "HalfWhole"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_captured_step(one_rank: None, model: str, name: str, microbatches: int) -> None:
    """From the third step on, unless a layer runs later; with the gradients of a step that is not captured."""
    # One rank has no bubble, so ZB has no I there.
    steady_from = 1 if name == "ZB" else 3 if "from the second" in model else 2
    modules: Any = [stage(MODELS[model], number=lambda: 0)(0) for _ in range(1 if name == "ZBH1" else 2)]
    made = half_whole(microbatches) if name == "HalfWhole" else name
    schedule = on_one_rank(modules, microbatches, made, F.mse_loss)
    x, target = torch.randn(2, 2 * microbatches, 8)
    found: list[list[Tensor]] = []
    for number in range(6):
        is_steady = schedule.is_steady
        assert is_steady == (number >= steady_from), number
        for module in modules:
            module.zero_grad()
            module.number = number
        how = capturing() if is_steady and number < 5 else nullcontext()
        with how, torch.autocast("cpu", torch.bfloat16, "cast" in model):
            schedule.step(x, target=target)
        found.append([each.grad.clone() for module in modules for each in module.parameters() if each.grad is not None])
    assert schedule.replays == 5 - steady_from  # on the CPU a captured step runs at once
    for one, other in zip(found[-2], found[-1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["ZBV", "Auto"])
def test_what_a_graph_cannot_replay(one_rank: None, name: str) -> None:
    """The next step can follow."""
    modules, x = nn.ModuleList(map(stage(MODELS["a shared cast of x"]), range(2))), torch.randn(8, 8)
    schedule = on_one_rank([*modules], 4, name, F.mse_loss, **({"profile_steps": 1} if name == "Auto" else {}))

    def refuse(words: str, **given: int) -> None:
        with pytest.raises(ValueError, match=f"a CUDA graph cannot capture .*{words}"), capturing():
            schedule.step(x, target=x, **given)

    refuse("the first steps, and Auto's .* compare lists and contents: first run the same number of steps")
    for _ in range(8 if name == "Auto" else 2):
        assert not schedule.is_steady or getattr(schedule, "costs", None)
        modules.zero_grad()
        schedule.step(x, target=x)
    refuse("kept gradients .*: set them to None before the capture, or build with scale_grads=False")
    modules.zero_grad()
    refuse("all replays have one size: omit microbatches=", microbatches=4)
    assert schedule.is_steady
    with torch.no_grad():
        schedule.eval(x, target=x)
    assert not schedule.is_steady  # torch sets up messages anew
    schedule.step(x, target=x)
    modules.zero_grad()
    assert schedule.is_steady
    zbpipe.GradientCheck(schedule, 1)
    refuse("measured or checked: capture one after Auto has measured, and after profiles, traces and GradientCheck")
    schedule.step(x, target=x)
    modules.zero_grad()
    plain = schedule.schedule
    schedule.adopt(copy_all(plain, Offload.ALL))
    assert not schedule.is_steady  # before the ranks agree
    refuse("it copies to the host: omit offload, or adopt a schedule without copies")
    schedule.adopt(plain)
    zbpipe.OptimizerStep(schedule, torch.optim.SGD(modules.parameters()), max_norm=1.0)
    refuse("zbpipe.OptimizerStep decides in every step what runs: use the optimizer's own step")
    schedule.step(x, target=x)
