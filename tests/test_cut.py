"""Where models are cut: for the shortest simulated step by the times of their layers, unless the user said how."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zbpipe import Placement
from zbpipe.algorithms.zb import find_shortest
from zbpipe.costs.job import MemoryLimit
from zbpipe.costs.layers import Layer, LayerCosts, Split, balance, even_sizes, split_of
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import LLAMA_3_8B, Checkpointing, typical_times, usual_costs
from zbpipe.estimation.cut import Choice, cutting
from zbpipe.estimation.workload import Degrees
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
    def __init__(self, images: int = 0, dim: int = DIM) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleDict({str(n): nn.Linear(dim, 3 * dim) for n in range(BLOCKS)})
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCABULARY * dim // DIM, bias=False)
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


def made(
    seq_len: int = 4,
    per_stage: int | None = None,
    ends: tuple[int, int] = (1, 1),
    images: int = 0,
    by_hand: list[list[str]] | None = None,
    dim: int = DIM,
    **job: Any,
) -> layer_split.LayerSplit:
    with torch.device("meta"):
        model = Decoder(images, dim)
    parallelism = SimpleNamespace(
        pipeline_parallel_layers_per_stage=per_stage,
        pipeline_parallel_first_stage_less_layers=ends[0],
        pipeline_parallel_last_stage_less_layers=ends[1],
        module_fqns_per_model_part=by_hand,
    )
    whole = layer_split.Model(model, model, seq_len)
    return layer_split.LayerSplit(titans, BLOCKS, parallelism, whole, layer_split.Job(4, seq_len, **job))


def seconds(split: layer_split.LayerSplit, name: str) -> float:
    """F, I and W of this module, if each is a stage."""
    names = titans(1, BLOCKS)[0][:-1]
    split.by_hand = [[name] for name in names]
    return sum(split.work(Placement.loop(1, len(names)))[names.index(name)])


def test_a_model_is_cut_by_time() -> None:
    """Norms and activation functions of a narrow block take longer than its products, and the head has none."""
    parts = made().parts(V)
    assert [name for part in parts for name in part if name != "clock"] == titans(1, BLOCKS)[0][:-1]
    assert all(part[-1] == "clock" for part in parts)
    assert parts[-1][-3:] == ["norm", "lm_head", "clock"]
    head, block = (seconds(made(), name) for name in ("lm_head", "layers.3"))
    assert made().describe(V) == (
        f"(by work; norm+lm_head counts as {head / block:.2g} blocks): tok_embeddings layers.0-1 clock | layers.2 clock"
        " | layers.3-4 clock | layers.5 norm lm_head clock"
    )


def test_communication_makes_blocks_longer_and_not_the_head() -> None:
    """So their share of the head falls."""

    def of_head(**job: Any) -> float:
        split = made(1024, dim=4096, **job)
        return seconds(split, "lm_head") / seconds(split, "layers.0")

    alone, shared = of_head(), of_head(degrees=Degrees(tensor=8))
    assert shared < alone
    assert of_head(degrees=Degrees(tensor=8), hidden_tensor=1.0) > shared
    assert of_head(checkpointing=Checkpointing.FULL) < of_head(checkpointing=Checkpointing.SELECTIVE) < alone
    assert of_head(compiled=True) > alone


@pytest.mark.parametrize(
    ("how", "limit", "stages", "words"),
    [
        ("selective", None, 4, r"with selective checkpointing: 1\.00x of 1F1B's; limit 1x, the default"),
        (
            "full",
            None,
            2,
            r"with full .*: 1\.\d\dx of 1F1B's; limit: that of Interleaved1F1B, whose step would be shorter",
        ),
        ("full", "1.2x", 4, r"with full .* and tensor parallelism over 2 ranks: 1\.\d\dx of 1F1B's; limit 1\.2x"),
        ("measured", None, 4, r"from measured costs: 0\.\d+ GiB; limit 1x, the default"),
    ],
)
def test_the_lines_before_the_first_step(
    caplog: pytest.LogCaptureFixture, how: str, limit: str | None, stages: int, words: str
) -> None:
    """A head of two blocks, and images of as many on the first of eight stages, are too much work for rank 0."""
    algorithm, placement, tensor = resolve("ZB"), Placement.wave(2, stages), 2 if limit else 1
    images = 10_000_000 if how == "selective" else 0
    split = made(1024, dim=4096, images=images, checkpointing=Checkpointing.parse("none" if how == "measured" else how))
    costs = CostModel((1.0,) * 8, (1.0,) * 8, (1.0,) * 8, activations=(2.0**24,) * 8) if how == "measured" else None
    if how == "full":
        costs = usual_costs(placement, split.checkpointing, tensor)  # of equal stages
    known = costs or usual_costs(placement, split.checkpointing, tensor, split.work(placement))
    given = MemoryLimit.parse(limit)
    running: Any = SimpleNamespace(
        schedule=algorithm.make(2, 6, stages_per_rank=stages, costs=known, memory_limit=given),
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
    share, *_ = map(float, re.findall(r"(\d+\.\d)%", cut))
    assert (f"%; all wait for rank 0, with {share / 50 - 1:.0%} more than average: try" in cut) == (how == "selective")
    assert (caplog.records[1].levelno == logging.WARNING) == (how == "selective")
    assert re.fullmatch(rf"Memory of the worst rank, predicted {words}.*", memory)
    assert messages == "Messages: timed receives, for the transport 'ideal'"


def test_an_encoder_of_images_counts_on_the_first_stage() -> None:
    """Whatever its name. TorchTitan adds its name to the first stage."""
    first, *others, last = (split := made(images=1_000_000)).parts(V)
    assert first == ["tok_embeddings", "clock"]
    assert last[-3:] == ["norm", "lm_head", "clock"]
    assert sum(name.startswith("layers.") for part in (*others, last) for name in part) == BLOCKS
    assert "eye.patches on the first stage counts as" in split.describe(V)
    first_work, *_ = split.work(V)
    assert sum(first_work) == pytest.approx(seconds(split, "tok_embeddings"))
    assert seconds(made(), "tok_embeddings") == 0
    assert split.products == 8_000_000 + 6 * 224 + 800


@pytest.mark.parametrize("given", [(0, 0), (1, 2)])
def test_what_the_user_gave_is_torchtitans(given: tuple[int, int]) -> None:
    assert made(ends=given).parts(V)[0][0] == f"4 {given[0]} {given[1]}"
    assert made(per_stage=2).parts(V)[0][0] == "4 1 1"


def test_a_list_of_the_user_has_the_work_of_its_modules() -> None:
    """And other numbers of stages, with which it is compared, that of zbpipe's cut."""
    names, *_ = titans(1, BLOCKS)
    split = made(by_hand=[names[:1], names[1:7], names[7:8], names[8:]])
    first, blocks, norm, head = (sum(each) for each in split.work(V))
    assert (first, norm) == (0, 0)
    assert blocks == pytest.approx(6 * seconds(made(), "layers.0"))
    assert head == seconds(made(), "lm_head")
    assert sum(map(sum, split.work(Placement.loop(2)))) == pytest.approx(blocks + head)


