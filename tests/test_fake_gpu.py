"""Devices and dtypes on a GPU, without one: fake CUDA tensors refuse a tensor on another device, or of a wrong dtype.

Autograd runs no backward of such tensors, so I gets zeros instead, and W is tested with deferred gradients made here.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import StageOfKnownShapes
from models import SEQUENCE, VOCABULARY, WIDTH, build_stage, loss_fn
from pipelines import as_rank
from test_capture import capturing, refused
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zbpipe
from zbpipe.runtime.device import Accelerator
from zbpipe.runtime.measure.transport import find_known
from zbpipe.runtime.split import LINEAR, products
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.stage import find_split
from zbpipe.schedule import registry

CUDA = torch.device("cuda", 0)
MICROBATCHES, ROWS = 4, 2


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What would ask a driver answers without one."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    event = SimpleNamespace(record=lambda: torch.cuda.is_current_stream_capturing() and refused("record")(), query=bool)
    monkeypatch.setattr(Accelerator, "new_event", lambda device, timed=False: event)
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("name", ["ZBV", "ZB", "ZBH1", "InterleavedZeroBubbleSplit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_stay_on_the_device(rank: int, dtype: torch.dtype, name: str) -> None:
    """On each of two ranks: the other's messages are zeros. A graph captures the third step, and joins its sends."""
    torch.set_default_dtype(dtype)
    placement = registry.resolve(name).place(2, 2 if name == "ZB" else None)
    number = placement.num_stages
    with as_rank(rank, 2):
        with CUDA:
            modules = {index: build_stage(index, number) for index in placement.stages_on(rank)}
            hidden = torch.zeros(ROWS, SEQUENCE, WIDTH, requires_grad=True)
            batch = torch.zeros(MICROBATCHES * ROWS, SEQUENCE, dtype=torch.long)
            logits = torch.zeros(ROWS, SEQUENCE, VOCABULARY)
            layer = next(each for of in modules.values() for each in of.modules() if isinstance(each, nn.Linear))
            factors = torch.zeros(7, layer.in_features), torch.zeros(7, layer.out_features)
        torch.set_default_dtype(torch.float32)
        ends = [batch[:ROWS], *[hidden] * (number - 1), logits]
        stages = [
            StageOfKnownShapes(each, at, number, CUDA, input_args=ends[at], output_args=ends[at + 1])
            for at, each in modules.items()
        ]
        schedule: Any = zbpipe.build_pipeline_schedule(name, stages, MICROBATCHES, loss_fn)
        assert schedule.transport is find_known(torch.__version__, {}).transport

        def backward(kind: str, tensors: dict[str, Any], **_: Any) -> tuple[Any, None]:
            """Zeros, and in I one deferred gradient."""
            gradients = find_split(stages[0]).gradients  # type: ignore[union-attr]
            if gradients.recording is not None:
                gradients.defer(PendingGradient(layer, LINEAR, layer.weight, *factors))
            inputs = tensors.get("input_values", ())
            return tuple(torch.zeros_like(each) if each.requires_grad else None for each in inputs), None

        inputs, has_last = [batch] if 0 in modules else [], number - 1 in modules
        given: Any = {"target": batch} if has_last else {}
        output = schedule.eval(*inputs, **given)
        for step in range(3):
            losses: list[Tensor] = []
            assert schedule.is_steady == (step == 2)
            layer.weight.grad = None
            for stage in stages:
                vars(stage)["backward_maybe_with_nosync"] = backward
            with capturing() if step == 2 else nullcontext():
                schedule.step(*inputs, losses=losses, **given)
    assert layer.weight.grad is not None
    actions = [*map(str, schedule.pipeline_order_with_comms[rank])]
    sends = {each for each in actions if "SEND" in each and "WAIT" not in each}
    assert sends
    assert {each.replace("SEND", "WAIT_SEND") for each in sends} <= set(actions)
    assert not getattr(schedule, "sends_under_way", {})
    if has_last:
        assert output.shape == (MICROBATCHES * ROWS, SEQUENCE, VOCABULARY)
        assert {each.device for each in (output, *losses)} == {CUDA}
        assert output.dtype == dtype
        assert len(losses) == MICROBATCHES


@pytest.mark.parametrize(
    ("product", "gradient"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_one_product_adds_to_the_gradient(
    product: torch.dtype, gradient: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gradient before, and with one."""
    monkeypatch.setattr(products, "_sums_in_float32", {("cuda", product): True})
    weight = nn.Parameter(torch.zeros(3, 5, device=CUDA, dtype=gradient))
    one, other = torch.zeros(3, 7, device=CUDA, dtype=product), torch.zeros(7, 5, device=CUDA, dtype=product)
    assert products.add_product(weight, None, one, other) is (product != gradient)
    grad = weight.grad if product != gradient else torch.zeros_like(weight)
    assert products.add_product(weight, grad, one, other)
    assert grad is not None
    assert (grad.dtype, grad.shape, grad.device) == (gradient, weight.shape, CUDA)
