"""Strict SPMD type checking takes deferred layers for what they are: it finds the types that plain layers get."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipelines import as_rank
from torch import Tensor, nn

from zbpipe.runtime.split import GROUPED_MM
from zbpipe.runtime.split.deferring_layers import defer_weights
from zbpipe.runtime.split.weight_gradients import WeightGradients

spmd = pytest.importorskip("spmd_types")
checker = pytest.importorskip("spmd_types.checker")
NAMES = ("R", "V", "I", "S(0)")


class Experts(nn.Module):
    weight_products = {torch._grouped_mm: GROUPED_MM}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=ends)


@pytest.fixture
def axis() -> Iterator[Any]:
    """Of two ranks, one of which is not there."""
    with as_rank(0, 2):
        yield spmd.MeshAxis.of(dist.group.WORLD)


def typed(tensor: Tensor, axis: Any, name: str) -> Tensor:
    spmd.assert_type(tensor, {axis: spmd.S(0) if name == "S(0)" else getattr(spmd, name)})
    return tensor


def types(call: Any, axis: Any) -> Any:
    with spmd.set_current_mesh(frozenset({axis})), checker.typecheck(strict_mode="strict"):
        try:
            return spmd.get_local_type(call())
        except spmd.SpmdTypeError as error:
            return str(error).split("(")[0]


def given(module: nn.Module, axis: Any, name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    for parameter in module.parameters():
        typed(parameter, axis, name)
    of_x = "R" if name == "S(0)" else name
    ends = typed(torch.tensor([4, 8], dtype=torch.int32), axis, of_x)
    return module, typed(torch.randn(8, 8, dtype=dtype, requires_grad=True), axis, of_x), ends


@pytest.mark.parametrize(
    ("kind", "name", "autocast"),
    [
        *(("linear", name, autocast) for name in NAMES for autocast in (False, True)),
        *(("product", n, False) for n in "RV"),
    ],
)
def test_a_layer(axis: Any, kind: str, name: str, autocast: bool) -> None:
    plain, dtype = (nn.Linear(8, 8), torch.float32) if kind == "linear" else (Experts(), torch.bfloat16)
    deferred = copy.deepcopy(plain)
    defer_weights(deferred, WeightGradients())
    found = []
    for layer in (plain, deferred):
        module, *inputs = given(layer, axis, name, dtype)
        inputs = inputs[:1] if kind == "linear" else inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(types(lambda module=module, inputs=inputs: module(*inputs), axis))
    assert found[0] == found[1]
    assert kind == "product" or name == "S(0)" or isinstance(found[0], dict)


def test_gradients_under_the_check(axis: Any) -> None:
    plain = nn.Linear(8, 8)
    deferred = copy.deepcopy(plain)
    defer_weights(deferred, WeightGradients())
    for layer in (plain, deferred):
        torch.manual_seed(0)
        module, x, _ = given(layer, axis, "R", torch.float32)
        with spmd.set_current_mesh(frozenset({axis})), checker.typecheck(strict_mode="strict"):
            y = F.silu(module(x))
        y.square().sum().backward()
    assert torch.equal(plain.weight.grad, deferred.weight.grad)  # type: ignore[arg-type]
