"""Bad input is refused at construction, by an error that names the value and the way out."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    with as_rank(1, 2), pytest.raises(ValueError, match=f"ZBV on 2 pipeline ranks has 4 stages in all, and {words}"):
        build(on=stages(1, 3, num_stages=4))


def build_any(on: Any, **options: Any) -> object:
    return zbpipe.build_pipeline_schedule("ZBV", on, 2, options.pop("loss_fn", loss_fn), **options)


def wrongly_placed(name: str, *indices: int, num_stages: int = 2) -> object:
    return build(name, stages(*indices, num_stages=num_stages))


def declared(products: Any) -> list[PipelineStage]:
    layer: Any = nn.Linear(2, 2)
    layer.weight_products = products
    return stages(0, 1, module=layer)


API: Any = zbpipe
UNKNOWN = r"no option 'split_backwards'; did you mean 'split_backward'\? It takes: .*sc"
CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: wrongly_placed("ZBV", 0), r"rank 0 holds the stages \[0, 1\]; got the stages \[0\]"),
    (
        lambda: wrongly_placed("ZBV", 0, 1, 2, num_stages=3),
        r"has 2 stages in all.*got the stages \[0, 1, 2\] built with num_stages=\[3\]",
    ),
    (lambda: wrongly_placed("ZBV", 0, 2, num_stages=4), r"num_stages=\[4\]"),
    (lambda: wrongly_placed("ZBV"), "ZBV got no stages; zbpipe.stage_indices"),
    (lambda: wrongly_placed("1F1B", 0, 1), r"rank 0 holds the stages \[0\]; got the stages \[0, 1\]"),
    (lambda: wrongly_placed("ZBVZeroBubble", 0, num_stages=1), r"rank 0 holds the stages \[0, 1\]"),
    (lambda: build_any(3), "ZBV runs stages, got int: wrap each part"),
    (lambda: build_any(None), "ZBV got no stages"),
    (lambda: build_any([nn.Linear(2, 2), nn.Linear(2, 2)]), "ZBV runs stages, got Linear: wrap each part of the model"),
    (lambda: API.ScheduleZBV(None, 2, loss_fn), "ZBV got no stages"),
    (
        lambda: build(on=stages(0, 1, module=DistributedDataParallel(nn.Linear(2, 2)))),
        r"stage 0 is wrapped by DistributedDataParallel.*use fully_shard",
    ),
    *(
        (lambda on=on, how=how: build(on=stages(0, 1, module=on()), split_backward=how), r"stage 0 .*fully_shard")  # type: ignore[misc]
        for on in (
            lambda: replicate(build_stage(0, 2)),
            lambda: nn.Sequential(nn.Linear(2, 2), replicate(nn.Linear(2, 2))),
            lambda: nn.Sequential(nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2))),
        )
        for how in ("deferred", "autograd")
    ),
    (lambda: build(on=declared({torch.bmm: 3})), "weight_products of Linear .* got"),
    *((lambda m=m: build(m=m), f"from 1 on, got {m!r}") for m in (0, -1, 2.0, None, True)),  # type: ignore[misc]
    (lambda: build_any(stages(0, 1), loss_fn=3), "needs a loss_fn that can be called"),
    (lambda: build("ZBVV"), "did you mean 'ZBV'"),
    (lambda: build(frobnicate=1), r"ZBV on this torch has no option 'frobnicate'; it takes: .*scale_grads"),
    (lambda: build(split_backwards="deferred"), UNKNOWN),
    (lambda: build(memory_limit="3x"), r"^memory_limit is for .* Auto, ZB, ZBLoop, not for ZBV: omit it"),
    (
        lambda: build("ZBVZeroBubble", split_backward="deferred"),
        "ZBVZeroBubble on this torch has no option 'split_backward'",
    ),
    (lambda: build(split_backward="half"), "split_backward='half' is unknown: use 'deferred'"),
    (lambda: build(split_backward=2), "split_backward=2 is unknown"),
    (lambda: build(defer_loss="yes"), "defer_loss has to be True or False, got 'yes'"),
    (lambda: build(receives="soon"), "receives='soon' is unknown: use one of 'early', 'late', 'timed', 'nearest'"),
    (lambda: build(transport="wire"), "transport='wire' is unknown: use one of 'ideal', 'one-queue'"),
    (lambda: build(defer_pp_recv=True), r"ZBV .* has no option 'defer_pp_recv'; .* receives"),
    (lambda: build().adopt("ZBV"), "adopt takes a zbpipe.Schedule, .* got 'ZBV'"),
    (lambda: build().adopt(zbpipe.generate("1F1B", 1, 2)), r"stages on the ranks \(0,\), but they are on \(0, 0\)"),
    (lambda: API.Profiler(None), "takes a schedule on its stages, .* got None"),
    (lambda: API.Profiler(build(), "3"), "whole number from 1 on, got '3'"),
    (lambda: API.Profiler(build(), group=2), "group has to be a process group .* got 2"),
    (lambda: API.Profiler(build(), done="x"), "done has to be a function, got 'x'"),
    (lambda: API.GradientCheck("ZBV"), "takes a schedule on its stages, .* got 'ZBV'"),
    (lambda: API.GradientCheck(build(), 1.5), "from 1 on, got 1.5"),
    (lambda: API.GradientCheck(build(), tolerance="x"), "above 0, .* got tolerance='x'"),
    (lambda: API.check_gradients(None, torch.ones(2)), r"takes a model or the parts of one, .* got None"),
    (lambda: API.check_gradients([], torch.ones(2)), r"takes a model or the parts of one, .* got \[\]"),
    (lambda: API.check_gradients(nn.Linear(2, 2), None), "0 samples do not make 2 microbatches"),
    (lambda: API.check_gradients(nn.Linear(2, 2), torch.ones(2, 2), microbatches=0), "microbatches has .* got 0"),
    (lambda: AutoSchedule(stages(0, 1), 2, loss_fn, profile_steps=0), "profile_steps has .* got 0"),
    (lambda: API.install(3), "named by a string, .* got 3"),
    (lambda: API.install("ZBV", everywhere="yes"), "everywhere has to be True or False, got 'yes'"),
    (lambda: API.install("ZBV", check_gradients=0), "from 1 on, got 0"),
    (lambda: API.install("ZBV", trace=3), "trace has to be the path of a file, got 3"),
    (lambda: API.install("ZBV", split_backward="half"), "split_backward='half' is unknown"),
    (lambda: API.titan.plug_in("ZBV"), "plug_in takes options from .* got 'ZBV'"),
]


def test_every_public_function_names_what_it_cannot_take(one_rank: None) -> None:
    for call, message in CALLS:
        with pytest.raises(ValueError, match=message):
            call()


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
