"""Attention and the blocks around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import EVERY_MODE, TOKENS, WIDTH, Case, bare, linear, parameter, stage

HEADS = 2


def heads(y: Tensor, count: int = HEADS) -> Tensor:
    """(samples, tokens, width) to (samples, heads, tokens, width of a head)."""
    return y.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(-2)


def attend(s: Any, x: Tensor) -> Tensor:
    """One product for q, k and v."""
    q, k, v = map(heads, s.qkv(x).chunk(3, -1))
    return s.b(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def grouped_queries(s: Any, x: Tensor) -> Tensor:
    q, k, v = heads(s.q(x), 4), heads(s.k(x)), heads(s.v(x))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return x + s.b(joined(F.scaled_dot_product_attention(q, k, v)))


def by_hand(s: Any, x: Tensor) -> Tensor:
    """With a bias that is learned, through a view."""
    q, k, v = map(heads, s.qkv(x).chunk(3, -1))
    scores = q @ k.mT + s.bias[None, None]
    return s.b(joined(scores.softmax(-1) @ v))


def with_null_key(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).chunk(3, -1)
    k, v = torch.cat([k, s.null_key[None]], 1), torch.cat([v, s.null_value[None]], 1)
    return x + s.b(F.scaled_dot_product_attention(q, k, v))


def rotated(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).chunk(3, -1)
    angles = torch.outer(torch.arange(TOKENS).double(), torch.arange(1, WIDTH // 2 + 1).double())
    turn = torch.polar(torch.ones_like(angles), angles)

    def rope(y: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    return s.b(F.scaled_dot_product_attention(rope(q), rope(k), v))


def from_queries(s: Any, x: Tensor) -> Tensor:
    """Learned queries look at x."""
    q = s.a(s.queries)[None].expand(len(x), -1, -1)
    return s.b(F.scaled_dot_product_attention(q, x, x)) + x


def latent(s: Any, x: Tensor) -> Tensor:
    """Keys and values from a few numbers."""
    c = s.norm(s.down(x))
    return s.b(F.scaled_dot_product_attention(s.a(x), s.k(c), s.v(c)))


class Block(nn.Module):
    """As in GPT; `position` says how pos is added."""

    def __init__(self, position: Any) -> None:
        super().__init__()
        self.position = position
        self.pos = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.embed, self.qkv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position(self.pos)
        q, k, v = map(heads, self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.mlp(self.norm2(x))


def mha(**options: Any) -> Any:
    return lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)


QKV = linear(WIDTH, 3 * WIDTH)

CASES = (
    Case("nn.MultiheadAttention", bare(lambda s, x: s.mha(x, x, x)[0], mha=mha()), modes=EVERY_MODE),
    Case("attention without weights", bare(lambda s, x: x + s.mha(x, x, x, need_weights=False)[0], mha=mha())),
    Case("attention with key biases", bare(lambda s, x: s.mha(x, x, x)[0], mha=mha(add_bias_kv=True))),
    Case(
        "cross attention",
        bare(
            lambda s, x: s.mha(s.q.expand(len(x), -1, -1), x, x)[0],
            mha=mha(kdim=WIDTH, vdim=WIDTH),
            q=parameter(TOKENS, WIDTH),
        ),
    ),
    Case(
        "an encoder layer",
        lambda index: nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True),
    ),
    Case(
        "a decoder layer",
        bare(
            lambda s, x: s.d(x, x.tanh()),
            d=lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True),
        ),
    ),
    Case("q, k, v in one", bare(attend, qkv=QKV, b=linear()), modes=EVERY_MODE),
    Case("grouped queries", bare(grouped_queries, q=linear(), k=linear(WIDTH, 4), v=linear(WIDTH, 4), b=linear())),
    Case("a learned bias of attention", bare(by_hand, qkv=QKV, b=linear(), bias=parameter(TOKENS, TOKENS))),
    Case(
        "a null key",
        bare(with_null_key, qkv=QKV, b=linear(), null_key=parameter(1, WIDTH), null_value=parameter(1, WIDTH)),
    ),
    Case("rotary positions", bare(rotated, qkv=QKV, b=linear())),
    Case("learned queries", stage(from_queries, queries=parameter(TOKENS, WIDTH))),
    Case(
        "latent attention", stage(latent, down=linear(WIDTH, 3), norm=lambda: nn.RMSNorm(3), k=linear(3), v=linear(3))
    ),
    Case(
        "a masked attention",
        bare(
            lambda s, x: x + s.mha(x, x, x, attn_mask=s.mask.tril() == 0)[0],
            mha=mha(),
            mask=lambda: nn.Buffer(torch.ones(TOKENS, TOKENS)),
        ),
    ),
    Case("GPT, pos.unsqueeze(0)", lambda index: Block(lambda pos: pos.unsqueeze(0)), modes=EVERY_MODE),
    Case("GPT, pos", lambda index: Block(lambda pos: pos)),
)
