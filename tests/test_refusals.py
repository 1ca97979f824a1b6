"""Bad input is refused at construction, by an error that names the value and the way out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import build_stage, loss_fn
from pipelines import as_rank
from torch import nn
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
from zbpipe import CostModel, OpKind, simulate
from zbpipe.costs.transport import Transport
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.adaptive import AutoSchedule
from zbpipe.runtime.build import class_of
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.schedule import registry
from zbpipe.simulator.actions import Action, Rows
from zbpipe.simulator.passes import add_messages, free_sends_early, place_receives


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


def test_torchs_constructor_arguments(one_rank: None) -> None:
    schedule = zbpipe.ScheduleZBV(
        stages(0, 1),
        4,
        loss_fn,
        None,
        None,
        None,
        scale_grads=False,
        backward_requires_autograd=True,
    )
    assert schedule.scale_grads is False


def test_stages_may_come_in_any_order(one_rank: None) -> None:
    assert [stage.stage_index for stage in build(on=stages(1, 0))._stages] == [0, 1]


@pytest.mark.parametrize(
    ("name", "indices", "num_stages", "message"),
    [
        ("ZBV", (0,), 2, r"rank 0 holds the stages \[0, 1\]; got the stages \[0\]"),
        ("ZBV", (0, 1, 2), 3, r"has 2 stages in all.*got the stages \[0, 1, 2\] built with num_stages=\[3\]"),
        ("ZBV", (0, 2), 4, r"num_stages=\[4\]"),
        ("ZBV", (), 2, "ZBV got no stages; zbpipe.stage_indices"),
        ("1F1B", (0, 1), 2, r"rank 0 holds the stages \[0\]; got the stages \[0, 1\]"),
        ("ZBVZeroBubble", (0,), 1, r"rank 0 holds the stages \[0, 1\]"),
    ],
)
def test_wrong_stages(one_rank: None, name: str, indices: tuple[int, ...], num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, stages(*indices, num_stages=num_stages))


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, None])
def test_wrong_number_of_microbatches(one_rank: None, microbatches: Any) -> None:
    with pytest.raises(ValueError, match=f"from 1 on, got {microbatches!r}"):
        build(m=microbatches)


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
    schedule.prepare(two)
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


def test_unknown_names_and_options(one_rank: None) -> None:
    with pytest.raises(ValueError, match="did you mean 'ZBV'"):
        build("ZBVV")
    with pytest.raises(ValueError, match=r"ZBV on this torch has no option 'frobnicate'; it takes: .*scale_grads"):
        build(frobnicate=1)
    with pytest.raises(
        ValueError, match=r"no option 'split_backwards'; did you mean 'split_backward'\? It takes: .*sc"
    ):
        build(split_backwards="deferred")
    with pytest.raises(ValueError, match=r"^memory_limit is for .* Auto, ZB, .* ZB, not for ZBV: omit it"):
        build(memory_limit="3x")
    with pytest.raises(ValueError, match="ZBVZeroBubble on this torch has no option 'split_backward'"):
        build("ZBVZeroBubble", split_backward="deferred")
    with pytest.raises(ValueError, match="split_backward='half' is unknown: use 'deferred'"):
        build(split_backward="half")


def test_distributed_data_parallel_is_refused(one_rank: None) -> None:
    module = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"stage 0 is wrapped by DistributedDataParallel.*use fully_shard"):
        build(on=stages(0, 1, module=module))


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


def ways_to_receive(patch: pytest.MonkeyPatch) -> list[str]:
    rank = dist.get_rank()

    def built(**options: Any) -> str:
        schedule = build("ZBV", stages(rank, 7 - rank, num_stages=8), 8, **options)
        rows = pipelining.rows_of(schedule)
        equal = CostModel.uniform(schedule.schedule.placement, comm=0.01)
        early = sorted_rows(add_messages(schedule.schedule))
        by_times = simulate(schedule.schedule, equal)
        as_said = free_sends_early(place_receives(rows, schedule.receives, by_times), schedule.schedule.placement)
        assert sorted_rows(rows) == early
        assert as_said == rows
        return f"{schedule.receives}"

    by_costs()
    usual = [built(), *(built(receives=each) for each in ("late", "early", "nearest"))]
    modelled = [built(transport=transport) for transport in Transport]
    patch.setattr(torch.version, "hip", "7.2")
    return [*usual, *modelled, built()]


def by_costs() -> None:
    """Other costs move the receives of the schedule that runs."""
    schedule = build("ZBV", stages(dist.get_rank(), 7 - dist.get_rank(), num_stages=8), 8)
    before = pipelining.rows_of(schedule)
    schedule.adopt(schedule.schedule, CostModel.uniform(schedule.schedule.placement, comm=3))
    assert before != pipelining.rows_of(schedule)


def sorted_rows(rows: Rows) -> list[list[Action]]:
    kinds = ("SEND_F", "SEND_B", "RECV_F", "RECV_B", *OpKind)
    return [sorted(each for each in row if each.kind in kinds) for row in rows]


def test_receives_stand_where_the_transport_or_the_user_wants_them() -> None:
    usual = ["timed", "late", "early", "nearest"]
    modelled = ["timed", "timed", "timed", "nearest", "timed"]
    # On the CPU nothing waits, AMD's or not.
    for rank in range(4):
        with as_rank(rank, 4), pytest.MonkeyPatch.context() as patch:
            assert ways_to_receive(patch) == [*usual, *modelled, "timed"]


def test_unknown_ways_to_receive(one_rank: None) -> None:
    with pytest.raises(ValueError, match="receives='soon' is unknown: use one of 'early', 'late', 'timed', 'nearest'"):
        build(receives="soon")
    with pytest.raises(ValueError, match="transport='wire' is unknown: use one of 'ideal', 'one-queue'"):
        build(transport="wire")
    with pytest.raises(ValueError, match=r"ZBV .* has no option 'defer_pp_recv'; .* receives"):
        build(defer_pp_recv=True)


def torchs_late_receives(name: str) -> str:
    indices = zbpipe.stage_indices(name, rank=dist.get_rank(), num_ranks=4)
    with pytest.raises(ValueError, match=name) as refused:
        build(name, stages(*indices, num_stages=8), 8, defer_pp_recv=True)
    build(name, stages(*indices, num_stages=8), 8, defer_pp_recv=False)
    return str(refused.value)


def test_torchs_late_receives_that_would_mix_up_messages_or_block() -> None:
    """torch 2.13 and 2.15 take activations for gradients, without a word; or they may wait for ever."""
    with as_rank(0, 1):
        assert build("Interleaved1F1B", defer_pp_recv=True) is not None
    for rank in range(4):
        with as_rank(rank, 4):
            mixed_up, *blocked = map(torchs_late_receives, ("ZBVZeroBubble", "Interleaved1F1B", "LoopedBFS"))
        assert "defer_pp_recv=True makes torch receive the messages of ZBVZeroBubble in another order" in mixed_up
        for name, refusal in zip(("Interleaved1F1B", "LoopedBFS"), blocked, strict=True):
            assert f"makes torch receive the messages of {name} so late that ranks would wait for each other" in refusal
            assert "deadlock: rank 0, position " in refusal
            assert "omit the option, or use one of zbpipe's schedules" in refusal


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


def test_arguments_of_the_wrong_kind(one_rank: None) -> None:
    with pytest.raises(ValueError, match="ZBV runs stages, got Linear: wrap each part of the model in a torch"):
        build(on=[nn.Linear(2, 2), nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="needs a loss_fn that can be called"):
        zbpipe.build_pipeline_schedule("ZBV", stages(0, 1), 2, loss_fn=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"n_microbatches has .* got True"):
        build(m=True)
    with pytest.raises(ValueError, match="ZBV got no stages"):
        zbpipe.ScheduleZBV(None, 2, loss_fn)  # type: ignore[arg-type]
    assert zbpipe.ScheduleZBH1(stages(0, num_stages=1)[0], 2, loss_fn)._stages[0].stage_index == 0


def test_every_public_function_names_what_it_cannot_take(one_rank: None) -> None:
    schedule: Any = build()
    layer: Any = nn.Linear(2, 2)
    layer.weight_products = {torch.bmm: 3}
    api: Any = zbpipe
    junk: dict[str, Any] = {"split_backward": 2}
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: build_any(3), "ZBV runs stages, got int: wrap each part"),
        (lambda: build_any(None), "ZBV got no stages"),
        (lambda: build(on=None, **junk), "split_backward=2 is unknown"),
        (
            lambda: build(on=[PipelineStage(layer, n, 2, torch.device("cpu")) for n in range(2)]),
            "weight_products of Linear .* got",
        ),
        (lambda: build(defer_loss="yes"), "defer_loss has to be True or False, got 'yes'"),
        (lambda: schedule.adopt("ZBV"), "adopt takes a zbpipe.Schedule, .* got 'ZBV'"),
        (
            lambda: schedule.adopt(zbpipe.generate("1F1B", 1, 2)),
            r"stages on the ranks \(0,\), but they are on \(0, 0\)",
        ),
        (lambda: api.Profiler(None), "takes a schedule on its stages, .* got None"),
        (lambda: api.Profiler(schedule, "3"), "whole number from 1 on, got '3'"),
        (lambda: api.Profiler(schedule, group=2), "group has to be a process group .* got 2"),
        (lambda: api.Profiler(schedule, done="x"), "done has to be a function, got 'x'"),
        (lambda: api.GradientCheck("ZBV"), "takes a schedule on its stages, .* got 'ZBV'"),
        (lambda: api.GradientCheck(schedule, 1.5), "from 1 on, got 1.5"),
        (lambda: api.GradientCheck(schedule, tolerance="x"), "above 0, .* got tolerance='x'"),
        (lambda: api.check_gradients(None, torch.ones(2)), r"takes a model or the parts of one, .* got None"),
        (lambda: api.check_gradients([], torch.ones(2)), r"takes a model or the parts of one, .* got \[\]"),
        (lambda: api.check_gradients(nn.Linear(2, 2), None), "0 samples do not make 2 microbatches"),
        (lambda: api.check_gradients(nn.Linear(2, 2), torch.ones(2, 2), microbatches=0), "microbatches has .* got 0"),
        (lambda: AutoSchedule(stages(0, 1), 2, loss_fn, profile_steps=0), "profile_steps has .* got 0"),
        (lambda: api.install(3), "named by a string, .* got 3"),
        (lambda: api.install("ZBV", everywhere="yes"), "everywhere has to be True or False, got 'yes'"),
        (lambda: api.install("ZBV", check_gradients=0), "from 1 on, got 0"),
        (lambda: api.install("ZBV", trace=3), "trace has to be the path of a file, got 3"),
        (lambda: api.install("ZBV", split_backward="half"), "split_backward='half' is unknown"),
        (lambda: api.titan.plug_in("ZBV"), "plug_in takes options from .* got 'ZBV'"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def build_any(on: Any) -> object:
    return zbpipe.build_pipeline_schedule("ZBV", on, 2, loss_fn)


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
