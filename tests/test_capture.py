"""What a CUDA graph can capture: a steady step waits for nothing, and does the same operations every time.

Without a GPU the device only says that it captures, while calls that would wait for it are errors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import call
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Checkpointing, batch, build_stage
from pipelines import as_rank, on_one_rank
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zbpipe
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.device import Accelerator, Cpu
from zbpipe.runtime.split import LINEAR
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.stage import find_split
from zbpipe.schedule import registry
from zbpipe.simulator.offloading import Offload, copy_all

MICROBATCHES = 3
_WAITS = {
    *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"),
    *("unique_consecutive", "repeat_interleave", "bincount", "histc", "_assert_async"),
}
"""Operations that wait for the device, or whose result has a size that the device knows."""
_ON_HOST = ("tolist", "item", "nonzero", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Methods of a tensor that need its content on the host; not all of them dispatch an operation."""
_OF_DEVICE = ("synchronize", "new_event", "new_stream", "copy_to_host", "copy_from_host", "random_state", "reset_peak")
"""What the device does for zbpipe that waits, or that is not part of a graph."""

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
        made = {each.device.type for each in tree_leaves(result) if isinstance(each, Tensor)}
        assert not ("cuda" in {each.device.type for each in given} and "cpu" in made), f"{name} copies to the host"
        return result


def refused(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} waits for the device, or is no part of a graph")

    return call


@contextmanager
def capturing(*, is_real: bool = True) -> Iterator[Steady]:
    """The device captures; or, if not `is_real`, it does not, and may not be waited for either."""
    with pytest.MonkeyPatch.context() as patch, Steady() as steady:
        for name in _ON_HOST:
            patch.setattr(Tensor, name, refused(name))
        for name in ("synchronize", "current_stream", "get_rng_state", "set_rng_state"):
            patch.setattr(torch.cuda, name, refused(name))
        patch.setattr(torch.accelerator, "synchronize", refused("synchronize"))
        for device, name in ((device, name) for device in (Accelerator, Cpu) for name in _OF_DEVICE):
            patch.setattr(device, name, refused(name))
        patch.setattr(Cpu, "is_capturing", lambda device: is_real)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_real)
        yield steady


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
        with capturing(is_real=False) as steady:
            schedule.step(tokens, target=targets)
        steps.append(steady.operations)
        gradients = [each.grad for module in modules for each in module.parameters() if each.grad is not None]
        places.append([each.data_ptr() for each in gradients])
    assert [name for name, _ in steps[0]].count("mm") > 0
    assert steps[0] == steps[1] == steps[2]
    if not set_to_none:
        assert places[0] == places[1] == places[2]


class Around(nn.Module):
    """Multiplies with the weight of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.other(x).relu(), self.child.weight)


class Late(nn.Module):
    """Calls a layer from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = nn.Linear(8, 8), nn.Linear(8, 8)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.later(self.first(x)) if self.steps else self.first(x)


