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
    Case("pos with a dimension", stage(lambda s, x: s.b(s.a(x) + s.pos), pos=parameter(1, TOKENS, WIDTH))),
    Case(
        "pos with a dimension, two samples",
        stage(lambda s, x: s.b(s.a(x) + s.pos), pos=parameter(1, TOKENS, WIDTH)),
        samples=2,
    ),
    Case(
        "pos, two samples", stage(lambda s, x: s.b(torch.tanh(s.a(x) + s.pos.unsqueeze(0))), pos=POSITIONS), samples=2
    ),
    Case("pos expanded", stage(lambda s, x: s.b(s.a(x) + s.pos.expand_as(x)), pos=POSITIONS)),
    Case("pos kept flat", stage(lambda s, x: s.b(s.a(x) + s.pos.view(TOKENS, WIDTH)), pos=parameter(TOKENS * WIDTH))),
    Case(
        "pos kept flat, reshaped",
        stage(lambda s, x: s.b(s.a(x) + s.pos.reshape(1, TOKENS, -1)), pos=parameter(TOKENS * WIDTH)),
    ),
    Case("pos kept transposed", stage(lambda s, x: s.b(s.a(x) + s.pos.t()), pos=parameter(WIDTH, TOKENS))),
    Case("pos kept squeezable", stage(lambda s, x: s.b(s.a(x) + s.pos.squeeze(1)), pos=parameter(TOKENS, 1, WIDTH))),
    Case(
        "the first of a longer pos",
        stage(lambda s, x: s.b(s.a(x) + s.pos[: x.shape[1]]), pos=parameter(2 * TOKENS, WIDTH)),
    ),
    Case(
        "pos of heads",
        stage(lambda s, x: s.b((s.a(x).unflatten(-1, (2, -1)) + s.pos.view(TOKENS, 2, -1)).flatten(-2)), pos=POSITIONS),
    ),
    Case(
        "pos on flat rows",
        stage(lambda s, x: s.b((s.a(x).flatten(0, 1) + s.pos).view_as(x)), pos=POSITIONS),
        modes=EVERY_MODE,
    ),
    Case("pos at the end", stage(lambda s, x: s.b(torch.tanh(s.a(x))) + s.pos[None], pos=POSITIONS), modes=EVERY_MODE),
    Case("pos on x", stage(lambda s, x: s.b(torch.tanh(s.a(x + s.pos[None]))), pos=POSITIONS), modes=EVERY_MODE),
    Case("pos beside a residual", stage(lambda s, x: x + s.b(s.a(x)) + s.pos[None], pos=POSITIONS)),
    Case("pos twice", stage(lambda s, x: s.b(s.a(x) + s.pos[None]) + s.pos.unsqueeze(0), pos=POSITIONS)),
    Case(
        "two pos on one y",
        stage(lambda s, x: s.b(s.a(x) + s.p[None] + s.q[None]), p=POSITIONS, q=POSITIONS),
        modes=EVERY_MODE,
    ),
    Case("pos minus", stage(lambda s, x: s.b(s.a(x) - s.pos[None]), pos=POSITIONS)),
    Case("pos times", stage(lambda s, x: s.b(s.a(x) * s.pos[None]), pos=POSITIONS)),
    Case(
        "pos of an embedding's weight",
        stage(lambda s, x: s.b(s.a(x) + s.pos.weight[None]), pos=lambda: nn.Embedding(TOKENS, WIDTH)),
    ),
    Case(
        "pos of an embedding",
        stage(lambda s, x: s.b(s.a(x) + s.pos(torch.arange(TOKENS))), pos=lambda: nn.Embedding(TOKENS, WIDTH)),
    ),
    Case(
        "a cls token",
        stage(
            lambda s, x: s.b(torch.cat([s.cls.expand(len(x), -1, -1), s.a(x)], 1).tanh())[:, 1:].contiguous(),
            cls=parameter(1, 1, WIDTH),
        ),
        no_gradient=("cls",),
    ),
    Case("a cls token that is read", stage(read_cls_token, cls=parameter(1, WIDTH)), modes=EVERY_MODE),
    Case(
        "tokens that are replaced",
        stage(lambda s, x: x + s.b(torch.cat([s.reg[None], s.a(x)[:, 1:]], 1)), reg=parameter(1, WIDTH)),
    ),
    Case("a stack with a parameter", stage(lambda s, x: s.b(torch.stack([s.a(x), s.pos[None]]).sum(0)), pos=POSITIONS)),
    Case("a masked token", stage(lambda s, x: s.b(torch.where(x > 0, s.a(x), s.pos[None])), pos=POSITIONS)),
    Case(
        "a bias of its own",
        stage(lambda s, x: s.b(s.c(x).tanh() + s.shift.view(1, 1, -1)), c=linear(bias=False), shift=parameter(WIDTH)),
        no_gradient=("a.weight", "a.bias"),
    ),
    Case(
        "a bias of its own, one token",
        stage(
            lambda s, x: x + s.b(s.c(x[:, :1]) + s.shift.view(1, 1, -1)), c=linear(bias=False), shift=parameter(WIDTH)
        ),
        no_gradient=("a.weight", "a.bias"),
        modes=EVERY_MODE,
    ),
    Case(
        "F.linear with another bias",
        stage(lambda s, x: s.b(x + F.linear(x[0, 0], s.a.weight, s.shift.view(-1))), shift=parameter(WIDTH)),
        no_gradient=("a.bias",),
    ),
    Case(
        "pos through flatten and unflatten",
        stage(lambda s, x: s.b(s.a(x) + s.pos.flatten().unflatten(0, (TOKENS, WIDTH))[None]), pos=POSITIONS),
    ),
    Case("pos through movedim", stage(lambda s, x: s.b(s.a(x) + s.pos.movedim(0, 1)), pos=parameter(WIDTH, TOKENS))),
    Case(
        "pos through as_strided",
        stage(lambda s, x: s.b(s.a(x) + s.pos.as_strided((1, TOKENS, WIDTH), (0, WIDTH, 1))), pos=POSITIONS),
    ),
    Case(
        "pos through detach of a part",
        stage(lambda s, x: s.b(s.a(x) + s.pos[None] + s.pos.detach()[None]), pos=POSITIONS),
    ),
)
