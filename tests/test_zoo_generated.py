"""Random small graphs of linear layers, views, parameters, changes in place, checkpoints and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo.case import TOKENS, WIDTH, Case
from zoo.runner import Setting, reference, train

LAYERS, PARAMETERS = 3, 2
# Sums in another order.
TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}

Value = int
"""Which of the values so far an operation takes, counted from the last one."""


def _view(kind: int, tensor: Tensor) -> Tensor:
    """A parameter as a view that can be added to (1, TOKENS, WIDTH)."""
    views: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda p: p,
        lambda p: p.unsqueeze(0),
        lambda p: p.view(1, TOKENS, WIDTH),
        lambda p: p.flatten().view(TOKENS, WIDTH),
        lambda p: p[:1],
        lambda p: p.expand(1, -1, -1),
    )
    return views[kind](tensor)


VIEWS = 6


class Graph(nn.Module):
    """Runs a list of operations, each on earlier values; the output is the sum of all values that nobody took."""

    def __init__(self, operations: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.operations = operations
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n > 0) for n in range(LAYERS))
        self.parameters_ = nn.ParameterList(torch.randn(TOKENS, WIDTH) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        values, taken = [x * 1], set()
        for name, *arguments, source in self.operations:
            place = max(0, len(values) - 1 - source)
            taken.add(place)
            values.append(getattr(self, name)(values[place], *arguments))
        return sum(value for place, value in enumerate(values) if place not in taken)  # type: ignore[return-value]

    def linear(self, x: Tensor, layer: int) -> Tensor:
        return self.layers[layer](x)  # type: ignore[no-any-return]

    def add_parameter(self, x: Tensor, parameter: int, view: int) -> Tensor:
        return x + _view(view, self.parameters_[parameter])

    def add_parameter_in_place(self, x: Tensor, parameter: int, view: int) -> Tensor:
        return (x + 0).add_(_view(view, self.parameters_[parameter]))

    def change_linear_in_place(self, x: Tensor, layer: int) -> Tensor:
        return self.layers[layer](x).mul_(0.5).relu_()  # type: ignore[no-any-return]

    def residual_in_place(self, x: Tensor, layer: int) -> Tensor:
        y = self.layers[layer](x)
        y += x
        return y  # type: ignore[no-any-return]

    def checkpointed(self, x: Tensor, layer: int, parameter: int, view: int) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(self.layers[layer](x) + _view(view, self.parameters_[parameter]))

        return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]

    def hooked(self, x: Tensor, in_place: bool) -> Tensor:
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(_doubled_in_place if in_place else _doubled)
        return y

    def activated(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def cut_and_joined(self, x: Tensor, layer: int) -> Tensor:
        first, second = x.split(TOKENS // 2, dim=1)
        return torch.cat([self.layers[layer](second), first], 1)

    def joined_with_parameter(self, x: Tensor, parameter: int) -> Tensor:
        return torch.cat([x[:, :1], self.parameters_[parameter][1:].unsqueeze(0)], 1)

    def transposed(self, x: Tensor) -> Tensor:
        return x.mT.reshape(1, TOKENS, WIDTH)

    def reshaped(self, x: Tensor, layer: int) -> Tensor:
        return self.layers[layer](x.view(TOKENS, WIDTH)).unsqueeze(0)  # type: ignore[no-any-return]

    def shared(self, x: Tensor, layer: int) -> Tensor:
        return nn.functional.linear(x, self.layers[layer].weight.t())  # type: ignore[operator]


def _doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


def _doubled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


layers, parameters = st.integers(0, LAYERS - 1), st.integers(0, PARAMETERS - 1)
views, sources = st.integers(0, VIEWS - 1), st.integers(0, 2)
operations = st.one_of(
    st.tuples(st.just("linear"), layers, sources),
    st.tuples(st.just("add_parameter"), parameters, views, sources),
    st.tuples(st.just("activated"), sources),
    st.tuples(st.just("hooked"), st.booleans(), sources),
    st.tuples(st.just("checkpointed"), layers, parameters, views, sources),
    st.tuples(st.just("change_linear_in_place"), layers, sources),
    st.tuples(st.just("residual_in_place"), layers, sources),
    st.tuples(st.just("add_parameter_in_place"), parameters, views, sources),
    st.tuples(st.just("cut_and_joined"), layers, sources),
    st.tuples(st.just("joined_with_parameter"), parameters, sources),
    st.tuples(st.just("transposed"), sources),
    st.tuples(st.just("reshaped"), layers, sources),
    st.tuples(st.just("shared"), layers, sources),
)
graphs = st.lists(operations, min_size=1, max_size=7)


@settings(max_examples=100)
@given(first=graphs, second=graphs)
@pytest.mark.usefixtures("one_rank", "tables")
def test_random_graphs(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> None:
    # Something to train on each stage.
    description = [[("linear", 0, 0), *first], [*second, ("linear", 1, 0)]]
    case = Case("generated", lambda index: Graph(description[index]), no_gradient=("",), options={"scale_grads": False})
    expected = reference(case, 2)
    assert any(each is not None and each.any() for each in expected.outcomes[0].gradients.values())
    for name in ("ZBV", "WeightsLast"):
        for found, plain in zip(train(case, Setting(name), 2, expected.examples), expected.outcomes, strict=True):
            for parameter, gradient in plain.gradients.items():
                torch.testing.assert_close(
                    found.gradients[parameter],
                    gradient,
                    **TOLERANCE,
                    msg=lambda m, n=f"{name}, {parameter}": f"{n}: {m}",  # type: ignore[misc]
                )
