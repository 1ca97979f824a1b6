from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class ScaledDotProductAttention(nn.Module):
    sdpa_backends: list[Any]

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


class FlexAttention(ScaledDotProductAttention):
    class Config:
        pass

    def forward(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, **kwargs: Any) -> Tensor:  # noqa: N803
        raise NotImplementedError("the CPU has none")


class VarlenAttention(FlexAttention):
    class Config:
        pass
