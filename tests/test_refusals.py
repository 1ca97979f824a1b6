"""Bad input is refused at construction, by an error that names the value and the way out."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import assert_refused, refusals
from models import build_stage, loss_fn
from pipelines import as_rank
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import zbpipe
import zbpipe.titan
from zbpipe import CostModel
from zbpipe.costs.model import Transport
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.adaptive import AutoSchedule
from zbpipe.runtime.build import class_of
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.schedule import registry
from zbpipe.simulator.passes import add_messages


def stages(*indices: int, num_stages: int = 2, module: nn.Module | None = None) -> list[PipelineStage]:
    cpu = torch.device("cpu")
    return [PipelineStage(module or build_stage(index, num_stages), index, num_stages, cpu) for index in indices]


def build(name: str = "ZBV", on: list[PipelineStage] | None = None, m: Any = 2, **options: Any) -> Any:
    return zbpipe.build_pipeline_schedule(
        schedule=name, stages=stages(0, 1) if on is None else on, n_microbatches=m, loss_fn=loss_fn, **options
    )


def test_names_give_classes(one_rank: None) -> None:
    assert isinstance(build("zbv"), zbpipe.ScheduleZBV)
    assert isinstance(build("ZBV"), PipelineScheduleMulti)
    assert type(build("zbvzerobubble")) is ScheduleZBVZeroBubble
    assert type(build("INTERLEAVED1f1b")) is ScheduleInterleaved1F1B
    assert type(build("Interleaved1F1B", stages(0, 1, 2, num_stages=3))) is ScheduleInterleaved1F1B
    single = stages(0, num_stages=1)
    assert type(build("1f1b", single)) is Schedule1F1B
    one: Any = zbpipe.build_pipeline_schedule("1F1B", single[0], 2, loss_fn)
    assert type(one) is Schedule1F1B
    assert zbpipe.ScheduleZBH1(single[0], 2, loss_fn)._stages[0].stage_index == 0
    as_torchs = zbpipe.ScheduleZBV(
        stages(1, 0), 4, loss_fn, None, None, None, scale_grads=False, backward_requires_autograd=True
    )
    assert as_torchs.scale_grads is False
    assert [stage.stage_index for stage in as_torchs._stages] == [0, 1]


def test_numbers_of_any_whole_type(one_rank: None) -> None:
    """As numpy and data frames give them: everywhere they are Python's own from there on."""
    one: Any = np.int64(1)
    two: Any = np.int32(2)
    four: Any = torch.tensor(4)
    assert zbpipe.stage_indices("ZBV", rank=0 * one, num_ranks=one) == (0, 1)
    table = zbpipe.generate("ZBV", two, four)
    assert table == zbpipe.generate("ZBV", 2, 4)
    assert type(table.num_microbatches) is int
    planned = zbpipe.plan(two, four, (1, 1, 1), budget=1e3)
    assert type(planned.schedule.num_microbatches) is int
    assert build("1F1B", stages(0, num_stages=1), m=np.int64(4))._n_microbatches == 4
    x = torch.ones(8, 3)
    schedule: Any = zbpipe.build_pipeline_schedule(
        "ZBH1", PipelineStage(nn.Linear(3, 3), 0, 1, torch.device("cpu")), 4 * one, nn.functional.mse_loss
    )
    assert type(pipelining.num_microbatches(schedule)) is int
    check = zbpipe.GradientCheck(schedule, one)
    schedule.step(x, target=x)
    assert check.report is not None
    schedule.step(x, target=x, microbatches=two)
    schedule.eval(x, target=x, microbatches=one)
    schedule.adopt(zbpipe.generate("1F1B", one, two))
    assert zbpipe.check_gradients(nn.Linear(3, 3), x, microbatches=two).passed
    for wrong in (np.bool_(True), np.float64(2), np.array([2, 3])):
        with pytest.raises(ValueError, match="whole number"):
            build(m=wrong)
        with pytest.raises(ValueError, match="whole number"):
            schedule.step(x, target=x, microbatches=wrong)


