"""How long the first step of another size waits for its lists: `python benchmarks/step_sizes.py`.

One process takes the place of each rank in turn, with the backend "fake", and gets its lists for a size that it has not
seen: the schedule is made, checked, lowered by torch, gets its receives and waits, and is checked again. That is all
host time, and each rank does it alone. Each run has one more microbatch than the one before, so nothing is there.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # what knows the backend "fake" before torch 2.15
from torch import nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import registry
from zbpipe.runtime.classes import class_of

NAMES = ("ZBV", "ZBH1", "1F1B", "Interleaved1F1B", "ZBVLean", "DualPipeV")


def on_rank(name: str, rank: int, ranks: int) -> Any:
    """The schedule of that name on a rank, all by zbpipe's class."""
    placement = registry.resolve(name).place(ranks)
    stages = [
        PipelineStage(nn.Linear(1, 1), index, placement.num_stages, torch.device("cpu"))
        for index in placement.stages_on(rank)
    ]
    return class_of(name)(stages, 2 * placement.num_stages, nn.functional.mse_loss)


def seconds(name: str, rank: int, ranks: int, microbatches: int, rounds: int) -> tuple[float, float]:
    """Medians: of making the schedule alone, and of everything."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
    schedule = on_rank(name, rank, ranks)
    sizes = range(microbatches, microbatches + rounds)
    making, everything = [], []
    for size in sizes:
        began = time.perf_counter()
        zbpipe.generate(name, ranks, size)
        made = time.perf_counter()
        schedule._take_microbatches(size)
        making.append(made - began)
        everything.append(time.perf_counter() - made)
    dist.destroy_process_group()
    return median(making), median(everything)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64, help="of the first run")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {asked.ranks} ranks, from {asked.microbatches} microbatches on")
    print("| schedule | made | ready, on the worst rank |\n|---|---:|---:|")
    for name in asked.names:
        by_rank = [seconds(name, rank, asked.ranks, asked.microbatches, asked.rounds) for rank in range(asked.ranks)]
        made, ready = (1e3 * max(each) for each in zip(*by_rank, strict=True))
        print(f"| {name} | {made:.1f} ms | {ready:.0f} ms |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
