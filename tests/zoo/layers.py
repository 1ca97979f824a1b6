"""Layers that are not linear, or whose weight is made from others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from zoo.case import (
    EVERY_MODE,
    NOT_REPEATED,
    ONLY_EAGER,
    TOKENS,
    WIDTH,
    Case,
    Stage,
    bare,
    frozen,
    linear,
    parameter,
    stage,
)


def between(make: Any, name: str, **options: Any) -> Case:
    """A layer between two linear ones."""
    return Case(name, stage(lambda s, x: s.b(s.layer(s.a(x))), layer=make), **options)


def channels(make: Any, name: str, **options: Any) -> Case:
    """The same for layers that want (samples, channels, length)."""
    return Case(name, stage(lambda s, x: s.b(s.layer(s.a(x).mT).mT), layer=make), **options)


def over_images(s: Any, x: Tensor) -> Tensor:
    images = s.a(x).view(len(x), TOKENS, 2, WIDTH // 2)
    return s.b(F.relu(s.conv(images)).flatten(2))


def recurrent(s: Any, x: Tensor) -> Tensor:
    y, _ = s.layer(s.a(x))
    return s.b(y)


def cells(s: Any, x: Tensor) -> Tensor:
    h, outputs = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        h = s.cell(token, h)
        outputs.append(s.b(h))
    return torch.stack(outputs, 1)


def own_recurrence(s: Any, x: Tensor) -> Tensor:
    """The same linear layers once per token."""
    h, outputs = x[:, 0], []
    for token in x.unbind(1):
        h = torch.tanh(s.a(token) + s.b(h))
        outputs.append(h)
    return torch.stack(outputs, 1)


def standardised(s: Any, x: Tensor) -> Tensor:
    """Weight standardisation: a function of the weight, before the product."""
    weight = s.a.weight
    weight = (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5)
    return s.b(torch.tanh(F.linear(x, weight, s.a.bias)))


def quantised(s: Any, x: Tensor) -> Tensor:
    """Straight-through: rounded weights, gradients as if they were not."""
    weight = s.a.weight
    return s.b(F.linear(x, weight + ((4 * weight).round() / 4 - weight).detach(), s.a.bias))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized(*, unsafe: bool = False) -> Any:
    def make() -> nn.Module:
        return parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Symmetric(), unsafe=unsafe)

    return make


class LowRank(nn.Module):
    """LoRA around a frozen layer."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


def merged(s: Any, x: Tensor) -> Tensor:
    """LoRA added to the weight itself."""
    return s.b(torch.tanh(F.linear(x, s.a.weight + s.up @ s.down, s.a.bias)))


def magnitude(s: Any, x: Tensor) -> Tensor:
    """DoRA."""
    weight = s.a.weight + s.up @ s.down
    return s.b(F.linear(x, s.scale * F.normalize(weight, dim=1), s.a.bias))


def penalised(s: Any, x: Tensor) -> Tensor:
    """The weight in a product and elsewhere."""
    return s.b(torch.tanh(s.a(x))) + 0.1 * s.a.weight.square().sum() + s.b.weight.mean()


def tied_autoencoder(s: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(s.a(x)), s.a.weight.t()) + s.b(x)


def folded(s: Any, x: Tensor) -> Tensor:
    """Two weights multiplied before they meet x."""
    return F.linear(x, s.a.weight @ s.b.weight, s.a.bias)


def generated(s: Any, x: Tensor) -> Tensor:
    """A hypernetwork: a linear layer makes the weight of another."""
    weight = s.maker(s.code).view(WIDTH, WIDTH)
    return s.b(F.linear(torch.tanh(s.a(x)), weight))


def cached_weight(s: Stage, x: Tensor) -> Tensor:
    with parametrize.cached():
        return s.b(s.layer(torch.tanh(s.layer(s.a(x)))))


FROZEN = ("base.weight", "base.bias")

"""Batch norm counts a recomputed microbatch twice, whatever the schedule."""

CASES = (
    between(lambda: nn.LayerNorm(WIDTH), "layer norm"),
    channels(lambda: nn.GroupNorm(2, WIDTH), "group norm"),
    channels(lambda: nn.BatchNorm1d(WIDTH), "batch norm", samples=2, modes=ONLY_EAGER),
    channels(lambda: nn.BatchNorm1d(WIDTH, momentum=None), "batch norm, cumulative", modes=NOT_REPEATED),
    channels(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), "convolution", modes=EVERY_MODE),
    channels(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), "convolution by channel"),
    channels(lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1), "transposed convolution"),
    Case("convolution of images", stage(over_images, conv=lambda: nn.Conv2d(TOKENS, TOKENS, 3, padding=1))),
    Case("LSTM", stage(recurrent, layer=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))),
    Case("GRU", stage(recurrent, layer=lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True))),
    Case("a recurrent cell", bare(cells, cell=lambda: nn.GRUCell(WIDTH, WIDTH), b=linear())),
    Case("a recurrence of linear layers", stage(own_recurrence), modes=EVERY_MODE),
    Case("weight standardisation", stage(standardised), modes=EVERY_MODE),
    Case("quantised weights", stage(quantised)),
    between(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), "weight norm"),
    between(lambda: torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), "weight norm, old"),
    between(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), "orthogonal"),
    between(parametrized(), "parametrized", modes=EVERY_MODE),
    Case("parametrized and cached", stage(cached_weight, layer=parametrized()), modes=ONLY_EAGER),
    between(LowRank, "LoRA", no_gradient=FROZEN, modes=EVERY_MODE),
    Case(
        "LoRA alone",
        bare(lambda s, x: s.c(torch.tanh(s.layer(x))), layer=LowRank, c=frozen(linear())),
        no_gradient=(*FROZEN, "c.weight", "c.bias"),
    ),
    Case("merged LoRA", stage(merged, up=parameter(WIDTH, 2), down=parameter(2, WIDTH))),
    Case("DoRA", stage(magnitude, up=parameter(WIDTH, 2), down=parameter(2, WIDTH), scale=parameter(WIDTH, 1))),
    Case("weights in a penalty", stage(penalised), modes=EVERY_MODE),
    Case("a tied autoencoder", stage(tied_autoencoder), modes=EVERY_MODE),
    Case("folded weights", stage(folded), no_gradient=("b.bias",)),
    Case("a hypernetwork", stage(generated, maker=linear(3, WIDTH * WIDTH), code=parameter(3))),
    Case("dropout", stage(lambda s, x: s.b(F.dropout(s.a(x), 0.3)))),
    Case(
        "dropout of attention and weights",
        stage(lambda s, x: s.b(F.linear(F.dropout(x, 0.2), F.dropout(s.a.weight, 0.2)))),
        no_gradient=("a.bias",),
    ),
    Case(
        "an embedding and a bag",
        stage(
            lambda s, x: s.b(s.a(x) + s.e((x > 0).long().sum(-1)) + s.g((x[:, 0] > 0).long())[:, None]),
            e=lambda: nn.Embedding(WIDTH + 1, WIDTH),
            g=lambda: nn.EmbeddingBag(2, WIDTH),
        ),
        no_gradient=(),
    ),
    Case(
        "unused parameters",
        stage(lambda s, x: s.a(x), c=linear(), p=parameter(3)),
        no_gradient=("b.weight", "b.bias", "c.weight", "c.bias", "p"),
        modes=EVERY_MODE,
    ),
)
