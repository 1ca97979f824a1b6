"""A layer of your own that leaves its weight gradient to W.

    torchrun --nproc-per-node 2 examples/own_layer.py

All `nn.Linear` already do so. Any other layer declares in `weight_products` how the backward of its product splits;
without it the layer computes its weight gradient in I: correct, but W has nothing to fill bubbles with.
docs/the-split.md has the rules.
"""

from typing import ClassVar

import torch
import torch.distributed as dist
from plain_loop import MICROBATCHES, SEQUENCE, STEPS, VOCABULARY, WIDTH, build_stages, join_job, loss_fn, train
from torch import Tensor, nn

import zbpipe
from zbpipe.runtime.split import WeightProduct

HEADS = 4


class PerHead(nn.Module):
    """A weight matrix for each head: (batch, SEQUENCE, WIDTH) to the same."""

    weight_products: ClassVar = {
        torch.bmm: WeightProduct(
            input_gradient=lambda dy, weight: dy @ weight.mT,
            weight_gradient=lambda dy, x: x.mT @ dy,
        )
    }

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS
        self.weight = nn.Parameter(torch.randn(HEADS, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        by_head = x.reshape(-1, HEADS, WIDTH // HEADS).transpose(0, 1)  # (HEADS, batch * SEQUENCE, width)
        return torch.bmm(by_head, self.weight).transpose(0, 1).reshape(-1, SEQUENCE, WIDTH)


def build_part(index: int, num_stages: int) -> nn.Module:
    """One stage: only the head is a layer that zbpipe knows how to defer."""
    torch.manual_seed(index)
    embedding = [nn.Embedding(VOCABULARY, WIDTH)] if index == 0 else []
    head = [nn.Linear(WIDTH, VOCABULARY)] if index == num_stages - 1 else []
    return nn.Sequential(*embedding, PerHead(), nn.GELU(), PerHead(), nn.LayerNorm(WIDTH), *head)


if __name__ == "__main__":
    stages = build_stages("ZBV", join_job(), build_part)
    # "strict" refuses a stage that leaves nothing for W, as these would be without `weight_products`.
    schedule = zbpipe.build_pipeline_schedule("ZBV", stages, MICROBATCHES, loss_fn, split_backward="strict")
    train(schedule, stages, range(STEPS))
    dist.destroy_process_group()