def test_a_registered_schedule_has_to_be_runnable(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @zbpipe.register("NoWeights", placement="v", stages_per_rank=2)
    def no_weights(ranks: int, microbatches: int) -> zbpipe.Schedule:
        whole = zbpipe.generate("ZBV", ranks, microbatches)
        rows = tuple(tuple(op for op in ops if op.kind is not zbpipe.OpKind.W) for ops in whole)
        return zbpipe.Schedule("NoWeights", whole.placement, microbatches, rows)

    @zbpipe.register("Backwards", placement="v", stages_per_rank=2)
    def backwards(ranks: int, microbatches: int) -> zbpipe.Schedule:
        whole = zbpipe.generate("ZBV", ranks, microbatches)
        rows = tuple(tuple(op._replace(microbatch=microbatches - 1 - op.microbatch) for op in ops) for ops in whole)
        return zbpipe.Schedule("Backwards", whole.placement, microbatches, rows)

    @zbpipe.register("Elsewhere", placement="loop", stages_per_rank=2)
    def elsewhere(ranks: int, microbatches: int) -> zbpipe.Schedule:
        rows = ((zbpipe.Op(0, zbpipe.OpKind.F, 0),), (zbpipe.Op(1, zbpipe.OpKind.F, 0),))
        return zbpipe.Schedule("Elsewhere", zbpipe.Placement.loop(2), microbatches, rows)

    with pytest.raises(ValueError, match=r"NoWeights cannot run, 4 finding\(s\):\n  missing: rank 0, 0W0"):
        build("NoWeights")
    with pytest.raises(ValueError, match=r"last stage's forwards in the order \[1, 0\]; torch numbers the losses"):
        build("Backwards")
    with pytest.raises(ValueError, match="registered with a placement"):
        build("Elsewhere")


def test_a_registered_schedule_runs_under_its_own_class(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    zbpipe.register("Twin", placement="v", stages_per_rank=2)(registry.resolve("ZBV").generate)
    assert class_of("twin") is class_of("Twin")
    schedule = build("twin")
    assert isinstance(schedule, RegisteredSchedule)
    assert type(schedule).__name__ == "ScheduleTwin"


def test_receives_stand_where_the_transport_or_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(**options: Any) -> Any:
        return build("ZBV", stages(1, 6, num_stages=8), 8, **options)

    with as_rank(1, 4):
        usual = [built(), *(built(receives=each) for each in ("late", "early", "nearest"))]
        assert [f"{each.receives}" for each in usual] == ["timed", "late", "early", "nearest"]
        modelled = [f"{built(transport=each).receives}" for each in Transport]
        assert modelled == ["timed", "timed", "timed", "nearest", "timed"]
        early, late = (add_messages(each.schedule) for each in usual[:2])
        assert early == late
        rows = [pipelining.rows_of(each) for each in usual]
        assert all(sorted(map(str, each[1])) == sorted(map(str, rows[0][1])) for each in rows)
        assert rows[0] != rows[1]
        # Other costs move the receives of the schedule that runs.
        usual[0].adopt(usual[0].schedule, CostModel.uniform(usual[0].schedule.placement, comm=3))
        assert pipelining.rows_of(usual[0]) != rows[0]
        monkeypatch.setattr(torch.version, "hip", "7.2")  # on the CPU nothing waits, AMD's or not
        assert f"{built().receives}" == "timed"


def test_torchs_late_receives_that_would_mix_up_messages_or_block() -> None:
    """torch 2.13 and 2.15 take activations for gradients, without a word; or they may wait for ever."""
    for name in ("ZBVZeroBubble", "Interleaved1F1B", "LoopedBFS"):
        with as_rank(2, 4):
            on = stages(*zbpipe.stage_indices(name, rank=2, num_ranks=4), num_stages=8)
            with pytest.raises(ValueError, match=f"makes torch receive the messages of {name} in another order.*omit"):
                build(name, on, 8, defer_pp_recv=True)
            build(name, on, 8, defer_pp_recv=False)


def test_a_table_for_another_job(one_rank: None, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(zbpipe.generate("ZBV", 1, 3).to_csv())
    schedule = build(str(table), m=3)
    assert type(schedule).__name__ == "ScheduleFromFile"
    with pytest.raises(ValueError, match=r"table.csv is a table for 3 microbatches, but the job has 2"):
        build(str(table), m=2)
    table.write_text(zbpipe.generate("ZBV", 2, 3).to_csv())
    with pytest.raises(ValueError, match=r"table.csv is a table for 2 ranks, but the job has 1"):
        build(str(table), m=3)
    table.write_text("0F0,0X0\n")
    with pytest.raises(ValueError, match=r"holds no schedule: row 1 \(rank 0\), column 2: '0X0' is not an op"):
        build(str(table))
    with pytest.raises(ValueError, match=r"none.csv' cannot be read: No such file"):
        build(str(tmp_path / "none.csv"))


def test_stages_placed_for_another_schedule() -> None:
    """Round and round, as for Interleaved1F1B."""
    words = r"rank 1 holds the stages \[1, 2\]; got the stages \[1, 3\].*stage_indices\('ZBV', rank=1, num_ranks=2\)"
    words += " names, or take ZBLoop, which runs yours"
    with as_rank(1, 2), pytest.raises(ValueError, match=f"ZBV on 2 pipeline ranks has 4 stages in all, and {words}"):
        build(on=stages(1, 3, num_stages=4))


def declared(products: Any) -> list[PipelineStage]:
    layer: Any = nn.Linear(2, 2)
    layer.weight_products = products
    return stages(0, 1, module=layer)


NAMES: dict[str, Any] = {
    **{each.__name__: each for each in (DistributedDataParallel, AutoSchedule, replicate, build_stage, loss_fn)},
    **{each.__name__: each for each in (stages, build, declared)},
    **{"nn": nn, "torch": torch, "zbpipe": zbpipe, "make": zbpipe.build_pipeline_schedule},
    "linear": lambda: nn.Linear(2, 2),
}


def test_every_public_function_names_what_it_cannot_take(one_rank: None) -> None:
    for call, words in refusals("stages"):
        assert_refused(lambda call=call: eval(call, NAMES), words)  # type: ignore[misc]


@pytest.mark.long
@pytest.mark.versions
def test_a_torch_that_is_not_known_is_named() -> None:
    """In a process of its own: what was imported stays imported."""
    program = (
        "import torch.distributed.pipelining.schedules as schedules; del schedules._batch_p2p; import zbpipe;"
        " zbpipe.ScheduleZBV"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: zbpipe uses private names of torch 2.11 to 2.15, and torch")
    assert f"torch {torch.__version__} lacks one of them" in last
    assert "_batch_p2p" in last
