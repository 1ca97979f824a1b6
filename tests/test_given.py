"""Schedules and plans as they are, without a name or a file: on one rank, and from the first rank to all."""

import logging
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pipelines import Pipeline, on_one_rank
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import schedules

import zbpipe
from zbpipe.frameworks.installation import find_algorithm, uninstall
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.measure.profiler import log_visibly
from zbpipe.runtime.ranks import agreement
from zbpipe.runtime.schedules import RegisteredSchedule


def trained(schedule: str | zbpipe.Schedule | zbpipe.Plan) -> tuple[RegisteredSchedule, list[torch.Tensor]]:
    """On one rank; the weight gradients of its two stages."""
    torch.manual_seed(0)
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    built = on_one_rank(parts, 4, schedule, nn.functional.mse_loss)
    built.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    assert isinstance(built, RegisteredSchedule)
    return built, [part.weight.grad for part in parts if part.weight.grad is not None]


@pytest.mark.usefixtures("one_rank")
def test_a_schedule_or_a_plan_runs_as_it_is() -> None:
    _, expected = trained("ZBV")
    schedule = zbpipe.generate("ZBV", 1, 4)
    costs = zbpipe.CostModel.uniform(zbpipe.Placement.v(1), 1.0, 1.2, 0.8)
    plan = zbpipe.plan(1, 4, costs, placements=["v"], budget=1e3)
    for given, ops in ((schedule, schedule), (plan, plan.schedule)):
        built, gradients = trained(given)
        assert built.schedule == ops
        assert len(gradients) == 2
        torch.testing.assert_close(gradients, expected)
    assert trained(plan)[0].lists.costs == costs
    adopting, _ = trained("ZBV")
    adopting.adopt(plan)
    assert (adopting.schedule, adopting.lists.costs) == (plan.schedule, costs)
    # A name means its own class, also after a schedule of that name was given.
    assert type(trained("ZBV")[0]) is zbpipe.ScheduleZBV


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_step_of_a_plan_and_of_a_schedule() -> None:
    """Neither is registered under its name."""
    costs = zbpipe.CostModel.uniform(zbpipe.Placement.v(1), 1.0, 1.2, 0.8)
    plan = zbpipe.plan(1, 4, costs, placements=["v"], budget=1e3)
    for given in (plan, replace(zbpipe.generate("ZBV", 1, 4), name="mine")):
        built, _ = trained(given)
        optimizer = torch.optim.SGD([p for stage in pipelining.stages_of(built) for p in stage.submod.parameters()])
        zbpipe.OptimizerStep(built, optimizer, max_norm=1.0)()
        built.step(torch.ones(4, 4), target=torch.zeros(4, 4))


@pytest.mark.usefixtures("one_rank")
def test_a_file_is_read_once_a_job(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(zbpipe.generate("ZBV", 1, 4).to_csv())
    built, _ = trained(str(file))
    assert type(built).__name__ == "ScheduleFromFile"
    for content in (zbpipe.generate("ZBV", 1, 8).to_csv(), None):
        file.write_text(content) if content else file.unlink()
        with pytest.raises(ValueError, match=r"is a table for 4 microbatches, but the job has 3"):
            built.step(torch.ones(3, 4), target=torch.zeros(3, 4), microbatches=3)
        built.remake(zbpipe.CostModel.uniform(zbpipe.Placement.v(1)))
        built.lists.gain_of_running_ahead()
        built.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    # The next job reads it again.
    file.write_text(zbpipe.generate("1F1B", 1, 4).to_csv())
    with pytest.raises(ValueError, match="has 1 stages in all"):
        trained(str(file))


def test_a_framework_reads_a_file_once_a_job(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(zbpipe.generate("ZBV", 2, 4).to_csv())
    zbpipe.install()
    try:
        shown, algorithm = schedules.get_schedule_class(str(file)), find_algorithm(str(file))
        file.unlink()
        assert schedules.get_schedule_class(str(file)) is shown
        assert find_algorithm(str(file)) is algorithm
    finally:
        uninstall()


def test_what_a_job_finds_is_seen_where_nobody_asked_for_information(caplog: pytest.LogCaptureFixture) -> None:
    quiet, usual = logging.getLogger("quiet.job"), logging.getLogger("usual.job")
    quiet.setLevel(logging.WARNING)
    usual.setLevel(logging.INFO)
    log_visibly(quiet, "found %d", 1)
    log_visibly(usual, "found %d", 2)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "found 1"),
        ("INFO", "found 2"),
    ]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [(ValueError("no"), ValueError, r"^no$"), (KeyError("a"), RuntimeError, "KeyError.'a'")],
)
def test_what_ends_a_search_ends_it_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], words: str
) -> None:
    """Here the same rank asks twice."""
    monkeypatch.setattr(agreement, "is_alone", lambda group: False)
    search = mock.Mock(side_effect=error)
    for _ in range(2):
        with pytest.raises(raised, match=words):
            agreement.find_once("which", search)
    search.assert_called_once()


def from_the_first() -> list[str]:
    def make() -> zbpipe.Plan:
        assert dist.get_rank() == 0, "the others do not plan"
        return zbpipe.plan(2, 4, (1, 1.2, 0.8), budget=1e3)

    def fail() -> zbpipe.Schedule:
        raise KeyError("costs")

    planned = zbpipe.from_first_rank(make)
    assert planned.timeline.costs == zbpipe.CostModel.uniform(planned.schedule.placement, 1.0, 1.2, 0.8)
    built = Pipeline(planned, 4, lambda *_: nn.Linear(4, 4), nn.functional.mse_loss).schedule
    assert built.lists.costs == planned.timeline.costs
    found = [str(planned.schedule)]
    for wrong in (fail, lambda: "ZBV"):
        try:
            zbpipe.from_first_rank(wrong)  # type: ignore[type-var]
        except ValueError as error:
            found.append(str(error))
    return found


def test_the_first_ranks_plan_reaches_all() -> None:
    first, second = run_ranks(2, from_the_first)
    assert first == second
    assert first[0].startswith("rank 0: 0F0 ")
    assert first[1:] == [
        "the first rank has no schedule for the others: KeyError: 'costs'",
        "the first rank has no schedule for the others: it made 'ZBV', not a zbpipe.Schedule or a zbpipe.Plan",
    ]
