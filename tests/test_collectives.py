"""FSDP's collectives in the simulator: during the first F of a stage, and during its last W or B."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulation import steps_in_a_row

from zbpipe import CostModel, Placement, Schedule, generate, simulate, validate
from zbpipe.costs.file import dump_costs, load_costs
from zbpipe.costs.job import JobCosts
from zbpipe.costs.layers import Layer, LayerCosts
from zbpipe.costs.model import GATHER, REDUCE, Transport
from zbpipe.planner.plan import plan
from zbpipe.planner.stages import hide_reductions
from zbpipe.schedule.ir import OpKind
from zbpipe.simulator.jitter import Jitter, step_times
from zbpipe.simulator.lower_bound import period_bound
from zbpipe.simulator.simulation import exposed_fsdp, how_runs, period
from zbpipe.simulator.timeline import Timeline
from zbpipe.testing import cost_models, schedules
from zbpipe.views.grid import grid
from zbpipe.views.html import drawing
from zbpipe.views.perfetto import perfetto
from zbpipe.views.report import report
from zbpipe.views.svg import svg

V = Placement.v(2)


def run(name: str, reduce: float, **how: object) -> Timeline:
    """Stages that take half a second for each of F, I and W."""
    return simulate(generate(name, 2, 4), replace(CostModel.uniform(V), reduce=reduce), **how)  # type: ignore[arg-type]


def exposed_reduction(timeline: Timeline) -> float:
    return timeline.makespan - max(row[-1].end for row in timeline.spans)


@pytest.mark.parametrize(
    ("reduce", "exposed"),
    # Rank 1 ends with the last W of both of its stages, one after the other.
    [(0.0, 0.0), (0.5, 0.0), (0.75, 0.5), (1.0, 1.0)],
)
def test_the_last_w_of_a_stage_hides_its_reduction(reduce: float, exposed: float) -> None:
    timeline = run("ZBV", reduce)
    assert [str(op) for op in timeline.schedule.ops[1][-2:]] == ["2W3", "1W3"]
    assert timeline.makespan == run("ZBV", 0.0).makespan + exposed
    assert (f", exposed {exposed:g}\n" in report(timeline)) == (reduce > 0)


@pytest.mark.parametrize("transport", [Transport.IDEAL, Transport.ONE_QUEUE])
def test_torchs_ranks_wait_for_each_reduction(transport: Transport) -> None:
    """Rank 1 ends with 2W3 and 1W3, and waits for a reduction after both."""
    timeline = run("ZBV", 1.0, transport=transport, overlaps_fsdp=False)
    assert [(span.start, span.end) for span in timeline.spans[1][-2:]] == [(11.5, 12.0), (13.0, 13.5)]
    assert timeline.makespan == 14.5
    assert [str(span.op) for span in timeline.critical_path[-2:]] == ["2W3", "1W3"]


def test_a_whole_backward_hides_more() -> None:
    schedule = generate("1F1B", 2, 4)
    costs = replace(CostModel.uniform(schedule.placement), reduce=(3.0, 1.0))
    timelines = [simulate(schedule, costs, overlaps_fsdp=each) for each in (True, False)]
    assert list(map(exposed_reduction, timelines)) == [1.0, 3.0]
    assert simulate(schedule, costs).critical_path[-1].op.stage == 0


def test_fsdp2_gathers_beside_the_first_f_of_torchs_1f1b() -> None:
    """Its hooks do: torch's class for one stage per rank has no gathers of its own. Only the reduction is exposed."""
    schedule = generate("1F1B", 2, 4)
    costs = replace(CostModel.uniform(schedule.placement), gather=1.0, reduce=0.5)
    step, without = (simulate(schedule, each, **how_runs("torch", 1)) for each in (costs, replace(costs, gather=0.0)))
    assert step.makespan == without.makespan
    assert without.makespan == simulate(schedule, replace(costs, gather=0.0)).makespan + 0.5
    assert simulate(schedule, costs, **how_runs("torch", 2)).makespan == step.makespan + 1


def test_the_first_f_runs_beside_the_gather() -> None:
    costs = replace(CostModel.uniform(V), gather=2.0)
    usual, with_gathers, as_torch = (
        simulate(generate("ZBV", 2, 4), each, overlaps_fsdp=overlaps)
        for each, overlaps in ((CostModel.uniform(V), True), (costs, True), (costs, False))
    )
    assert [(str(each), each.end) for each in with_gathers.gathers[0]] == [("0 gather", 2.0), ("3 gather", 4.0)]
    assert (with_gathers.spans[0][0][1:3], as_torch.spans[0][0][1:3]) == ((1.5, 2.0), (2.0, 2.5))
    # The gather of stage 3 ends at 4.
    assert exposed_fsdp(with_gathers) == with_gathers.makespan - usual.makespan == 2.5
    assert str(with_gathers.critical_path[0].op) == "2F0"
    # With F and I of 2 each, in place of 0.5, and none before the step.
    in_each_op = simulate(generate("ZBV", 2, 4), CostModel.uniform(V, 4, 4, 1)).makespan
    price = in_each_op / with_gathers.makespan - 1
    assert f"--zbpipe.fsdp-mode reshard): at least {price:.1%} longer" in report(with_gathers)
    assert "<title>3 gather: 2 to 4</title>" in svg(with_gathers)
    assert re.search(r"FSDP +gather", grid(with_gathers, 200).plain)
    drawn = drawing(with_gathers)
    (lane,) = drawn["ranks"][0]["lanes"]
    assert [drawn["kinds"][kind][0] for kind in lane["kind"]] == [" gather", " gather"]
    events = json.loads(perfetto(with_gathers))["traceEvents"]
    assert sum(each.get("cat") == "gather" for each in events) == 4


