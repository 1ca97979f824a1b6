"""A training loop on samples of different lengths, without padding, packed into microbatches of nearly equal time.

    torchrun --nproc-per-node 2 examples/packed_loop.py

It uses the functions of plain_loop.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_loop import LEARNING_RATE, MICROBATCHES, STEPS, VOCABULARY, build_stages, join_job
from torch import Tensor, optim

import zbpipe

SAMPLES, MOST_TOKENS = 40, 128


def draw_batch(step: int) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens and targets of a step, one number per token, and the tokens of each microbatch: the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.empty(SAMPLES).log_normal_(3.0, 0.5, generator=generator).int().clamp(1, MOST_TOKENS).tolist()
    samples = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    (microbatches,) = zbpipe.pack(lengths, tokens=MOST_TOKENS)
    tokens = torch.cat([samples[number] for each in microbatches for number in each.samples])
    return tokens, (tokens + 1) % VOCABULARY, [each.tokens for each in microbatches]


def loss_fn(logits: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """The microbatch's part of the mean over all tokens of the step."""
    return F.cross_entropy(logits, targets, reduction="sum") / tokens


if __name__ == "__main__":
    stages = build_stages("ZB", join_job())
    is_first, is_last, device = stages[0].is_first, stages[-1].is_last, stages[0].device
    schedule = zbpipe.build_pipeline_schedule("ZB", stages, MICROBATCHES, loss_fn, scale_grads=False)
    optimizer = optim.SGD((weight for stage in stages for weight in stage.submod.parameters()), lr=LEARNING_RATE)
    for step in range(STEPS):
        tokens, targets, counts = draw_batch(step)
        losses: list[Tensor] = []
        schedule.step(
            *([tokens.to(device)] if is_first else []),
            target=targets.to(device) if is_last else None,
            microbatches=counts,
            losses=losses,
            loss_kwargs={"tokens": len(tokens)},
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            print(f"step {step} loss {torch.stack(losses).sum():.6f}")
    dist.destroy_process_group()
