"""Devices and dtypes on a GPU, without one: fake CUDA tensors refuse a tensor on another device, or of a wrong dtype.

Autograd runs no backward of such tensors, so I gets zeros instead, and W is tested with deferred gradients made here.
"""

from collections.abc import Iterator
from operator import call
from typing import Any

import pytest
import torch
from models import SEQUENCE, VOCABULARY, WIDTH, build_stage, loss_fn
from pipelines import as_rank
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zbpipe
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.split import products
from zbpipe.runtime.transport import find_known

CUDA = torch.device("cuda", 0)
MICROBATCHES, ROWS = 4, 2


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What would ask a driver answers without one."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    with FakeTensorMode():
        yield


def backward_of_zeros(run: Any, kind: str, tensors: dict[str, Any], **_: Any) -> tuple[Any, None]:
    return tuple(torch.zeros_like(each) if each.requires_grad else None for each in tensors["input_values"]), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_stay_on_the_device(rank: int, dtype: torch.dtype) -> None:
    """On each of two ranks: the other's messages are zeros."""
    torch.set_default_dtype(dtype)
    with as_rank(rank, 2):
        with CUDA:
            module = build_stage(rank, 2)
            hidden = torch.zeros(ROWS, SEQUENCE, WIDTH, requires_grad=True)
            batch = torch.zeros(MICROBATCHES * ROWS, SEQUENCE, dtype=torch.long)
            logits = torch.zeros(ROWS, SEQUENCE, VOCABULARY)
        torch.set_default_dtype(torch.float32)
        ends = ((batch[:ROWS], hidden), (hidden, logits))[rank]
        stage = pipelining.StageOfKnownShapes(module, rank, 2, CUDA, input_args=ends[0], output_args=ends[1])
        schedule: Any = zbpipe.build_pipeline_schedule("ZBH1", [stage], MICROBATCHES, loss_fn, plain=True)
        assert schedule.transport is find_known(torch.__version__, {}).transport
        given: Any = {"target": batch} if rank else {}
        losses: list[Tensor] = []
        output = schedule.eval(*([] if rank else [batch]), **given)
        with hooks.route_calls(schedule, call, call, backward_of_zeros):
            schedule.step(*([] if rank else [batch]), losses=losses, **given)
    if rank:
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
    assert products._add_product(weight, None, one, other) is (product != gradient)
    grad = weight.grad if product != gradient else torch.zeros_like(weight)
    assert products._add_product(weight, grad, one, other)
    assert grad is not None
    assert (grad.dtype, grad.shape, grad.device) == (gradient, weight.shape, CUDA)
