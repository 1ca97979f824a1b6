"""Parameters that are added through views: their gradient is a view of another one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import EVERY_MODE, TOKENS, WIDTH, Case, linear, parameter, stage

POSITIONS = parameter(TOKENS, WIDTH)


def read_cls_token(s: Any, x: Tensor) -> Tensor:
    h = s.b(torch.cat([s.cls[None], s.a(x)], 1))
    return h[:, :1] + h[:, 1:]


CASES = (
    Case(
        "pos.unsqueeze(0)",
        stage(lambda s, x: s.b(torch.tanh(s.a(x) + s.pos.unsqueeze(0))), pos=POSITIONS),
        modes=EVERY_MODE,
    ),
    Case("pos[None]", stage(lambda s, x: s.b(torch.tanh(s.a(x) + s.pos[None])), pos=POSITIONS)),
    Case("pos.view", stage(lambda s, x: s.b(torch.tanh(s.a(x) + s.pos.view(1, TOKENS, WIDTH))), pos=POSITIONS)),
    Case("pos as it is", stage(lambda s, x: s.b(torch.tanh(s.a(x) + s.pos)), pos=POSITIONS)),
    Case(
        "pos, two samples", stage(lambda s, x: s.b(torch.tanh(s.a(x) + s.pos.unsqueeze(0))), pos=POSITIONS), samples=2
    ),
    Case("pos expanded", stage(lambda s, x: s.b(s.a(x) + s.pos.expand_as(x)), pos=POSITIONS)),
    Case("pos kept flat", stage(lambda s, x: s.b(s.a(x) + s.pos.view(TOKENS, WIDTH)), pos=parameter(TOKENS * WIDTH))),
    Case("pos kept transposed", stage(lambda s, x: s.b(s.a(x) + s.pos.t()), pos=parameter(WIDTH, TOKENS))),
    Case("pos on flat rows", stage(lambda s, x: s.b((s.a(x).flatten(0, 1) + s.pos).view_as(x)), pos=POSITIONS)),
    Case("pos at the end", stage(lambda s, x: s.b(torch.tanh(s.a(x))) + s.pos[None], pos=POSITIONS)),
    Case("pos on x", stage(lambda s, x: s.b(torch.tanh(s.a(x + s.pos[None]))), pos=POSITIONS)),
    Case("pos twice", stage(lambda s, x: s.b(s.a(x) + s.pos[None]) + s.pos.unsqueeze(0), pos=POSITIONS)),
    Case("two pos on one y", stage(lambda s, x: s.b(s.a(x) + s.p[None] + s.q[None]), p=POSITIONS, q=POSITIONS)),
    Case(
        "pos of an embedding's weight",
        stage(lambda s, x: s.b(s.a(x) + s.pos.weight[None]), pos=lambda: nn.Embedding(TOKENS, WIDTH)),
    ),
    Case("a cls token that is read", stage(read_cls_token, cls=parameter(1, WIDTH)), modes=EVERY_MODE),
    Case("a masked token", stage(lambda s, x: s.b(torch.where(x > 0, s.a(x), s.pos[None])), pos=POSITIONS)),
    Case(
        "a bias of its own, one token",
        stage(
            lambda s, x: x + s.b(s.c(x[:, :1]) + s.shift.view(1, 1, -1)), c=linear(bias=False), shift=parameter(WIDTH)
        ),
        no_gradient=("a.weight", "a.bias"),
    ),
    Case(
        "F.linear with another bias",
        stage(lambda s, x: s.b(x + F.linear(x[0, 0], s.a.weight, s.shift.view(-1))), shift=parameter(WIDTH)),
        no_gradient=("a.bias",),
    ),
    Case(
        "pos through as_strided",
        stage(lambda s, x: s.b(s.a(x) + s.pos.as_strided((1, TOKENS, WIDTH), (0, WIDTH, 1))), pos=POSITIONS),
    ),
)
