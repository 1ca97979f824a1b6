"""`zbpipe estimate`: steps, memory and gains of a job that was not launched."""

import re
from dataclasses import replace
from typing import Any

import pytest

from zbpipe import CostModel, estimate
from zbpipe.cli.estimates import lines
from zbpipe.costs import JobCosts
from zbpipe.estimation import Estimate, Workload
from zbpipe.estimation.devices import Device
from zbpipe.estimation.fsdp import step_without_pipeline
from zbpipe.estimation.rates import HOST, rates
from zbpipe.estimation.rows import Step
from zbpipe.estimation.workload import Degrees, LayerWork, ParameterBytes
from zbpipe.schedule.ir import OpKind, Placement
from zbpipe.simulator.memory import peak_bytes

GIB = 2**30
_FREE = Device("toy", 2.0, 0.5, 0.5, hbm=1e30, inside=1e30, gib=100, source="", share_from="", between=1e30)
ONE_A_SECOND = replace(_FREE, latency=0.0, overhead=0.0)
"""One operation a second in training, and messages that take no time."""


def workload(layers: int = 4, degrees: Degrees | None = None, microbatches: int = 8) -> Workload:
    """Each layer computes 1 for F, 2 for I, 3 for W, keeps 1 GiB, and leaves 2 GiB to W."""
    block = LayerWork(("layers.0",), 1, 2, 3, 1000.0, GIB, 2 * GIB, ((OpKind.F, 0.5 * GIB),))
    blocks = tuple(replace(block, modules=(f"layers.{n}",)) for n in range(layers))
    degrees = degrees or Degrees(pipeline=2)
    return Workload("toy", blocks, degrees, microbatches, 10, message_bytes=0, operations=1.2, words="made up")


def named(work: Workload, *names: str, device: Device = ONE_A_SECOND, **more: Any) -> Estimate:
    return estimate(work, device, only=names, plans=False, **more)


def measured(placement: Placement, **times: Any) -> JobCosts:
    return JobCosts(CostModel.uniform(placement, **times))


def row(found: Estimate, name: str, stages: int = 1) -> Step:
    return next(step for step in found.steps if (step.schedule, step.stages_per_rank) == (name, stages))


def test_a_step_by_hand() -> None:
    """1F1B on 2 ranks, 8 microbatches: 9 times what a rank works on one, 2 layers of 6 seconds."""
    found = named(workload(), "1F1B", "ZBH1")
    usual, zbh1 = row(found, "1F1B"), row(found, "ZBH1")
    speed = 80 / (9 * 12) / 2
    figures = (usual.seconds, usual.bubble, usual.tokens_per_second, usual.mfu)
    assert figures == pytest.approx((9 * 12, 1 / 9, speed, speed * 1.2 / 2))
    # Two microbatches, and what F of a layer needs while it runs. 1000 parameters of 2 layers.
    assert usual.memory.activations == 4 * GIB
    assert usual.memory.weights + usual.memory.optimizer == ParameterBytes().total(1) * 2000
    assert usual.fits
    assert re.search(r"^1F1B .* 4\.5 .* 4\.0 ", "\n".join(lines(found)), re.MULTILINE), "in GiB"
    assert found.relative(zbh1, usual) == pytest.approx(zbh1.seconds / usual.seconds)
    assert zbh1.memory.waiting > usual.memory.waiting == 0
    assert zbh1.timeline is not None
    assert zbh1.memory.total == pytest.approx(max(peak_bytes(zbh1.timeline)) + ParameterBytes().total(1) * 2000)


def test_no_step_is_shorter_than_its_launches() -> None:
    """8 microbatches, 2 blocks on each of 2 ranks, on a GPU that takes next to no time."""
    fast = replace(ONE_A_SECOND, peak=1e12)
    for compiled, (plain, apart) in HOST.items():
        found = named(replace(workload(), compiled=compiled), "1F1B", "ZBH1", device=fast)
        assert row(found, "1F1B").seconds == pytest.approx(8 * 2 * plain, rel=1e-3)
        assert row(found, "ZBH1").seconds == pytest.approx(8 * 2 * (plain + apart), rel=1e-3)
        alone = step_without_pipeline(replace(workload(), compiled=compiled), rates(fast))
        assert alone.seconds == pytest.approx(4 * plain, rel=1e-3)  # all 4 microbatches of a GPU at once
