"""Reductions of gradients in the simulator: beside the computations of their rank, from each stage's last W on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbpipe import CostModel, Placement, Schedule, generate, simulate
from zbpipe.costs.transport import Transport
from zbpipe.simulator.timeline import Timeline
from zbpipe.views.report import report

V = Placement.v(2)


def run(name: str, reduce: float, **how: object) -> Timeline:
    """Stages that take half a second for each of F, I and W."""
    return simulate(generate(name, 2, 4), replace(CostModel.uniform(V), reduce=reduce), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reduce", "exposed"),
    # Rank 1 ends with the last W of both of its stages, one after the other.
    [(0.0, 0.0), (0.5, 0.0), (0.75, 0.5), (1.0, 1.0)],
)
def test_the_last_w_of_a_stage_hides_its_reduction(reduce: float, exposed: float) -> None:
    timeline = run("ZBV", reduce)
    assert [str(op) for op in timeline.schedule.ops[1][-2:]] == ["2W3", "1W3"]
    assert timeline.exposed_reduction == exposed
    assert timeline.makespan == run("ZBV", 0.0).makespan + exposed
    for row, spans in zip(timeline.reductions, timeline.spans, strict=True):
        for each in row:
            last = max(span.end for span in spans if span.op.stage == each.stage)
            assert last - 0.5 <= each.start
            assert each.end >= max(last, each.start + reduce)
    assert ("hidden by nothing" in report(timeline)) == (exposed > 0)


def test_without_a_split_it_begins_after_the_last_b() -> None:
    schedule = generate("1F1B", 2, 4)
    costs = replace(CostModel.uniform(schedule.placement), reduce=(3.0, 1.0))
    timeline = simulate(schedule, costs)
    assert timeline.exposed_reduction == 3.0
    assert timeline.critical_path[-1].op.stage == 0


def test_a_rank_that_ends_early_hides_it_too() -> None:
    """The path to the step's end ends where the last reduction began."""
    table = "0F0,0I0,0W0\n1F0,1I0,1W0"
    costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(1, 1), reduce=(0, 4))
    timeline = simulate(Schedule.from_csv(table, "table"), costs)
    assert [str(span.op) for span in timeline.critical_path] == ["0F0", "1F0", "1I0", "1W0"]
    assert timeline.makespan == 7.0
    assert simulate(Schedule.from_csv(table, "table"), replace(costs, reduce=(0, 2))).exposed_reduction == 0.0


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("transport", [Transport.IDEAL, Transport.ONE_QUEUE])
def test_the_next_step_waits_for_it(synchronous: bool, transport: Transport) -> None:
    one, three = (run("ZBV", 1.0, num_steps=n, synchronous=synchronous, transport=transport) for n in (1, 3))
    if synchronous:
        assert three.makespan == pytest.approx(3 * one.makespan)
    elif transport is Transport.IDEAL:
        for row, spans in zip(three.reductions, three.spans, strict=True):
            for each in row:
                assert all(span.start >= each.end for span in spans if span.step > each.step)
