"""The strategies that users import: what they promise, and that they shrink to something readable."""

import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
from commands import process
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from zbpipe import CostModel, Op, OpKind, Placement, Schedule, generate
from zbpipe.schedule import registry
from zbpipe.testing import check_schedule, cost_models, placements, runnable_schedules, schedules

pytestmark = pytest.mark.usefixtures("short_search")

unshrunk = settings(phases=[Phase.generate], max_examples=2000)


@given(placements(), placements(ranks=3, stages_per_rank=2))
def test_placements_keep_to_what_is_fixed(some: Placement, fixed: Placement) -> None:
    assert 1 <= some.num_ranks <= 8
    assert fixed.num_ranks == 3
    assert all(len(fixed.stages_on(rank)) == 2 for rank in range(3))


@pytest.mark.parametrize(
    "wanted",
    [Placement.loop(2, 2), Placement.v(2), Placement((1, 0, 0)), Placement.v(3, 3)],
    ids=lambda placement: str(placement.rank_of),
)
def test_placements_of_all_shapes_come_up(wanted: Placement) -> None:
    ranks = wanted.num_ranks
    assert find(placements(ranks=ranks), lambda placement: placement == wanted, settings=unshrunk)


@given(schedules(max_ranks=5, max_microbatches=9))
def test_schedules_stay_within_the_bounds(schedule: Schedule) -> None:
    assert schedule.num_ranks <= 5
    assert schedule.num_microbatches <= 9
    algorithm = registry.resolve(schedule.name)
    assert schedule.placement == algorithm.place(schedule.num_ranks, len(schedule.placement.stages_on(0)))


@given(schedules("interleaved1f1b", ranks=3, microbatches=4, stages_per_rank=3), schedules(stages_per_rank=2))
def test_schedules_keep_to_what_is_fixed(looped: Schedule, two_stages: Schedule) -> None:
    assert looped == generate("Interleaved1F1B", 3, 4, stages_per_rank=3)
    assert all(len(two_stages.placement.stages_on(rank)) == 2 for rank in range(two_stages.num_ranks))


def test_every_registered_schedule_comes_up() -> None:
    for algorithm in registry.schedules().values():
        drawn = find(schedules(max_ranks=2, max_microbatches=2), lambda s, name=algorithm.name: s.name == name)  # type: ignore[misc]
        assert (drawn.num_ranks, drawn.num_microbatches) == (1, 1)


def test_four_stages_come_up_and_no_more() -> None:
    few = schedules(max_ranks=2, max_microbatches=2)
    assert find(few, lambda schedule: len(schedule.placement.stages_on(0)) == 4)
    with pytest.raises(NoSuchExample):
        find(few, lambda schedule: len(schedule.placement.stages_on(0)) not in (1, 2, 3, 4))


@given(runnable_schedules(), runnable_schedules(Placement.v(2), max_microbatches=2))
def test_what_is_called_runnable_is_valid(some: Schedule, fixed: Schedule) -> None:
    check_schedule(some)
    check_schedule(fixed)
    assert fixed.placement == Placement.v(2)
    assert fixed.num_microbatches <= 2


@given(st.data())
def test_costs_fit_the_placement_and_add_up_exactly(data: st.DataObject) -> None:
    placement = data.draw(placements())
    costs = data.draw(cost_models(placement))
    assert costs.num_stages == placement.num_stages
    assert min(costs.f) > 0
    hops = [costs.transfer(a, b) for a in range(placement.num_ranks) for b in range(placement.num_ranks)]
    working = [number for column in costs.working.values() for number in column]
    numbers = [*costs.f, *costs.i, *costs.w, *costs.activations, *hops, *working]
    assert sum(numbers) == sum(map(Fraction, numbers))
    assert list(costs.activations) == [
        costs.of(stage, OpKind.W).frees - costs.of(stage, OpKind.I).adds for stage in range(costs.num_stages)
    ]


@pytest.mark.parametrize(
    "wanted",
    [
        lambda costs: len({*costs.f}) == 3 and 0 in costs.w,
        lambda costs: costs.transfer(0, 1) != costs.transfer(1, 0),
        lambda costs: 0 in costs.i and costs.of(0, OpKind.I).adds < 0,
        lambda costs: costs.of(0, OpKind.I).adds > 0,
        lambda costs: len(costs.working) == 2,
    ],
)
def test_costs_differ_by_stage_and_link(wanted: Callable[[CostModel], bool]) -> None:
    assert find(cost_models(Placement.loop(3)), wanted, settings=unshrunk)


def test_the_simplest_examples_are_simple() -> None:
    assert find(schedules(max_ranks=3, max_microbatches=3), lambda _: True) == generate("1F1B", 1, 1)
    assert find(placements(), lambda _: True) == Placement.loop(1)
    costs = find(cost_models(Placement.loop(2)), lambda _: True)
    assert (costs.f, costs.i, costs.w) == ((0.125, 0.125),) * 3
    assert costs.transfer(0, 1) == 0
    assert not costs.links
    assert not costs.working
    sizes = schedules(max_ranks=4, max_microbatches=6)
    smallest = find(sizes, lambda schedule: schedule.num_ranks > 2 and schedule.num_microbatches > 4)
    assert smallest == generate("1F1B", 3, 5)


def test_check_schedule_lists_everything() -> None:
    """1F1B on 2 ranks keeps 2 and 1 microbatches."""
    schedule = generate("1F1B", 2, 2)
    check_schedule(schedule, memory_limit=2)
    rows = (schedule.ops[0][1:], (*schedule.ops[1], Op(1, OpKind.F, 2)))
    with pytest.raises(AssertionError) as error:
        check_schedule(Schedule("mine", schedule.placement, 2, rows), memory_limit=0.5)
    head, *lines = str(error.value).splitlines()
    assert head == "schedule mine, 4 finding(s):"
    assert [line.split(":")[0] for line in lines] == ["  foreign", "  missing", "  memory", "  memory"]


def test_only_those_who_ask_pay_for_hypothesis_and_torch() -> None:
    asks = "import sys, zbpipe, zbpipe.cli; assert 'hypothesis' not in sys.modules; import zbpipe.testing"
    process(sys.executable, "-c", f"{asks}; assert 'torch' not in sys.modules")


def test_without_hypothesis_the_error_says_what_to_do() -> None:
    program = "import sys; sys.modules['hypothesis'] = None; import zbpipe.testing"
    run = process(sys.executable, "-c", program, code=1)
    assert run.stderr.splitlines()[-1] == (
        "ImportError: zbpipe.testing needs hypothesis, which is not installed: pip install hypothesis"
    )
    assert "During handling" not in run.stderr
