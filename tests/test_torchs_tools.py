"""torch's dumps of lists from zbpipe's schedules, and what each reads of the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_fn, reference
from pipelines import Pipeline, as_rank
from ranks import run_ranks
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

import zbpipe
from zbpipe.schedule import registry

MICROBATCHES = 4


@pytest.fixture
def fake_group() -> Iterator[None]:
    with as_rank(0, 2):
        yield


def fake_stages(name: str) -> list[PipelineStage]:
    placement = registry.resolve(name).place(2)
    cpu = torch.device("cpu")
    return [PipelineStage(torch.nn.Linear(2, 2), index, placement.num_stages, cpu) for index in placement.stages_on(0)]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", ["ZBV", "ZBH1", "VHalf", "ZBVLean"])
def test_a_dump_has_only_what_torch_reads(name: str, tmp_path: Path) -> None:
    file = str(tmp_path / "dump.csv")
    schedule: Any = zbpipe.build_pipeline_schedule(name, fake_stages(name), MICROBATCHES, loss_fn)
    before = schedule.pipeline_order_with_comms
    schedule._dump_csv(file, format="compute_comms")
    assert schedule.pipeline_order_with_comms is before
    for row in Path(file).read_text().splitlines():
        for cell in row.split(","):
            assert str(_Action.from_str(cell)) == cell
    runtime: Any = _PipelineScheduleRuntime(fake_stages(name), MICROBATCHES, loss_fn=loss_fn)
    runtime._load_csv(file, format="compute_comms")
    assert zbpipe.Schedule.from_csv(Path(file).read_text()).ops == schedule.schedule.ops
    schedule._dump_csv(file, format="compute_only")
    assert Path(file).read_text().split() == schedule.schedule.to_csv().split()


def test_a_kind_that_torch_does_not_know_is_in_no_dump() -> None:
    """What makes the test before mean something: torch before 2.15 reads a wait for a send as a W."""
    if "WAIT_SEND_F" not in _ComputationType.__members__:
        assert str(_Action.from_str("0WAIT_SEND_F1")) == "0W"


def after_a_step(make: Any) -> dict[str, torch.Tensor]:
    """This rank's gradients after two steps of what `make` makes of stages, each from zero."""
    pipeline = Pipeline("ZBV", MICROBATCHES, make=lambda name, stages, *_: make(stages))
    tokens, targets = batch(MICROBATCHES)
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.run(tokens, target=targets)
    return pipeline.gradients()


def dumped_and_read(folder: str) -> None:
    """On two ranks: torch's runtime runs what zbpipe dumped, and zbpipe's class what torch dumped."""
    ours, theirs = f"{folder}/ours{dist.get_rank()}.csv", f"{folder}/theirs{dist.get_rank()}.csv"

    def make_ours(stages: Any) -> Any:
        built = zbpipe.ScheduleZBV(stages, MICROBATCHES, loss_fn)
        built._dump_csv(ours, format="compute_comms")
        return built

    def read_by_torch(stages: Any) -> Any:
        runtime: Any = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_fn)
        runtime._load_csv(ours, format="compute_comms")
        runtime._dump_csv(theirs, format="compute_comms")
        return runtime

    def read_by_us(stages: Any) -> Any:
        built = zbpipe.ScheduleZBV(stages, MICROBATCHES, loss_fn)
        built._load_csv(theirs, format="compute_comms")
        return built

    _, expected = reference(4, MICROBATCHES)
    for make in (make_ours, read_by_torch, read_by_us):
        found = after_a_step(make)
        own = tuple(f"{index}." for index in ((0, 3), (1, 2))[dist.get_rank()])
        torch.testing.assert_close(found, {name: each for name, each in expected.items() if name.startswith(own)})


@pytest.mark.long
def test_what_was_dumped_runs_right(tmp_path: Path) -> None:
    run_ranks(2, dumped_and_read, str(tmp_path))
