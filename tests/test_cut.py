"""Where TorchTitan's models are cut: by what their layers multiply, unless the user said how."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zbpipe import Placement
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import LLAMA_3_8B, Checkpointing, usual_costs
from zbpipe.estimation.choice import Choice
from zbpipe.frameworks import layer_work
from zbpipe.frameworks.titan import layer_split, start_log
from zbpipe.schedule.registry import resolve

DIM, VOCABULARY = 8, 100
BLOCKS = 6
V = Placement.v(2)


class Experts(nn.Module):
    """2 of 8 experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 8, bias=False)
        self.router.top_k, self.router.num_experts = 2, 8  # type: ignore[assignment]
        self.w = nn.Parameter(torch.empty(8, DIM, 3 * DIM))


class Decoder(nn.Module):
    def __init__(self, images: int = 0) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(n): nn.Linear(DIM, 3 * DIM) for n in range(BLOCKS)})
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        if images:
            self.eye = nn.ModuleDict({"patches": nn.ModuleDict({"first": nn.Linear(images, DIM, bias=False)})})
        self.clock = nn.Identity()

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """As TorchTitan's configs have it, for heads that are DIM wide together."""
        logging.info("this is said when a job starts, and not by zbpipe")
        products = sum(p.numel() for p in model.parameters())
        return products, 6 * products + 6 * BLOCKS * 2 * DIM * seq_len


def titans(num_stages: int, num_layers: int, first: int = 1, last: int = 1) -> list[list[str]]:
    """For one stage; for more it says how it was asked. A clock is in all of them."""
    names = ["tok_embeddings", *(f"layers.{n}" for n in range(num_layers)), "norm", "lm_head", "clock"]
    return [names] if num_stages == 1 else [[f"{num_stages} {first} {last}", "clock"], ["clock"]]


def cutting(
    how: Checkpointing = Checkpointing.NONE,
    seq_len: int = 4,
    per_stage: int | None = None,
    ends: tuple[int, int] = (1, 1),
    images: int = 0,
    by_hand: list[list[str]] | None = None,
) -> layer_split.LayerSplit:
    with torch.device("meta"):
        model = Decoder(images)
    parallelism = SimpleNamespace(
        pipeline_parallel_layers_per_stage=per_stage,
        pipeline_parallel_first_stage_less_layers=ends[0],
        pipeline_parallel_last_stage_less_layers=ends[1],
        module_fqns_per_model_part=by_hand,
    )
    return layer_split.LayerSplit(titans, BLOCKS, parallelism, layer_split.Model(model, model, seq_len), how)


def test_a_model_is_cut_by_work() -> None:
    """A block multiplies by 192 elements and attends with 32, the head by 800."""
    assert cutting().parts(V) == [
        ["tok_embeddings", "layers.0", "clock"],
        ["layers.1", "layers.2", "layers.3", "clock"],
        ["layers.4", "layers.5", "clock"],
        ["norm", "lm_head", "clock"],
    ]
    assert cutting().describe(V) == (
        "(by work; norm+lm_head counts as 3.6 blocks): tok_embeddings layers.0 clock | layers.1-3 clock | layers.4-5"
        " clock | norm lm_head clock"
    )