@pytest.mark.parametrize(
    ("how", "again"), [("none", 0.0), ("selective", LLAMA_3_8B.recomputed("selective")), ("full", 1)]
)
def test_what_is_recomputed_counts_for_the_blocks_alone(how: str, again: float) -> None:
    """Attention's result is kept under selective checkpointing."""
    found = layer_work.by_products(192, 10, Checkpointing(how), 32.0)
    attention = 2 * 10 * 32.0
    assert (found.f, found.w) == (2 * 10 * 192 + attention, 2 * 10 * 192)
    assert found.i == pytest.approx((1 + again) * 2 * 10 * 192 + (2.5 + (how == "full")) * attention)
    assert seconds(made(checkpointing=Checkpointing(how)), "lm_head") == seconds(made(), "lm_head")


@given(
    ranks=st.integers(2, 4),
    stages=st.integers(1, 4),
    per_rank=st.integers(1, 8),
    head=st.floats(0, 5),
    how=st.sampled_from(list(Checkpointing)),
)
@settings(max_examples=15)
def test_a_cut_is_as_short_as_equal_work_and_as_equal_numbers(
    ranks: int, stages: int, per_rank: int, head: float, how: Checkpointing
) -> None:
    """Simulated with W in the gaps. No layer is lost, and no stage is empty."""
    blocks, last = (
        [typical_times(how)] * (ranks * stages * per_rank),
        tuple(head * each for each in typical_times("none")),
    )
    layers = LayerCosts(tuple(Layer(("block",), f, i, w, 0.0) for f, i, w in (*blocks, last)))
    for place in (Placement.loop, Placement.wave):
        placement = place(ranks, stages)
        cut = cutting(layers, 2 * ranks, how)(placement)
        assert [layer for stage in cut for layer in stage] == list(range(len(layers.layers)))
        assert all(cut)

        def step(split: Split, placement: Placement = placement) -> float:
            costs = usual_costs(placement, how, work=layers.times(split))
            return find_shortest("ZB", placement, 2 * ranks, costs, search=False).makespan

        others = balance(layers, placement), even_sizes(len(layers.layers), placement.num_stages)
        assert step(cut) <= min(step(split_of(each)) for each in others) * (1 + 1e-9)


def test_where_the_longer_stages_are_matters() -> None:
    """70B with TP 8: 82 layers on 16 stages, all ranks but one equal. A longer last stage costs most."""
    layers = LayerCosts((Layer(("embedding",), 0, 0, 0, 0), *[Layer(("block",), 1, 2, 0.6, 0)] * 80, _HEAD))
    placement = Placement.loop(8, 2)
    cut = list(map(len, cutting(layers, 16, Checkpointing.FULL, 8)(placement)))
    assert balance(layers, placement)[-1] == 6
    assert cut[-1] == 5
    assert max(cut) == 6
    few, many = (cutting(layers, number, Checkpointing.FULL, 8)(placement) for number in (32, 3200))
    assert few == many


_HEAD = Layer(("head",), 0.76, 0.76, 0.76, 0)


def test_a_token_goes_to_some_experts() -> None:
    assert layer_work.products(Experts()) == DIM * 8 + DIM * 3 * DIM * 2


def test_long_sequences_cost_attention() -> None:
    with torch.device("meta"):
        model = Decoder()
    assert layer_split.attention_products(layer_split.Model(model, model, 1000)) == BLOCKS * DIM * 1000