@st.composite
def with_collectives(draw: st.DrawFn) -> tuple[Schedule, CostModel]:
    schedule = draw(schedules(max_ranks=4, max_microbatches=6))
    seconds = st.tuples(*(st.integers(0, 40).map(lambda eighths: eighths / 8) for _ in schedule.placement.rank_of))
    costs = draw(cost_models(schedule.placement))
    return schedule, replace(costs, gather=draw(seconds), reduce=draw(seconds))


@given(with_collectives(), st.sampled_from(Transport))
def test_every_stage_is_gathered_before_use_and_reduced_after_it(
    case: tuple[Schedule, CostModel], transport: Transport
) -> None:
    schedule, costs = case
    overlap, torchs = (simulate(schedule, costs, transport=transport, overlaps_fsdp=each) for each in (True, False))
    for timeline in (overlap, torchs):
        for spans, row in zip(timeline.spans, timeline.collectives, strict=True):
            assert all(one.end <= other.start + 1e-9 for one, other in pairwise(row)), "one at a time"
            seconds = {
                (kind, stage): costs.of(stage, name).seconds
                for kind, name in (("gather", GATHER), ("reduce", REDUCE))
                for stage in {span.op.stage for span in spans}
            }
            assert {(each.kind, each.stage) for each in row} == {what for what, taken in seconds.items() if taken}
            for each in row:
                own = [span for span in spans if span.op.stage == each.stage]
                assert each.end - each.start >= seconds[each.kind, each.stage] - 1e-9
                if each.kind == "gather":
                    assert own[0].start >= (each.start if timeline.overlaps_fsdp else each.end)
                    assert own[0].end >= each.end - 1e-9
                else:
                    last = [span for span in own if span.op.kind in (OpKind.B, OpKind.W)][-1]
                    assert each.start >= (last.start if timeline.overlaps_fsdp else last.end)
                    assert each.end >= last.end
    assert overlap.lower_bound <= overlap.makespan * (1 + 1e-9)
    if transport in (Transport.IDEAL, Transport.BLOCKING):
        assert overlap.makespan <= torchs.makespan * (1 + 1e-9)
    if transport is Transport.IDEAL:
        assert step_times(schedule, costs, Jitter(), samples=1).p50 == pytest.approx(overlap.makespan)
        bound = period_bound(schedule.placement, costs, schedule.num_microbatches)
        assert bound <= period(schedule, costs) * (1 + 1e-9)


@given(with_collectives())
def test_other_ends_are_valid_and_no_longer(case: tuple[Schedule, CostModel]) -> None:
    schedule, costs = case
    changed = hide_reductions(schedule, costs)
    assert not validate(changed)
    assert simulate(changed, costs).makespan <= simulate(schedule, costs).makespan * (1 + 1e-9)
    kept = [[op for op in row if op.kind is OpKind.F] for row in schedule]
    assert kept == [[op for op in row if op.kind is OpKind.F] for row in changed]


@pytest.mark.parametrize("reduce", [0.25, 1.0, 2.0])
def test_plans_are_close_to_a_bound_that_counts_them(reduce: float) -> None:
    costs = replace(CostModel.uniform(Placement.v(4)), gather=reduce, reduce=reduce)
    found = plan(4, 8, costs, memory_limit=4, budget=1e4)
    assert found.lower_bound == found.timeline.lower_bound
    assert found.gap <= 0.03
    assert exposed_reduction(found.timeline) <= max(reduce - 0.5, 0.0)


def test_layers_add_up_in_a_stage(tmp_path: Any) -> None:
    layer = Layer(("layers.0",), f=1, i=1, w=1, activations=1, gather=0.5, reduce=0.25)
    plain = replace(layer, modules=("layers.1",), gather=0.0)
    costs = LayerCosts((layer, plain, layer)).stages((range(2), range(2, 3)))
    assert (costs.gather, costs.reduce) == ((0.5, 0.5), (0.5, 0.25))
    for job in (JobCosts(costs), JobCosts(LayerCosts((layer, plain)))):
        for name in ("costs.toml", "costs.json"):
            dump_costs(job, tmp_path / name)
            assert load_costs(tmp_path / name) == job


def test_a_rank_that_ends_early_hides_it_too() -> None:
    """The path to the step's end ends where the last reduction began."""
    table = "0F0,0I0,0W0\n1F0,1I0,1W0"
    costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(1, 1), reduce=(0, 4))
    timeline = simulate(Schedule.from_csv(table, "table"), costs)
    assert [str(span.op) for span in timeline.critical_path] == ["0F0", "1F0", "1I0", "1W0"]
    assert timeline.makespan == 7.0
    assert exposed_reduction(simulate(Schedule.from_csv(table, "table"), replace(costs, reduce=(0, 2)))) == 0.0


def test_the_next_step_waits_for_it() -> None:
    one = run("ZBV", 1.0)
    steps = steps_in_a_row(one.schedule, one.costs, list(map(len, one.schedule)), 12)
    sixth, last = (max(span.end for span in steps[n].values()) for n in (5, 11))
    assert period(one.schedule, one.costs) == pytest.approx((last - sixth) / 6)
