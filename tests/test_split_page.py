"""docs/the-split.md lists what is refused as the code says it; `--write-compatibility` writes the list anew."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_waiting import TOKENS, WIDTH, fork, overwrite
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zoo.case import bare

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


def sharded_in_part() -> Any:
    module = two_linear()
    fully_shard(module[0], mesh=init_device_mesh("cpu", (1,)))
    return build(module)


def leaves_unreduced() -> None:
    schedule = sharded_in_part()
    torchs = schedule._stages[0].backward_maybe_with_nosync

    def backward_of_a_framework(kind: str, tensors: Any, last_backward: bool = False) -> Any:
        return torchs(kind, tensors, last_backward)

    schedule._stages[0].backward_maybe_with_nosync = backward_of_a_framework
    step(schedule)


def compiled(**how: Any) -> nn.Module:
    module = two_linear()
    module[0].compile(**how)
    return module


reentrant = bare(lambda s, x: checkpoint(s.inside, x, use_reentrant=True), inside=two_linear)


def changed_later() -> None:
    module = fork(lambda dy: 2 * dy)
    schedule = build(module)
    step(schedule)
    module.back = overwrite
    step(schedule)


CASES: dict[str, tuple[str, Callable[[], object]]] = {
    "a stage in `DistributedDataParallel`": ("construction", lambda: build(DistributedDataParallel(two_linear()))),
    "`fully_shard` on a part of a stage only": ("first step", lambda: step(sharded_in_part())),
    "the same with a framework's own backward, which reduces nothing at the end": ("last W", leaves_unreduced),
    "torch's split on a compiled stage": (
        "construction",
        lambda: build(compiled(backend="aot_eager"), split_backward="autograd"),
    ),
    "a module that is compiled to run in CUDA graphs (Inductor's configuration: first step)": (
        "construction",
        lambda: build(compiled(mode="reduce-overhead")),
    ),
    '`split_backward="strict"` and nothing to leave to W': (
        "construction",
        lambda: build(nn.LayerNorm(WIDTH), split_backward="strict"),
    ),
    "a parameter in two stages of a rank, torch's own schedule, `scale_grads=True`": (
        "construction",
        lambda: build(shared := two_linear(), shared, "ZBVZeroBubble"),
    ),
    "a checkpoint with `use_reentrant=True`, shapes inferred": (
        "first step",
        lambda: step(build(reentrant(0), reentrant(1))),
    ),
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
