"""Llama blocks to measure with: RMSNorm, grouped-query attention with RoPE, SwiGLU, three ways of checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "full", "selective"]


class Attention(nn.Module):
    """Causal attention of `heads` query heads over `kv_heads` key and value heads; (batch, seq, dim) to the same."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, kv_heads: int, seq: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        frequencies = 500_000.0 ** -torch.linspace(0, 1, self.head_dim // 2 + 1)[:-1]
        angles = torch.outer(torch.arange(seq), torch.cat((frequencies, frequencies)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            self._rotate(query), self._rotate(key), value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, heads * head_dim) to (batch, heads, seq, head_dim)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        """RoPE on (batch, heads, seq, head_dim)."""
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin


class FeedForward(nn.Module):
    """SwiGLU; (batch, seq, dim) to the same."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One transformer layer of Llama 3's proportions; (batch, seq, dim) to the same."""

    def __init__(self, dim: int, heads: int, kv_heads: int, seq: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads, seq)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = FeedForward(dim, dim * 7 // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


def checkpointed(block: nn.Module, checkpointing: Checkpointing) -> nn.Module:
    """`block` with its activations kept ("none"), recomputed ("full"), or all but every second product recomputed."""
    return _WRAPPERS[checkpointing](block)


def _every_second_product() -> Callable[..., CheckpointPolicy]:
    """TorchTitan's choice for linear layers: keep every second matrix product, recompute the other one."""
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not torch.ops.aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        mode = "recompute" if context.is_recompute else "forward"
        seen[mode] += 1
        return CheckpointPolicy.MUST_SAVE if seen[mode] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# Without early_stop, as TorchTitan does it.
_WRAPPERS: dict[Checkpointing, Callable[[nn.Module], nn.Module]] = {
    "none": lambda block: block,
    "full": partial(checkpoint_wrapper, early_stop=False),
    "selective": partial(
        checkpoint_wrapper,
        early_stop=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_every_second_product()),
    ),
}
