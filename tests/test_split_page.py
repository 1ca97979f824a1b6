"""docs/the-split.md lists what is refused as the code says it; `--write-compatibility` writes the list anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_waiting import TOKENS, WIDTH, Fork, overwrite
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zbpipe

PAGE = Path(__file__).parent.parent / "docs" / "the-split.md"
_TABLE = re.compile(r"(?<=## What is refused\n\n).*?(?=\n\n## )", re.DOTALL)


def two_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def build(first: nn.Module, last: nn.Module | None = None, name: str = "ZBV", **options: Any) -> Any:
    stages = [PipelineStage(m, i, 2, torch.device("cpu")) for i, m in enumerate((first, last or two_linear()))]
    return zbpipe.build_pipeline_schedule(name, stages, 2, nn.functional.mse_loss, **options)


def step(schedule: Any) -> None:
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    schedule.step(x, target=x.detach())


def in_ddp() -> None:
    build(DistributedDataParallel(two_linear()))


def sharded_in_part() -> None:
    module = two_linear()
    fully_shard(module[0], mesh=init_device_mesh("cpu", (1,)))
    step(build(module))


def leaves_unreduced() -> None:
    module = two_linear()
    fully_shard(module[0], mesh=init_device_mesh("cpu", (1,)))
    schedule = build(module)
    torchs = schedule._stages[0].backward_maybe_with_nosync

    def backward_of_a_framework(kind: str, tensors: Any, last_backward: bool = False) -> Any:
        return torchs(kind, tensors, last_backward)

    schedule._stages[0].backward_maybe_with_nosync = backward_of_a_framework
    step(schedule)


def compiled_with_torchs_split() -> None:
    module = two_linear()
    module[0].compile(backend="aot_eager")
    build(module, split_backward="autograd")


def in_cuda_graphs() -> None:
    module = two_linear()
    module[0].compile(mode="reduce-overhead")
    build(module)


def nothing_to_defer() -> None:
    build(nn.LayerNorm(WIDTH), split_backward="strict")


def shared_and_scaled() -> None:
    shared = two_linear()
    build(shared, shared, "ZBVZeroBubble")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = two_linear()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=True)  # type: ignore[no-any-return]


def reentrant() -> None:
    step(build(Checkpointed(), Checkpointed()))


def changed_later() -> None:
    module = Fork(lambda dy: 2 * dy)
    schedule = build(module)
    step(schedule)
    module.back = overwrite
    step(schedule)


CASES: dict[str, tuple[str, Callable[[], None]]] = {
    "a stage in `DistributedDataParallel`": ("construction", in_ddp),
    "`fully_shard` on a part of a stage alone": ("first step", sharded_in_part),
    "the same with a framework's backward in the place of torch's, which reduces nothing at the end": (
        "last W",
        leaves_unreduced,
    ),
    "torch's split on a compiled stage": ("construction", compiled_with_torchs_split),
    "a module that is compiled to run in CUDA graphs (Inductor's configuration: first step)": (
        "construction",
        in_cuda_graphs,
    ),
    '`split_backward="strict"` and nothing to leave to W': ("construction", nothing_to_defer),
    "a parameter in two stages of a rank, torch's own schedule, `scale_grads=True`": (
        "construction",
        shared_and_scaled,
    ),
    "a checkpoint with `use_reentrant=True`, shapes inferred": ("first step", reentrant),
    "something that writes into x or dY during I, and did not in the first I": ("that I", changed_later),
}


@pytest.mark.usefixtures("one_rank")
def test_the_page_lists_what_is_refused(request: pytest.FixtureRequest) -> None:
    lines = ["| what | when | the error says |", "|---|---|---|"]
    for what, (when, refuse) in CASES.items():
        with pytest.raises((ValueError, zbpipe.PipelineError)) as refused:
            refuse()
        # Without where the step was.
        words = str(refused.value).rpartition("Error: ")[2]
        lines.append(f"| {what} | {when} | {words} |")
    table = "\n".join(lines)
    text = PAGE.read_text()
    if request.config.getoption("--write-compatibility"):
        PAGE.write_text(_TABLE.sub(lambda found: table, text))
        return
    assert _TABLE.findall(text) == [table]
