"""Causal attention in place of FlexAttention, for models of TorchTitan 0.3 and later on the CPU and on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention


class CausalAttentionInRow(ScaledDotProductAttention):  # type: ignore[misc]
    """TorchTitan's, for tokens in one row, of which every `length` are a sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
        length: int = 0
        """Tokens of a sequence, as in the job's config."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.length = config.length

    # TorchTitan shards the arguments by these names.
    def forward(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, **keywords: Any) -> Any:  # noqa: N803
        tokens = q_TNH.shape[0]
        length = tokens if tokens % self.length else self.length
        sequences = [each.reshape(-1, length, *each.shape[1:]) for each in (q_TNH, k_TNH, v_TNH)]
        return super().forward(*sequences, **keywords).flatten(0, 1)


def use_causal_attention(model_spec: Any, length: int) -> None:
    """Change a `ModelSpec`, whose sequences have `length` tokens, to attention that the CPU and meta tensors have."""
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    in_row = "q_TNH" in signature(FlexAttention.forward).parameters
    for masked in (FlexAttention.Config, VarlenAttention.Config):
        for _, _, owner, attribute in list(model_spec.traverse(masked)):
            causal = CausalAttentionInRow.Config(length=length) if in_row else ScaledDotProductAttention.Config()
            if isinstance(owner, list):
                owner[attribute] = causal
            else:
                setattr(owner, attribute, causal)