@pytest.mark.parametrize(
    ("how", "limit", "stages", "words"),
    [
        ("selective", None, 4, r"selective activation checkpointing: 1\.00x of 1F1B's; limit 1x, the default"),
        ("full", None, 2, r"full .*: 1\.\d\dx of 1F1B's; limit: that of Interleaved1F1B, whose step would be shorter"),
        ("full", "1.2x", 4, r"full .* and tensor parallelism over 2 ranks: 1\.\d\dx of 1F1B's; limit 1\.2x"),
        ("measured", None, 4, r"the measured costs: 0\.\d+ GiB; limit 1x, the default"),
    ],
)
def test_the_lines_before_the_first_step(
    caplog: pytest.LogCaptureFixture, how: str, limit: str | None, stages: int, words: str
) -> None:
    """A head of three blocks on one of eight stages leaves rank 0 of a wave too much work."""
    algorithm, placement, tensor = resolve("ZB"), Placement.wave(2, stages), 2 if limit else 1
    split = cutting(Checkpointing.parse("none" if how == "measured" else how))
    costs = CostModel((1.0,) * 8, (1.0,) * 8, (1.0,) * 8, activations=(2.0**24,) * 8) if how == "measured" else None
    if how == "full":
        costs = usual_costs(placement, split.checkpointing, tensor)  # of equal stages
    made = costs or usual_costs(placement, split.checkpointing, tensor, split.work(placement))
    given = MemoryLimit.parse(limit)
    running: Any = SimpleNamespace(
        schedule=algorithm.make(2, 6, stages_per_rank=stages, costs=made, memory_limit=given),
        **{"lists": SimpleNamespace(costs=costs, limit=given), "placement": placement, "algorithm": algorithm},
        **{"receives": "timed", "transport": "ideal"},
    )
    with caplog.at_level(logging.INFO):
        start_log.log_pipeline(running, Choice(algorithm, placement), split, tensor)
    begin, cut, memory, messages = caplog.messages
    enough = ". That is enough: 2 ranks need 2 each, also with 8 stages" if stages == 4 else ""
    assert begin == (
        f"Using zbpipe's pipeline schedule ZB with 6 microbatches: {stages} stages per rank in a wave{enough}"
    )
    assert cut.startswith(f"Layers by stage {split.describe(placement)}. Work by rank: ")
    assert cut.endswith(". parallelism.module_fqns_per_model_part replaces this cut")
    assert ("%; all wait for rank 0, with 13% more than average: try" in cut) == (how == "selective")
    assert (caplog.records[1].levelno == logging.WARNING) == (how == "selective")
    assert re.fullmatch(rf"Memory of the worst rank, predicted for {words}.*", memory)
    assert messages == "Messages: timed receives, for the transport 'ideal'"


def test_an_encoder_of_images_counts_on_the_first_stage() -> None:
    """Whatever its name; as many as 4 blocks. TorchTitan adds its name to the first stage."""
    first, *others, last = (split := cutting(images=4 * 224 // DIM)).parts(V)
    assert first == ["tok_embeddings", "clock"]
    assert last == ["norm", "lm_head", "clock"]
    assert sum(name.startswith("layers.") for part in others for name in part) == BLOCKS
    assert "eye.patches on the first stage counts as 4 blocks" in split.describe(V)
    assert split.work(V) == [(0, 4 * 224), (3 * 224, 0), (3 * 224, 0), (0, 800)]
    assert split.products == 4 * 224 + 6 * 224 + 800


@pytest.mark.parametrize("given", [(0, 0), (1, 2)])
def test_what_the_user_gave_is_torchtitans(given: tuple[int, int]) -> None:
    assert cutting(ends=given).parts(V)[0][0] == f"4 {given[0]} {given[1]}"
    assert cutting(per_stage=2).parts(V)[0][0] == "4 1 1"


def test_a_list_of_the_user_has_the_work_of_its_modules() -> None:
    """And other numbers of stages, with which it is compared, that of the cut by work."""
    names, *_ = titans(1, BLOCKS)
    split = cutting(by_hand=[names[:1], names[1:7], names[7:8], names[8:]])
    assert split.work(V) == [(0, 0), (6 * 224, 0), (0, 0), (0, 800)]
    assert split.work(Placement.loop(2)) == [(5 * 224, 0), (224, 800)]


@pytest.mark.parametrize(
    ("how", "again"), [("none", 0.0), ("selective", LLAMA_3_8B.recomputed("selective")), ("full", 1.0)]
)
def test_what_is_recomputed_counts_for_the_blocks_alone(how: str, again: float) -> None:
    names: list[Any] = titans(1, BLOCKS)[0][:-1]
    first, *blocks, head = layer_split.layers_of(Decoder(), names, 32.0, Checkpointing(how))
    assert first.seconds == 0
    assert [block.seconds for block in blocks] == pytest.approx([224 * (3 + again)] * BLOCKS)
    assert head.seconds == 3 * DIM * VOCABULARY
    assert head.modules == ("norm", "lm_head")


def test_a_token_goes_to_some_experts() -> None:
    assert layer_work.products(Experts()) == DIM * 8 + DIM * 3 * DIM * 2


def test_long_sequences_cost_attention() -> None:
    with torch.device("meta"):
        model = Decoder()
    assert layer_split.attention_products(layer_split.Model(model, model, 1000)) == BLOCKS * DIM * 1000
