"""ZB and ZBLoop on torch: they find the checkpointing, and agree on it. Their gradients: test_gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Checkpointing, build_stage, checkpointed
from pipelines import Pipeline
from ranks import run_ranks
from torch import nn

import zbpipe
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import typical_costs
from zbpipe.runtime.adaptive import AdaptiveSchedule, checkpointing_of
from zbpipe.runtime.build import class_of
from zbpipe.schedule.ir import OpKind, Placement

NAMES = ("ZB", "ZBLoop")
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


# --- what the modules show ---


def of_transformers() -> nn.Module:
    """Whose models say it."""
    model = nn.Sequential(Block())
    setattr(model[0], "gradient_checkpointing", True)  # noqa: B010
    return model


def full() -> nn.Module:
    return checkpointed(Block(), "full")


@pytest.mark.parametrize(
    ("checkpointing", "modules"),
    [
        *((each, [build_stage(0, 4, each)]) for each in CHECKPOINTING),
        *((each, [nn.Embedding(2, 2), build_stage(3, 4, each)]) for each in CHECKPOINTING),
        # Every second block, as TorchTitan 0.2 can have it; or on one stage only. A head is no block.
        ("selective", [nn.Sequential(full(), Block())]),
        ("selective", [full(), Block()]),
        ("full", [nn.Sequential(full(), nn.Linear(2, 2))]),
        ("full", [nn.ModuleList([torch.compile(full())])]),  # type: ignore[list-item]
        ("full", [of_transformers()]),
    ],
)
def test_it_finds_the_checkpointing(checkpointing: str, modules: list[nn.Module]) -> None:
    assert checkpointing_of(modules) == checkpointing


# --- one schedule on all ranks ---


def build(name: str, wrapped: Checkpointing, **options: Any) -> Pipeline:
    return Pipeline(name, 8, lambda index, num_stages: build_stage(index, num_stages, wrapped), **options)


def step(pipeline: Pipeline) -> None:
    tokens = torch.zeros(16, 6, dtype=torch.long)
    pipeline.run(tokens, target=tokens)


def agree_on_the_leanest() -> tuple[list[tuple[str, str]], str]:
    """Rank 0 sees full checkpointing, rank 1 none: both run what full needs. Then they have different schedules."""
    seen: Checkpointing = "full" if dist.get_rank() == 0 else "none"
    pipeline = build("ZB", seen)
    runtime = pipeline.schedule
    before = str(runtime.checkpointing)
    step(pipeline)
    step(pipeline)
    found = [(before, str(runtime.checkpointing)), (str(runtime.schedule), runtime.schedule.name)]
    try:
        step(build("ZB" if dist.get_rank() == 0 else "VHalf", "none"))
    except zbpipe.PipelineError as error:
        return found, str(error)
    return found, "it ran"


def test_ranks_agree_on_what_keeps_least_and_refuse_another_schedule() -> None:
    (first, said), (second, too) = run_ranks(2, agree_on_the_leanest)
    assert (first[0], second[0]) == (("full", "full"), ("none", "full"))
    assert first[1] == second[1]
    for message in (said, too):
        assert "the ranks have different schedules" in message
        assert "ZB with 8 microbatches, checkpointing: none" in message
        assert "VHalf with 8 microbatches" in message


def of_iterator(name: str, stages: Any, *more: Any, **options: Any) -> Any:
    return zbpipe.build_pipeline_schedule(name, iter(stages), *more, **options)


def said() -> list[Any]:
    """What the caller says wins over what the modules show, and needs no exchange."""
    full = build("ZB", "none", checkpointing="full", make=of_iterator).schedule
    times = CostModel.uniform(Placement.v(1), 1, 2, 3)
    measured = build("ZB", "full", costs=times).schedule
    try:
        build("ZB", "full", checkpointing="some")
    except ValueError as error:
        refusal = str(error)
    build("ZB", "full", memory_limit="3x")
    pipeline = build("ZB", "full")
    adopted = pipeline.schedule
    has_i = any(op.kind is OpKind.I for ops in adopted.schedule for op in ops)
    adopted.adopt(zbpipe.generate("ZBV", 1, 8))
    step(pipeline)
    return [full.checkpointing, measured.checkpointing, refusal, has_i, adopted.schedule.name]


def test_what_is_said_wins() -> None:
    (found,) = run_ranks(1, said)
    unknown = "checkpointing='some' is unknown: use one of 'none', 'selective', 'full'"
    assert found == ["full", None, unknown, False, "ZBV"]


@pytest.mark.parametrize("name", NAMES)
def test_public_classes(name: str) -> None:
    kind = getattr(zbpipe, f"Schedule{name}")
    assert kind.algorithm.name == name
    assert issubclass(kind, AdaptiveSchedule)
    assert class_of(name.upper()) is kind
    tables = {
        zbpipe.generate(name, 4, 16, costs=typical_costs(kind.algorithm.place(4), each)) for each in CHECKPOINTING
    }
    assert len(tables) == len(CHECKPOINTING)
