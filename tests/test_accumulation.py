"""How W adds a product to `.grad`: in one, in float32, wherever torch has a kernel for that."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compared import Operations
from pipelines import on_one_rank, shard
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zbpipe
from zbpipe import OpKind
from zbpipe.runtime._torch import fsdp2
from zbpipe.runtime.split import products
from zbpipe.runtime.split.products import LINEAR, PendingGradient, sums_in_float32

ROWS, IN, OUT, MICROBATCHES = 24, 16, 8, 4
HALF = [torch.bfloat16, torch.float16]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_sums_in_float32", {})
    torch.manual_seed(0)


@pytest.fixture
def kernels_for_the_cpu() -> Iterator[None]:
    """As CUDA has them: sums in float32 of what half precision multiplies."""

    def addmm(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor, **factors: Any) -> Tensor:
        assert total is out
        return out.add_(a.to(dtype) @ b.to(dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    yield
    library._destroy()


def microbatches(dtype: torch.dtype, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """x and dY of each."""
    return [
        (torch.randn(ROWS, IN).to(device, dtype), torch.randn(ROWS, OUT).to(device, dtype)) for _ in range(MICROBATCHES)
    ]


def accumulate(weight: Tensor, factors: list[tuple[Tensor, Tensor]]) -> Operations:
    layer = nn.Linear(IN, OUT)
    with Operations() as calls:
        for x, dy in factors:
            PendingGradient(layer, LINEAR, weight, x, dy).accumulate()
    return calls


def relative_error(found: Tensor | None, factors: list[tuple[Tensor, Tensor]]) -> float:
    exact = sum(dy.double().t() @ x.double() for x, dy in factors)
    return float((found - exact).norm() / exact.norm())  # type: ignore[operator, union-attr]


def weight_of(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Whose gradient is float32: autocast's is float32 itself, FSDP2's unsharded one asks for it."""
    weight = nn.Parameter(torch.zeros(OUT, IN, dtype=dtype, device=device))
    if dtype != torch.float32:
        if not hasattr(weight, "grad_dtype"):
            pytest.skip("this torch keeps gradients in the dtype of the weight")
        weight.grad_dtype = torch.float32
    return weight


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_one_product_reads_and_writes_a_float32_gradient(dtype: torch.dtype, of_weight: torch.dtype) -> None:
    weight = weight_of(of_weight, "meta")
    assert sums_in_float32(weight.device, dtype)
    calls = accumulate(weight, microbatches(dtype, "meta"))
    assert calls.functions() == [aten.mm.dtype] + [aten.addmm.dtype_out] * (MICROBATCHES - 1)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    for func, args, kwargs in calls.seen:
        if func is aten.addmm.dtype_out:
            assert args[0] is kwargs["out"] is weight.grad


@pytest.mark.parametrize("dtype", HALF)
def test_nothing_is_rounded_where_there_is_such_a_kernel(dtype: torch.dtype, kernels_for_the_cpu: None) -> None:
    weight, factors = weight_of(torch.float32), microbatches(dtype)
    accumulate(weight, factors)
    assert relative_error(weight.grad, factors) < 1e-6


@pytest.mark.parametrize("dtype", HALF)
def test_without_one_the_product_is_rounded_once(dtype: torch.dtype) -> None:
    weight, factors = weight_of(torch.float32), microbatches(dtype)
    calls = accumulate(weight, factors)
    assert not sums_in_float32(weight.device, dtype)
    assert calls.functions().count(aten.mm.default) == MICROBATCHES
    # bfloat16 has 8 bits, float16 has 11; the sum itself is float32.
    assert relative_error(weight.grad, factors) < torch.finfo(dtype).eps
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_in_the_dtype_of_the_products(dtype: torch.dtype, kernels_for_the_cpu: None) -> None:
    weight, factors = nn.Parameter(torch.zeros(OUT, IN, dtype=dtype)), microbatches(dtype)
    calls = accumulate(weight, factors)
    assert calls.functions().count(aten.addmm_.default) == MICROBATCHES - 1
    assert not {aten.mm.dtype, aten.addmm.dtype_out} & set(calls.functions())


@pytest.mark.parametrize("w_last", [False, True])
def test_fsdp_in_mixed_precision(one_rank: None, kernels_for_the_cpu: None, w_last: bool) -> None:
    """Its older versions keep the float32 sum beside `.grad`, and want the first gradient in bfloat16.

    They look at `.grad` after each I, and with `w_last` there is none between two W.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = nn.Linear(IN, OUT, bias=False), nn.Linear(OUT, OUT)
    modules = [shard(nn.Sequential(layer), mp_policy=policy) for layer in layers]
    table = zbpipe.generate("ZBV", 1, MICROBATCHES)
    if w_last:
        table = replace(table, ops=(tuple(sorted(table.ops[0], key=lambda op: op.kind is OpKind.W)),))
    schedule = on_one_rank(modules, MICROBATCHES, table, nn.functional.mse_loss)
    x = torch.randn(ROWS * MICROBATCHES, IN, dtype=torch.bfloat16)
    target = torch.zeros(ROWS * MICROBATCHES, OUT, dtype=torch.bfloat16)
    schedule.step(x, target=target)
    assert sums_in_float32(x.device, torch.bfloat16)
    with Operations() as calls:
        schedule.step(x, target=target)
    # Two products a microbatch, and in both stages the first one has nothing to be added to. (F runs addmm, too.)
    functions = calls.functions()
    assert functions.count(aten.addmm.dtype_out) == 2 * (MICROBATCHES - 1)
    assert functions.count(aten.mm.dtype) == (0 if fsdp2._HAS_SEPARATE_SUMS else 2)


def test_sparse_gradients_stay_sparse_or_are_made_dense(kernels_for_the_cpu: None) -> None:
    """Of an embedding that shares the weight."""
    weight, factors = weight_of(torch.float32), microbatches(torch.bfloat16)
    weight.grad = torch.zeros(OUT, IN).to_sparse()
    accumulate(weight, factors)
    assert relative_error(weight.grad, factors) < 2**-8


def test_it_is_tried_once_for_each_kind_of_device_and_dtype() -> None:
    cpu = torch.device("cpu")
    with Operations() as calls:
        sums_in_float32(cpu, torch.bfloat16)
    assert aten.mm.dtype in calls.functions()
    with Operations() as calls:
        sums_in_float32(cpu, torch.bfloat16)
        accumulate(weight_of(torch.float32), microbatches(torch.bfloat16))
    assert aten.mm.dtype not in calls.functions()


def test_a_kernel_that_is_wrong_is_not_used(kernels_for_the_cpu: None) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: (a @ b).to(dtype) + 1, "CPU", allow_override=True)
    assert not sums_in_float32(torch.device("cpu"), torch.bfloat16)
    library._destroy()


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not sums_in_float32(torch.device("cuda"), torch.bfloat16)
    assert not products._sums_in_float32  # asked again, once the capture is over


def test_addmm_may_write_into_what_it_adds_to() -> None:
    """torch says nothing about it but that addmm_ is that; the product has to see the old values."""
    total, a, b = torch.randn(OUT, IN), torch.randn(OUT, ROWS), torch.randn(ROWS, IN)
    expected = torch.addmm(total, a, b)
    assert torch.addmm(total, a, b, out=total) is total
    assert torch.equal(total, expected)
