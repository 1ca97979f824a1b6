"""torch's dumps of lists from zbpipe's schedules, and what each reads of the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import loss_fn
from pipelines import as_rank
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

import zbpipe
from zbpipe.schedule import registry

MICROBATCHES = 4


def fake_stages(name: str) -> list[PipelineStage]:
    placement = registry.resolve(name).place(2)
    cpu = torch.device("cpu")
    return [PipelineStage(torch.nn.Linear(2, 2), index, placement.num_stages, cpu) for index in placement.stages_on(0)]


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    with as_rank(0, 2):
        yield


@pytest.mark.parametrize("name", ["ZBV", "ZBH1", "VHalf", "ZB"])
def test_a_dump_has_only_what_torch_reads_and_is_read_again(name: str, tmp_path: Path) -> None:
    file, theirs = str(tmp_path / "dump.csv"), str(tmp_path / "theirs.csv")
    schedule: Any
    again: Any
    schedule, again = (
        zbpipe.build_pipeline_schedule(each, fake_stages(each), MICROBATCHES, loss_fn)
        for each in (name, "ZB1P" if name == "ZBH1" else "VMin")
    )
    before = schedule.pipeline_order_with_comms
    schedule._dump_csv(file, format="compute_comms")
    assert schedule.pipeline_order_with_comms is before
    for row in Path(file).read_text().splitlines():
        for cell in row.split(","):
            assert str(_Action.from_str(cell)) == cell
    runtime: Any = _PipelineScheduleRuntime(fake_stages(name), MICROBATCHES, loss_fn=loss_fn)
    runtime._load_csv(file, format="compute_comms")
    assert zbpipe.Schedule.from_csv(Path(file).read_text()).ops == schedule.schedule.ops
    runtime._dump_csv(theirs, format="compute_comms")
    again._load_csv(theirs, format="compute_comms")
    assert again.schedule.ops == schedule.schedule.ops
    schedule._dump_csv(file, format="compute_only")
    assert Path(file).read_text().split() == schedule.schedule.to_csv().split()


def test_a_kind_that_torch_does_not_know_is_in_no_dump() -> None:
    """What makes the test before mean something: torch before 2.15 reads a wait for a send as a W."""
    if "WAIT_SEND_F" not in _ComputationType.__members__:
        assert str(_Action.from_str("0WAIT_SEND_F1")) == "0W"
