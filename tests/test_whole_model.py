"""`zbpipe.pipeline` on small modules: which it refuses, and buffers, tied weights and files of those that it trains."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data import assert_refused, refusals
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import AdamW

import zbpipe

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENS = torch.arange(12).view(2, 6) % 10


class Model(nn.Module):
    """With buffers that each forward changes. `run` is the forward between the embedding and the head."""

    calls: Tensor

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.register_buffer("calls", torch.zeros(()))
        self.embedding = nn.Sequential(nn.Embedding(10, 8), nn.BatchNorm1d(6))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.GELU()) for _ in range(4))
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(8, 10))

    def forward(self, tokens: Tensor) -> Any:
        self.calls = self.calls + 1
        x, *results = self.run(self.blocks, self.embedding(tokens))
        self.calls = self.calls + 10
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
    found = [x]
    for block in blocks:
        found.append(block(found[-1]))
    return found


def in_order(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    return outputs(blocks, x)[-1:]


def skipped_at_random(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    for block in blocks:
        if torch.rand(()) < 0.5:
            x = block(x)
    return [x]


@pytest.mark.parametrize(("given", "words"), refusals("models"))
def test_a_model_whose_stages_would_compute_something_else(given: str, words: str) -> None:
    """`given` is the forward `x` of the blocks `b`."""
    run = eval(f"lambda b, x: {given}", {"in_order": in_order, "outputs": outputs})
    assert_refused(lambda: pipelined(Model(run)), f"Model {words} ... : ... To cut it by hand")


@pytest.mark.parametrize(
    ("schedule", "advice"), [("ZBH1", ""), ("ZBV", ", or a schedule with one stage per rank, such as ZBH1")]
)
def test_too_few_blocks(schedule: str, advice: str) -> None:
    mesh = SimpleNamespace(ndim=1, size=lambda: 5, get_group=lambda: None, device_type="cpu")
    with pytest.raises(ValueError, match=f"4 blocks, and each of the .* stages needs one: use fewer ranks{advice}$"):
        pipelined(Model(in_order), schedule, mesh=mesh)


def test_zb_has_as_many_stages_as_the_blocks_allow(caplog: pytest.LogCaptureFixture) -> None:
    """4 on one rank. The schedule is made for the work of the stages, of which the last one has the head."""
    with caplog.at_level("INFO", "zbpipe"):
        pipe = pipelined(Model(in_order), "ZB")
    assert [len(stage.blocks) for stage in pipe.stages] == [1, 1, 1, 1]
    assert "ZB runs 4 stages per rank in a loop: " in caplog.text
    assert "Blocks blocks by stage: 0-0 | 1-1 | 2-2 | 3-3" in caplog.text
    *others, last = pipe.schedule.lists.costs.f
    assert [last / each for each in others] == pytest.approx([(64 + 80) / 64] * 3)
    assert pipelined(Model(in_order), "ZB", costs=zbpipe.CostModel.uniform(zbpipe.Placement.loop(1, 2))).schedule
    with pytest.raises(ValueError, match="4 blocks, and each of the 5 stages needs one"):
        pipelined(Model(in_order), "ZB", costs=zbpipe.CostModel.uniform(zbpipe.Placement.loop(1, 5)))


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
    model = Model(in_order)
    model.blocks[1].eval()
    pipe = pipelined(model)
    before = [each.training for each in model.modules()]
    pipe.evaluate(tokens=TOKENS, labels=TOKENS)
    assert [each.training for each in model.modules()] == before
    assert not pipelined(Model(in_order).eval()).stages[0].training


def loss_of(output: Any, labels: Tensor, number: Any) -> Tensor:
    logits = output[0] if isinstance(output, list) else output
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / number


def random_tokens(seed: int, *size: int) -> Tensor:
    return torch.randint(10, size, generator=torch.Generator().manual_seed(seed))


def save_statistics(folder: Path) -> None:
    tokens = random_tokens(1, 8, 6)
    for name in ("ZBV", "1F1B"):
        model = Model(in_order)
        plain = deepcopy(model)
        pipe = zbpipe.pipeline(model, schedule=name, microbatches=4, loss=loss_of, example={"tokens": TOKENS})
        pipe.step(tokens=tokens, labels=tokens)
        for each in tokens.chunk(4):
            plain(each)
        pipe.save_pretrained(folder / name)
        saved, expected = torch.load(folder / name / "pytorch_model.bin"), plain.state_dict()
        assert saved.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(saved[key], value, msg=f"{name} {key}")
        found = pipe.evaluate(tokens=tokens, labels=tokens)
        torch.testing.assert_close(found, loss_of(plain.eval()(tokens), tokens, tokens.numel()))
    with pytest.raises(RuntimeError, match=r"could not save the model in .*: TypeError: .*no_option"):
        pipe.save_pretrained(folder, no_option=True)


def test_saved_buffers_are_those_of_the_model_in_one_piece(tmp_path: Path) -> None:
    run_ranks(2, save_statistics, tmp_path)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(outputs(self.blocks, self.embedding(tokens))[-1])  # type: ignore[no-any-return]


MAX_NORM = 1.2
"""Steps with two batches exceed it."""


def train_tied(name: str) -> None:
    model = Tied().double()
    plain = deepcopy(model)
    pipe = zbpipe.pipeline(model, schedule=name, microbatches=6, loss=loss_of, example={"tokens": TOKENS})
    optimizers = AdamW(pipe.parameters(), 1e-2), AdamW(plain.parameters(), 1e-2)
    step = zbpipe.OptimizerStep(pipe.schedule, optimizers[0], max_norm=MAX_NORM, predict=False)
    for number in range(10):
        for more in range(1 + number % 2):
            tokens = random_tokens(2 * number + more, 12, 6)
            pipe.step(tokens=tokens, labels=tokens)
            loss_of(plain(tokens), tokens, tokens.numel()).backward()
            with pytest.raises(ValueError, match="microbatches"):
                pipe.step(tokens=tokens[1:], labels=tokens[1:])
        expected = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizers[1].step()
        optimizers[1].zero_grad()
        step()
        if number % 3 == 0:
            step.finish()
            assert step.last_norm == pytest.approx(expected.item())
    step.finish()
    assert step.counts.validated > 0
    assert step.counts.repeated > 0
    weights = dict(plain.named_parameters(remove_duplicate=False))
    for key, weight in pipe.named_parameters():
        torch.testing.assert_close(weight, weights[key])


def train_lengths(name: str) -> None:
    pipe = zbpipe.pipeline(Tied(), schedule=name, microbatches=4, loss=loss_of, example={"tokens": TOKENS})
    plain = Tied()
    for length in (6, 9, 6):
        tokens = random_tokens(length, 8, length)
        loss_of(plain(tokens), tokens, tokens.numel()).backward()
        pipe.step(tokens=tokens, labels=tokens)
    for key, weight in pipe.named_parameters():
        torch.testing.assert_close(weight.grad, plain.get_parameter(key).grad)


def train_both() -> None:
    train_tied("ZBH2")
    train_lengths("1F1B")


def test_tied_weights_on_two_ranks_and_batches_of_other_lengths() -> None:
    run_ranks(2, train_both)
