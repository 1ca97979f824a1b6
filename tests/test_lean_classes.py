"""The lean schedules on torch: they find the checkpointing, agree on it, and train as without a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Checkpointing, build_stage, checkpointed
from ranks import run_ranks
from test_gradients import assert_like_reference, train
from torch import nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import registry
from zbpipe.costs import CostModel
from zbpipe.ir import OpKind, Placement
from zbpipe.runtime.build import schedule_class
from zbpipe.runtime.lean import LeanSchedule, checkpointing_of
from zbpipe.transformer import typical_costs

LEAN = ("ZBVLean", "ZBH1Lean", "VHalfLean", "VMinLean")
MICROBATCHES = (1, 3, 8)
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


def train_all(checkpointing: Checkpointing) -> dict[str, Any]:
    return {name: train(name, MICROBATCHES, checkpointing) for name in (*LEAN, "Auto")}


@pytest.mark.parametrize(
    "checkpointing", ["selective", *(pytest.param(each, marks=pytest.mark.zoo) for each in ("none", "full"))]
)
def test_gradients(checkpointing: Checkpointing) -> None:
    per_rank = run_ranks(2, train_all, checkpointing, timeout=240)
    for name in (*LEAN, "Auto"):
        num_stages = registry.lookup(name).place(2).num_stages
        assert_like_reference([results[name] for results in per_rank], num_stages, MICROBATCHES)


# --- what the modules show ---


def seen(*modules: nn.Module) -> str:
    stages: list[Any] = [type("Stage", (), {"submod": module}) for module in modules]
    return checkpointing_of(stages)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_it_finds_the_checkpointing(checkpointing: Checkpointing) -> None:
    assert seen(build_stage(0, 4, checkpointing)) == checkpointing
    assert seen(nn.Embedding(2, 2), build_stage(3, 4, checkpointing)) == checkpointing


def test_some_layers_wrapped_are_selective() -> None:
    """Every second block, as TorchTitan 0.2 can have it; or on one stage only."""
    assert seen(nn.Sequential(checkpointed(Block(), "full"), Block())) == "selective"
    assert seen(checkpointed(Block(), "full"), Block()) == "selective"
    assert seen(nn.Sequential(checkpointed(Block(), "full"), nn.Linear(2, 2))) == "full", "a head is no block"


def test_compiled_blocks() -> None:
    assert seen(nn.ModuleList([torch.compile(checkpointed(Block(), "full"))])) == "full"  # type: ignore[list-item]


def test_models_of_transformers_say_it() -> None:
    model = nn.Sequential(Block())
    setattr(model[0], "gradient_checkpointing", True)  # noqa: B010
    assert seen(model) == "full"


# --- one schedule on all ranks ---


def build(name: str, wrapped: Checkpointing, **options: Any) -> tuple[LeanSchedule, dict[int, nn.Module]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_stages = registry.lookup(name).place(ranks).num_stages
    indices = zbpipe.stage_indices(name, rank=rank, num_ranks=ranks)
    modules = {index: build_stage(index, num_stages, wrapped) for index in indices}
    stages = [PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in modules.items()]
    loss_fn = partial(nn.functional.cross_entropy)
    runtime: Any = zbpipe.build_pipeline_schedule(
        name, stages, 8, lambda logits, target: loss_fn(logits.flatten(0, 1), target.flatten()), **options
    )
    return runtime, modules


def step(runtime: Any, modules: dict[int, nn.Module]) -> None:
    tokens = torch.zeros(16, 6, dtype=torch.long)
    last = runtime.placement.num_stages - 1
    runtime.step(*([tokens] if 0 in modules else []), target=tokens if last in modules else None)


def agree_on_the_leanest() -> list[tuple[str, str]]:
    """Rank 0 sees full checkpointing, rank 1 none: both run what full needs."""
    seen: Checkpointing = "full" if dist.get_rank() == 0 else "none"
    runtime, modules = build("ZBVLean", seen)
    before = str(runtime.checkpointing)
    step(runtime, modules)
    step(runtime, modules)
    return [(before, str(runtime.checkpointing)), (str(runtime.schedule), runtime.schedule.name)]


def test_ranks_agree_on_what_keeps_least() -> None:
    first, second = run_ranks(2, agree_on_the_leanest)
    assert (first[0], second[0]) == (("full", "full"), ("none", "full"))
    assert first[1] == second[1]


def with_another_schedule() -> str:
    name = "ZBVLean" if dist.get_rank() == 0 else "VHalf"
    runtime, modules = build(name, "none")
    try:
        step(runtime, modules)
    except zbpipe.PipelineError as error:
        return str(error)
    return "it ran"


def test_another_schedule_on_another_rank_is_an_error_on_both() -> None:
    for message in run_ranks(2, with_another_schedule):
        assert "the ranks have different schedules" in message
        assert "ZBVLean with 8 microbatches, checkpointing: none" in message
        assert "VHalf with 8 microbatches" in message


def said() -> list[Any]:
    """What the caller says wins over what the modules show, and needs no exchange."""
    full, _ = build("ZBVLean", "none", checkpointing="full")
    times = CostModel.uniform(Placement.v(1), 1, 2, 3)
    measured, _ = build("ZBVLean", "full", costs=times)
    try:
        build("ZBVLean", "full", checkpointing="some")
    except ValueError as error:
        refusal = str(error)
    build("ZBVLean", "full", memory_limit="3x")
    adopted, modules = build("VMinLean", "full")
    has_i = any(op.kind is OpKind.I for ops in adopted.schedule for op in ops)
    adopted.adopt(zbpipe.generate("ZBV", 1, 8))
    step(adopted, modules)
    return [full.checkpointing, measured.checkpointing, refusal, has_i, adopted.schedule.name]


def test_what_is_said_wins() -> None:
    (found,) = run_ranks(1, said)
    unknown = "checkpointing = 'some' is none of none, selective, full"
    assert found == ["full", None, unknown, False, "ZBV"]


@pytest.mark.parametrize("name", LEAN)
def test_public_classes(name: str) -> None:
    kind = getattr(zbpipe, f"Schedule{name}")
    assert kind.schedule_name == name
    assert issubclass(kind, LeanSchedule)
    assert schedule_class(name.upper()) is kind


def test_typical_costs_of_each_checkpointing_differ() -> None:
    tables = {zbpipe.generate("ZBVLean", 4, 16, costs=typical_costs(Placement.v(4), each)) for each in CHECKPOINTING}
    assert len(tables) == len(CHECKPOINTING)
