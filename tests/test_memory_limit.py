"""The spellings of a memory limit mean the same in each function, option, file and command that takes one."""

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import CostModel, Placement
from zbpipe.costs import Link
from zbpipe.costs.job import SPELLINGS, MemoryLimit, memory_of_1f1b
from zbpipe.frameworks.options import Options
from zbpipe.schedule.ir import OpKind
from zbpipe.testing import cost_models

GB = 1e9
IN_BYTES = CostModel((1,) * 4, (1,) * 4, (1,) * 4, (GB, 2 * GB, 2 * GB, GB), working={OpKind.B: GB / 4})
"""Of four stages on a V of two ranks: 3 GB a microbatch on each, of which 1F1B holds two, and a quarter of one."""
NOTHING_KEPT = replace(IN_BYTES, activations=(0,) * 4, working={OpKind.F: GB})
HOST = CostModel.uniform(Placement.v(2), host=Link(bandwidth=1))


def built(schedule: str, **options: Any) -> Any:
    # A generator, because some schedules read the stages more than once.
    stages: Any = (PipelineStage(nn.Linear(4, 4), index, 2, torch.device("cpu")) for index in range(2))
    return zbpipe.build_pipeline_schedule(schedule, stages, 4, nn.functional.mse_loss, **options)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("limit", [2 * GB, "2GB", "2 microbatches", "2.0x"])
def test_a_plan_and_a_job_mean_the_same(limit: float | str) -> None:
    costs = CostModel((1, 1), (1, 1), (1, 1), (0.5 * GB, 0.5 * GB))
    plan = zbpipe.plan(1, 4, costs, limit, placements="v", budget=1e4)
    job = built("ZB", costs=costs, memory_limit=limit).schedule
    assert plan.limits == (2 * GB,)
    assert job == zbpipe.generate("ZB", 1, 4, costs=costs, memory_limit=plan.limits)
    for schedule in (plan.schedule, job):
        assert zbpipe.validate(schedule, limit, costs) == []
    with pytest.raises(ValueError, match="memory_limit = 500000000 is too small"):
        zbpipe.plan(1, 4, costs, 0.5 * GB, placements="v")
    with pytest.raises(ValueError, match="memory_limit = 500000000 is too small"):
        built("ZB", costs=costs, memory_limit=0.5 * GB)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("schedule", ["ZB", "Auto"])
@pytest.mark.parametrize("limit", [3, "3", "2GiB"])
def test_a_job_without_costs_refuses_a_limit_in_their_unit(schedule: str, limit: float | str) -> None:
    with pytest.raises(ValueError, match="but no costs are known here") as error:
        built(schedule, memory_limit=limit)
    assert str(error.value).startswith(f"memory_limit = {limit!r} is in ")
    assert "6.5GiB" not in str(error.value), "it offers only what works there"
    assert "--costs-file" in str(error.value)
    with pytest.raises(ValueError, match="but no costs are known here"):
        Options(memory_limit=limit)
    for too_small in ("0.5 microbatches", "0.5x"):
        with pytest.raises(ValueError, match=f"is too small for {schedule}: one microbatch peaks at"):
            built(schedule, memory_limit=too_small)
    assert Options(memory_limit=limit, costs_file="c.toml").memory_limit == MemoryLimit.parse(limit)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        *((limit, (4 * GB, 4 * GB)) for limit in (4 * GB, "4e9", "4gb", MemoryLimit(4 * GB, ""))),
        *((limit, (6 * GB, 6 * GB)) for limit in ("2 microbatches", MemoryLimit(2, "microbatches"))),
        *((limit, (1.5 * 6.25 * GB,) * 2) for limit in ("1.5x", MemoryLimit(1.5, "x"))),
        *(([4 * GB, math.inf], (4 * GB, math.inf)), ("1Microbatch", (3 * GB, 3 * GB)), (["2KB", "5B"], (2e3, 5.0))),
        *((["1MiB", "2 KiB"], (2.0**20, 2.0**11)), (["1.5GiB", "3MB"], (1.5 * 2.0**30, 3e6))),
        (MemoryLimit((3 * GB, math.inf), "bytes"), (3 * GB, math.inf)),
    ],
)
def test_the_spellings(limit: Any, expected: tuple[float, ...]) -> None:
    found = MemoryLimit.parse(MemoryLimit.parse(limit))
    assert found is not None
    assert found.resolve(IN_BYTES, 2, 8) == expected
    assert MemoryLimit.parse(found.written) == found


@pytest.mark.parametrize(
    ("costs", "limit", "least"),
    [
        (IN_BYTES, 1e9, "one microbatch peaks at 4000000000 on rank 1"),
        (IN_BYTES, "1GiB", "one microbatch peaks at 3.726GiB on rank 1"),
        (IN_BYTES, MemoryLimit(1e9, "bytes"), "one microbatch peaks at 4e.09B on rank 1"),
        (IN_BYTES, MemoryLimit(0.01, "x"), "one microbatch peaks at 0.64x on rank 1"),
        (IN_BYTES, "0.01 microbatches", "one microbatch peaks at 1.334 microbatches on rank 1"),
        (NOTHING_KEPT, "2 microbatches", "memory_limit = 0 is too small: one microbatch peaks at 1000000000 on rank 0"),
        (replace(IN_BYTES, host=Link(bandwidth=1)), 1e9, "rank 1 of .* may hold 1e.09, but needs 6e.09"),
    ],
)
def test_what_is_too_small_is_refused_with_the_least_limit(costs: CostModel, limit: Any, least: str) -> None:
    offload = None if costs.host is None else "all"
    with pytest.raises(ValueError, match=least) as error:
        zbpipe.plan(2, 4, costs, limit, placements="v", offload=offload, budget=1e4)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (type(copy), str(copy)) == (type(error.value), str(error.value))


@given(st.data(), st.integers(1, 5), st.integers(1, 8))
def test_1f1bs_memory_is_that_of_its_schedule(data: st.DataObject, ranks: int, microbatches: int) -> None:
    costs = data.draw(cost_models(Placement.loop(ranks)))
    simulated = max(zbpipe.simulate(zbpipe.generate("1F1B", ranks, microbatches), costs).peak_memory)
    assert memory_of_1f1b(costs, ranks, microbatches) == pytest.approx(simulated)
    assert memory_of_1f1b(lambda placement: costs, ranks, microbatches) == pytest.approx(simulated)


def test_the_pages_use_the_same_words() -> None:
    page = Path(__file__).parent.parent / "docs/costs-file.md"
    assert SPELLINGS in " ".join(page.read_text().split())
