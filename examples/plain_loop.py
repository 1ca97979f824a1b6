"""A plain training loop with ZB: four stages per rank, in a wave.

    torchrun --nproc-per-node 2 examples/plain_loop.py

One process per GPU; without GPUs it runs on the CPU. The other examples use the functions of this one.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.pipelining import PipelineStage

import zbpipe

WIDTH, VOCABULARY, SEQUENCE, BATCH = 64, 256, 32, 16
MICROBATCHES, STEPS, LEARNING_RATE = 8, 10, 0.3
Part = Callable[[int, int], nn.Module]  # makes stage i of n


def join_job() -> torch.device:
    """Meet the other processes that torchrun started; this rank's device."""
    if torch.cuda.is_available():  # also on ROCm
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        return torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo")
    return torch.device("cpu")


def build_part(index: int, num_stages: int) -> nn.Module:
    """A hidden layer for each stage, the embedding for the first, the head for the last."""
    torch.manual_seed(index)  # the same weights on whichever rank the stage is
    embedding = [nn.Embedding(VOCABULARY, WIDTH)] if index == 0 else []
    head = [nn.Linear(WIDTH, VOCABULARY)] if index == num_stages - 1 else []
    return nn.Sequential(*embedding, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), *head)


def build_stages(name: str, device: torch.device, part: Part = build_part) -> list[PipelineStage]:
    """The stages that this rank holds in the schedule `name`."""
    indices = zbpipe.stage_indices(name, rank=dist.get_rank(), num_ranks=dist.get_world_size())
    num_stages = len(indices) * dist.get_world_size()
    return [PipelineStage(part(i, num_stages).to(device), i, num_stages, device) for i in indices]


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, (BATCH, SEQUENCE) each: the model learns to add one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(device)
    return tokens, (tokens + 1) % VOCABULARY


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(schedule: Any, stages: list[PipelineStage], steps: Iterable[int]) -> None:
    """Run the steps. The batch goes in where the first stage is, the targets where the last one is."""
    optimizer = optim.SGD((weight for stage in stages for weight in stage.submod.parameters()), lr=LEARNING_RATE)
    is_first, is_last = stages[0].is_first, stages[-1].is_last
    for step in steps:
        tokens, targets = batch(step, stages[0].device)
        losses: list[Tensor] = []
        schedule.step(*([tokens] if is_first else []), target=targets if is_last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            print(f"step {step} loss {torch.stack(losses).mean():.6f}")


if __name__ == "__main__":
    stages = build_stages("ZB", join_job())
    schedule = zbpipe.build_pipeline_schedule("ZB", stages, MICROBATCHES, loss_fn)
    train(schedule, stages, range(STEPS))
    dist.destroy_process_group()