class Twice(nn.Module):
    """Two layers with one x, whose cast they share under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x)


@pytest.mark.parametrize("name", ["ZBV", "ZB", "ZBH1", "InterleavedZeroBubbleSplit"])
@pytest.mark.parametrize(
    ("kind", "microbatches", "casts", "steady_from"),
    [(Around, 4, False, 2), (Around, 1, False, 2), (Twice, 4, True, 2), (Late, 4, False, 3)],
)
def test_a_captured_step(
    one_rank: None, kind: Any, name: str, microbatches: int, casts: bool, steady_from: int
) -> None:
    """From the third step on, unless a layer runs later; with the gradients of a step that is not captured."""
    if name == "ZB":  # one rank has no bubble, so ZB has no I there
        steady_from = 1
    modules = [kind() for _ in range(1 if name == "ZBH1" else 2)]
    schedule = on_one_rank(modules, microbatches, name, F.mse_loss)
    x, target = torch.randn(2, 2 * microbatches, 8)
    found: list[list[Tensor]] = []
    for number in range(6):
        is_steady = schedule.is_steady
        assert is_steady == (number >= steady_from), number
        for module in modules:
            module.zero_grad()
            module.steps = number
        with capturing() if is_steady and number < 5 else nullcontext(), torch.autocast("cpu", torch.bfloat16, casts):
            schedule.step(x, target=target)
        found.append([each.grad.clone() for module in modules for each in module.parameters() if each.grad is not None])
    assert schedule.replays == 5 - steady_from  # on the CPU a captured step runs at once
    for one, other in zip(found[-2], found[-1], strict=True):
        assert torch.equal(one, other)


def _add_optimizer(schedule: Any) -> None:
    zbpipe.OptimizerStep(schedule, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), max_norm=1.0)


def _copy_to_host(schedule: Any) -> None:
    schedule.adopt(copy_all(schedule.schedule, Offload.ALL))


@pytest.mark.parametrize(
    ("name", "steps", "prepare", "given", "words"),
    [
        (
            "ZBV",
            1,
            None,
            {},
            "compare lists and contents: run the same number of steps before on all ranks, at least tw",
        ),
        ("ZBV", 2, None, {"microbatches": 4}, "all replays have one size: omit microbatches="),
        ("ZBV", 2, _copy_to_host, {}, "it copies to the host: omit offload, or adopt a schedule without copies"),
        ("ZBV", 2, _add_optimizer, {}, "OptimizerStep decides in every step what runs: use the optimizer's own step"),
        (
            "ZBV",
            2,
            zbpipe.GradientCheck,
            {},
            "measured or checked: capture one when Auto has chosen, and profiles, tra",
        ),
        ("Auto", 3, None, {}, "measured or checked: capture one when Auto has chosen"),
        (
            "ZBV",
            2,
            "keep gradients",
            {},
            "scale_grads would multiply the kept gradients .*: set them to None before the",
        ),
    ],
)
def test_what_a_graph_cannot_replay(
    one_rank: None, name: str, steps: int, prepare: Any, given: dict[str, int], words: str
) -> None:
    modules = [Around() for _ in range(2)]
    schedule = on_one_rank(modules, 4, name, F.mse_loss)
    x = torch.randn(2, 8, 8)[0]
    for _ in range(steps):
        for module in modules:
            module.zero_grad()
        schedule.step(x, target=x)
    if callable(prepare):
        prepare(schedule)
    for module in modules if prepare != "keep gradients" else ():
        module.zero_grad()
    with pytest.raises(ValueError, match=f"a CUDA graph cannot capture .*{words}"), capturing():
        schedule.step(x, target=x, **given)
    assert schedule.is_steady == (steps == 2 and prepare is not _copy_to_host)
    schedule.step(x, target=x)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["ZBV", "ZB", "ZBH1", "InterleavedZeroBubbleSplit"])
def test_nothing_waits_for_a_gpu(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fake CUDA tensors, on each of two ranks; each send is joined within the step."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    event = SimpleNamespace(record=lambda: None, query=lambda: True)
    monkeypatch.setattr(Accelerator, "new_event", lambda device, timed=False: event)
    placement = registry.resolve(name).place(2, 2 if name == "ZB" else None)
    indices, last = placement.stages_on(rank), placement.num_stages - 1
    with FakeTensorMode(), as_rank(rank, 2):
        x = torch.zeros(2, 8, device=cuda, requires_grad=True)
        modules = [nn.Linear(8, 8, device=cuda) for _ in indices]
        stages = [
            pipelining.StageOfKnownShapes(module, index, last + 1, cuda, input_args=(x,), output_args=(x,))
            for module, index in zip(modules, indices, strict=True)
        ]
        schedule: Any = zbpipe.build_pipeline_schedule(name, stages, 4, F.mse_loss)
        split, factors = find_split(stages[0]), torch.zeros(2, 2, 8, device=cuda)

        def backward(run: Any, kind: str, tensors: dict[str, Any], **_: Any) -> tuple[Any, None]:
            """In place of autograd's, which runs none of fake tensors: zeros, and in I one deferred product."""
            if split is not None and split.gradients.recording is not None:
                split.gradients.defer(PendingGradient(modules[0], LINEAR, modules[0].weight, *factors))
            inputs = tensors["input_values"]
            return tuple(torch.zeros_like(each) if each.requires_grad else None for each in inputs), None

        batch = torch.zeros(8, 8, device=cuda)
        given = ([batch] if 0 in indices else []), (batch if last in indices else None)
        for _ in range(3):
            is_steady = schedule.is_steady
            for module in modules:
                module.zero_grad()
            with (
                hooks.route_calls(schedule, call, call, backward),
                capturing() if is_steady else nullcontext(),
            ):
                schedule.step(*given[0], target=given[1])
        assert is_steady
        assert modules[0].weight.grad is not None
    row = list(map(str, schedule.pipeline_order_with_comms[rank]))
    sends = [each for each in row if "SEND" in each and "WAIT" not in each]
    assert sends
    assert {each.replace("SEND", "WAIT_SEND") for each in sends} <= set(row)
    assert not getattr(schedule, "sends_under_way", {})
