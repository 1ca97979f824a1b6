"""Models that `zbpipe.pipeline` refuses, because their stages would compute something else, and how it finds out."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbpipe

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENS = torch.arange(12).view(2, 6) % 10


class Model(nn.Module):
    """With buffers that each forward changes. `run` is the forward between the embedding and the head."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Sequential(nn.Embedding(10, 8), nn.BatchNorm1d(6))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.GELU()) for _ in range(4))
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(8, 10))

    def forward(self, tokens: Tensor) -> Any:
        x, *results = self.run(self.blocks, self.embedding(tokens))
        return [self.head(x), *results]


def pipelined(model: nn.Module, schedule: str = "ZBV", **more: Any) -> Any:
    return zbpipe.pipeline(
        model,
        schedule=schedule,
        microbatches=2,
        loss=lambda output, labels, number: output[0].square().sum() / number,
        example={"tokens": TOKENS},
        **more,
    )


def outputs(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """Of all blocks, with the first one's input."""
    found = [x]
    for block in blocks:
        found.append(block(found[-1]))
    return found


def skip_connections(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    first = blocks[0](x)
    second = blocks[1](first)
    return [blocks[3](blocks[2](second + first))]


def looped(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    return outputs(blocks, outputs(blocks, x)[-1])[-1:]


def read_by_the_head(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    found = outputs(blocks, x)
    return [found[-1] + 3 * found[1].detach()]


def returned(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    found = outputs(blocks, x)
    return [found[-1], found[2]]


def flipped_in_the_middle(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    x = blocks[1](blocks[0](x))
    return [blocks[3](blocks[2](x.flip(1)))]


def parallel(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    x = blocks[0](x)
    blocks[1](x)
    return [blocks[3](blocks[2](x))]


def skipped_at_random(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    for block in blocks:
        if torch.rand(()) < 0.5:
            x = block(x)
    return [x]


def without_the_last(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    return [blocks[2](blocks[1](blocks[0](x)))]


def ending_early(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    without_the_last(blocks, x)
    return [x]


REFUSED = {
    skip_connections: "uses the output of blocks.1 in aten.add.Tensor",
    looped: "runs blocks.0 where what follows blocks is next",
    read_by_the_head: "uses the output of blocks.0 in aten.detach.default",
    returned: "uses the output of blocks.1 in its results",
    flipped_in_the_middle: "uses the output of blocks.1 in aten.flip.default",
    parallel: "gives blocks.2 another first argument than the output of blocks.1",
    without_the_last: "uses the output of blocks.2 in aten.native_batch_norm.default",
    ending_early: "runs what follows blocks where blocks.3 is next",
}


@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_a_model_whose_stages_would_compute_something_else(run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"^Model {re.escape(REFUSED[run])}: .* To cut it by hand"):
        pipelined(Model(run))


@pytest.mark.parametrize(
    ("schedule", "advice"),
    [
        ("ZBH1", "use fewer ranks"),
        ("ZBV", "use fewer ranks, or a schedule with one stage per rank, such as ZBH1Lean"),
    ],
)
def test_too_few_blocks(schedule: str, advice: str) -> None:
    mesh = SimpleNamespace(ndim=1, size=lambda: 5, get_group=lambda: None, device_type="cpu")
    with pytest.raises(ValueError, match=f"4 blocks, and each of the .* stages needs one: {advice}$"):
        pipelined(Model(lambda blocks, x: outputs(blocks, x)[-1:]), schedule, mesh=mesh)


def test_blocks_that_are_skipped_at_random_are_the_same_on_all_ranks() -> None:
    messages = set()
    for rank in range(5):
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match=r"skips blocks at random \(layer drop\)") as raised:
            pipelined(Model(skipped_at_random))
        messages.add(str(raised.value))
    assert len(messages) == 1


def test_the_example_changes_neither_buffers_nor_random_numbers() -> None:
    model = Model(lambda blocks, x: outputs(blocks, nn.functional.dropout(x))[-1:])
    before = {name: (each, each.clone()) for name, each in model.named_buffers()}
    state = torch.get_rng_state()
    pipelined(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, each in model.named_buffers():
        was, value = before[name]
        assert each is was
        assert torch.equal(each, value), name


def test_an_evaluation_leaves_the_modes_as_they_are() -> None:
    model = Model(lambda blocks, x: outputs(blocks, x)[-1:])
    model.blocks[1].eval()
    pipe = pipelined(model)
    before = [each.training for each in model.modules()]
    pipe.evaluate(tokens=TOKENS, labels=TOKENS)
    assert [each.training for each in model.modules()] == before
    assert not pipelined(Model(lambda blocks, x: outputs(blocks, x)[-1:]).eval()).stages[0].training
