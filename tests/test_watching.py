"""`Auto` after its choice: a rank that becomes slower is found and named, and faster placements are told."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build_stage
from pipelines import Pipeline
from ranks import run_ranks
from test_steps import Kept
from torch import Tensor, nn

import zbpipe
from zbpipe import CostModel, Placement, Schedule
from zbpipe.costs import Link
from zbpipe.costs.drift import CALIBRATION
from zbpipe.costs.job import JobCosts
from zbpipe.planner.placement_advice import _on, advise_placement, uneven_stages

SLOW_FROM = 45
QUIET = CALIBRATION + 5
"""Steps in a row of one schedule before a rank becomes slow. Then it is known what is usual, also if another process on
this machine was taken for a drift."""
AFTER, MOST = 35, 250
"""Steps with a slow rank, and all."""


class Asleep(nn.Module):
    """A stage whose forward takes as long as it is told."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner = inner
        self.seconds = seconds
        self.noise = 1.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds * self.noise)
        output: Tensor = self.inner(x)
        return output


def watched(plan_out: Path) -> tuple[list[str], list[str]]:
    """The log of this rank, and the schedules of all steps. Rank 0 is slow, with both ends of the V, later rank 1."""
    kept = Kept()
    logging.getLogger("zbpipe.runtime.auto").addHandler(kept)
    pipeline = Pipeline(
        "Auto",
        4,
        lambda index, num_stages: Asleep(build_stage(index, num_stages), 0.03 if index in (0, 3) else 0.005),
        profile_steps=3,
        budget=1e4,
        plan_out=plan_out,
    )
    modules: dict[int, Any] = pipeline.modules
    schedule = pipeline.schedule
    names: list[str] = []
    random = Random(0)
    slow_from = MOST
    for number in range(MOST):
        if number == slow_from + AFTER:
            break
        noise = 1 + 0.1 * random.gauss(0, 1)  # more than other processes make
        for module in modules.values():
            module.noise = noise
        # All ranks run the same schedules.
        is_quiet = len({*names[-QUIET:]}) == 1 and not names[-1].startswith("Auto")
        if slow_from == MOST and number >= SLOW_FROM and is_quiet:
            slow_from = number
            for module in modules.values() if dist.get_rank() == 1 else ():
                module.seconds *= 16
        tokens = torch.zeros(4, 3, dtype=torch.long)
        pipeline.run(tokens, target=tokens)
        names.append(schedule.schedule.name)
    return kept.messages, names


@pytest.mark.long  # half a minute of sleeping stages
def test_a_slow_rank_is_found_and_named(tmp_path: Path) -> None:
    (told, names), (silent, others) = run_ranks(2, watched, tmp_path / "plan.csv")
    assert names == others
    assert not silent
    # Another process on this machine may be a drift, too, and then it is told in another step.
    drifts = [each for each in told if "times as long as usual: measures again" in each]
    causes = [each for each in told if "compared with the costs for which it planned" in each]
    assert 1 <= len(causes) <= len(drifts)  # the last may not be measured by the end
    assert any("rank 1 computes" in each and "rank 0 computes" not in each for each in causes), causes
    again = [name for before, name in pairwise(names) if name.startswith("Auto") and not before.startswith("Auto")]
    assert len(causes) <= len(again) <= len(drifts), names
    assert any("stage 0 (rank 0) takes" in each or "stage 3 (rank 0) takes" in each for each in told)
    assert any("with the placement" in each and "shorter than now" in each for each in told)
    assert Schedule.from_csv((tmp_path / "plan.csv").read_text()).placement != Placement.v(2)


def measured(ranks: int, **changes: Any) -> JobCosts:
    placement = Placement.v(ranks)
    return JobCosts(replace(CostModel.uniform(placement), **changes), placement)


def test_another_placement_is_told_if_it_is_faster() -> None:
    """A V with a long first and last stage, which are on one rank, waits for that rank."""
    uneven = (3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0)
    job = measured(4, f=uneven, i=uneven, w=uneven)
    here = zbpipe.plan(4, 8, job, budget=1e5).makespan
    found = advise_placement(8, job, here, budget=1e5)
    assert found is not None
    assert found.schedule.placement != Placement.v(4)
    assert "shorter than now" in found.words
    again = Schedule.from_csv(found.schedule.to_csv())
    assert again.ops == found.schedule.ops


def test_no_other_placement_is_told_if_it_gains_little() -> None:
    job = measured(4)
    here = zbpipe.plan(4, 8, job, budget=1e5).makespan
    assert advise_placement(8, job, here, budget=1e5) is None


def test_ranks_with_no_link_measured_have_the_slowest() -> None:
    """A loop sends from the last rank to the first, a V never does."""
    ways = {pair: Link(5.0 + pair[0]) for a in range(3) for pair in ((a, a + 1), (a + 1, a))}
    found = _on(Placement.loop(4, 2), measured(4, links=ways).costs)  # type: ignore[arg-type]
    assert found is not None
    assert found.link == Link(8.0)
    pairs = _on(Placement.loop(4), measured(4, f=tuple(range(8))).costs)  # type: ignore[arg-type]
    assert pairs is not None
    assert pairs.f == (1.0, 5.0, 9.0, 13.0)


def test_layers_that_should_move() -> None:
    assert uneven_stages(measured(4)) == ""
    long = (1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    words = uneven_stages(measured(4, f=long, i=long, w=long))
    assert words.startswith("stage 2 (rank 2) takes 1.78 times the average of all stages, and stage")
    assert words.endswith("(rank 0) 0.89 times: move layers there")
